"""The metrics schema: which tables a run writes, and the type, unit and meaning of every column.

Invariants: every column has a unit and a description; texts have a fixed length, so that HDF5 can append under SWMR; a row
that passes `Table.row` always fits `Table.array`.
Pure: it opens no file and reads no clock. Any change to a table, other than to its prose, raises SCHEMA_VERSION.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rose_hpc.errors import RoseError

SCHEMA_VERSION: Final = 3  # 2: serving_requests, devices; 3: how, changes and proof in syncs

Value = int | float | str
ELLIPSIS: Final = "…"  # last character of a text that was too long for its column


class MetricsError(RoseError):
    """A row does not fit the schema."""


@dataclass(frozen=True)
class Column:
    """One column. dtype: numpy code, 'S64' for UTF-8 text of at most 64 bytes. default None: every row must give a value."""

    name: str
    dtype: str
    unit: str
    description: str
    default: Value | None = None

    def check(self, value: object) -> Value:
        """The value as int, float or str, texts cut to the column's bytes. Raises MetricsError on another type or range."""
        kind = self.dtype[0]
        if kind == "f" and isinstance(value, int | float | np.integer | np.floating):
            return float(value)
        if kind in "iu" and isinstance(value, int | np.integer | np.bool_):
            return self._in_range(int(value))
        if kind == "S" and isinstance(value, str):
            return _cut(value, int(self.dtype[1:]))
        expected = {"f": "a number", "i": "an integer", "u": "an integer", "S": "a text"}[kind]
        raise MetricsError(f"column {self.name} does not take this value", got=f"{value!r} ({type(value).__name__})", expected=expected)

    def _in_range(self, value: int) -> int:
        limits = np.iinfo(self.dtype)
        if not limits.min <= value <= limits.max:
            raise MetricsError(f"column {self.name} is out of range", got=value, expected=f"{limits.min} to {limits.max}")
        return value


def _cut(text: str, limit_bytes: int) -> str:
    """Valid UTF-8 text of at most limit_bytes; cut between characters, and marked as cut."""
    raw = text.encode("utf-8", "replace")
    if len(raw) > limit_bytes:
        return raw[: limit_bytes - len(ELLIPSIS.encode())].decode("utf-8", "ignore") + ELLIPSIS
    return raw.decode()


@dataclass(frozen=True)
class Table:
    """One table: its columns in file order."""

    name: str
    description: str
    columns: tuple[Column, ...]

    @property
    def dtype(self) -> np.dtype[np.void]:
        """Structured dtype of one row."""
        return np.dtype([(c.name, c.dtype) for c in self.columns])

    @property
    def column_names(self) -> list[str]:
        return [c.name for c in self.columns]

    def row(self, values: Mapping[str, object]) -> list[Value]:
        """One complete row in column order; absent columns take their default.

        Raises MetricsError: unknown column, a column without default that is absent, a value of the wrong type or range.
        """
        unknown = values.keys() - set(self.column_names)
        if unknown:
            raise MetricsError(f"table {self.name} has no such column", got=sorted(unknown), expected=self.column_names)
        missing = [c.name for c in self.columns if c.default is None and c.name not in values]
        if missing:
            raise MetricsError(f"a row of table {self.name} is incomplete", got=sorted(values), expected=f"also {missing}")
        return [c.check(values.get(c.name, c.default)) for c in self.columns]

    def array(self, rows: Iterable[Sequence[Value]]) -> NDArray[np.void]:
        """Rows of `row` as a structured array [rows]. Floats beyond a column's float32 become infinite."""
        packed = [tuple(v.encode() if isinstance(v, str) else v for v in row) for row in rows]
        with np.errstate(over="ignore"):
            return np.array(packed, self.dtype)


def table(name: str) -> Table:
    """The table of that name. Raises MetricsError, which lists the valid ones."""
    if name not in TABLES:
        raise MetricsError("unknown metrics table", got=name, expected=sorted(TABLES))
    return TABLES[name]


def _count(name: str, description: str, unit: str = "1") -> Column:
    return Column(name, "i8", unit, description)


def _flag(name: str, description: str) -> Column:
    return Column(name, "u1", "bool", description)


def _seconds(name: str, description: str) -> Column:
    return Column(name, "f8", "s", description, default=math.nan)


def _instant(name: str, description: str) -> Column:
    return Column(name, "f8", "s since 1970-01-01 UTC", description, default=math.nan)


def _real(name: str, unit: str, description: str) -> Column:
    return Column(name, "f4", unit, description, default=math.nan)


def _name(name: str, size_bytes: int, description: str) -> Column:
    return Column(name, f"S{size_bytes}", "text", description)


def _remark(name: str, size_bytes: int, description: str) -> Column:
    return Column(name, f"S{size_bytes}", "text", description, default="")


_STEP = _count("step", "training step, from 0")
_TRAJECTORY = _count("trajectory", "index of the trajectory within its step")

STEPS = Table(
    "steps",
    "One row per training step: rollout, optimisation, weight transfer.",
    (
        _STEP,
        _count("policy_version", "version of the weights that the rollouts of this step used"),
        _instant("time_s", "end of the step"),
        _count("trajectories", "trajectories sampled"),
        _real("reward_mean", "reward", "mean reward of the trajectories"),
        _real("success_frac", "fraction", "trajectories that reached their goal"),
        _real("turns_mean", "turns", "mean number of turns of a trajectory"),
        _real("dead_groups_frac", "fraction", "groups whose trajectories all have the same reward, hence no gradient"),
        _real("loss", "1", "mean policy loss; NaN where the step was skipped"),
        _real("kl", "nat", "estimate of KL(engine ‖ trainer) per token before the step; NaN where skipped"),
        _real("grad_norm", "1", "global gradient norm before clipping; NaN where skipped"),
        _real("clip_frac", "fraction", "tokens whose probability ratio was clipped; NaN where skipped"),
        _real("logprob_diff_mean", "nat", "mean |trainer − engine| log-probability of sampled tokens before the step; NaN where skipped"),
        _real("entropy", "nat", "mean entropy of the policy per sampled token; NaN where skipped"),
        _count("optimizer_steps", "optimiser steps taken"),
        _flag("skipped", "no group gave a gradient: no optimiser step was taken"),
        _seconds("rollout_s", "sampling the trajectories"),
        _seconds("train_s", "forward, backward and optimiser"),
        _seconds("sync_s", "publishing the new weights until every executor serves them"),
        _seconds("step_s", "the whole step"),
        _count("rollout_tokens_dedicated", "tokens sampled on dedicated executors", "tokens"),
        _count("rollout_tokens_opportunistic", "tokens sampled on opportunistic executors", "tokens"),
        _count("prompt_tokens", "prompt tokens sent, summed over turns", "tokens"),
        _count("cached_prompt_tokens", "prompt tokens that a prefix cache served", "tokens"),
        _count("wire_bytes", "weight bytes sent to the executors after this step", "bytes"),
    ),
)

SYNCS = Table(
    "syncs",
    "One row per policy version and receiver.",
    (
        _count("version", "policy version"),
        _instant("time_s", "the receiver serves the version, or has refused it"),
        _name("receiver", 64, "relay (arrived in its arena) or executor (loaded)"),
        _name("how", 16, "relay: delta or keyframe; executor: sparse, dense or reload"),
        _count("wire_bytes", "bytes that crossed the network to this receiver", "bytes"),
        _count("image_bytes", "bytes of the weights that the receiver holds", "bytes"),
        _seconds("transfer_s", "from the trainer's arena to the receiver's"),
        _seconds("apply_s", "relay: into the image of its arena; executor: from there into the engine, proof included"),
        _seconds("pause_s", "generation stood still"),
        _count("changes", "elements (16-bit lanes) that were overwritten"),
        Column("digest", "u8", "1", "order-independent digest of the bits that arrived or were loaded, mod 2^64"),
        _name(
            "proof",
            16,
            "digest: recomputed from what is there; probe: packed weights, read back; partial: not all of them",
        ),
        _flag("verified", "the digest is the trainer's"),
    ),
)

TURNS = Table(
    "turns",
    "One row per turn that an executor finished.",
    (
        _STEP,
        _TRAJECTORY,
        _count("turn", "index of the turn within its trajectory"),
        _name("executor", 64, "executor that sampled the turn"),
        _name("kind", 16, "dedicated or opportunistic"),
        _instant("start_s", "the turn was sent to the executor"),
        _instant("end_s", "its tokens were back"),
        _count("prompt_tokens", "tokens of the prompt", "tokens"),
        _count("cached_tokens", "prompt tokens that the prefix cache served", "tokens"),
        _count("new_tokens", "tokens sampled", "tokens"),
        _count("policy_version", "version that sampled the last token"),
    ),
)

TRAJECTORIES = Table(
    "trajectories",
    "One row per trajectory that ended.",
    (
        _STEP,
        _TRAJECTORY,
        _count("group", "index of its prompt within the step"),
        _count("turns", "turns taken", "turns"),
        _count("tokens", "tokens, prompts and observations included", "tokens"),
        _real("reward", "reward", "total reward"),
        _flag("success", "the goal was reached"),
        _name("outcome", 32, "done or failed"),
        _instant("end_s", "end of the trajectory"),
    ),
)

EVENTS = Table(
    "events",
    "What happened besides steps: life cycle, checkpoints, executors coming and going, alarms.",
    (
        _instant("time_s", "when"),
        _name("kind", 32, "run_started, run_finished, run_failed, resumed, checkpoint, executor_up, digest_mismatch, …"),
        _remark("subject", 64, "whom or what it concerns"),
        _remark("detail", 256, "for people to read"),
    ),
)

SERVING_REQUESTS = Table(
    "serving_requests",
    "One row per request to the serving engine, as its client saw it; in the order in which they ended.",
    (
        _instant("time_s", "arrival: when the request was due, whether or not the client was late"),
        _count("request", "index of the request in the traffic, from 0"),
        _count("prompt_tokens", "tokens of the prompt", "tokens"),
        _count("output_tokens", "tokens asked for", "tokens"),
        _count("new_tokens", "tokens received", "tokens"),
        _seconds("ttft_s", "from the arrival to the first token at the client; NaN where none came"),
        _seconds("tpot_s", "mean time per token after the first; NaN for less than two tokens"),
        _seconds("e2e_s", "from the arrival to the end of the response, or of the attempt"),
        _seconds("send_lag_s", "from the arrival until the client sent it"),
        _flag("ok", "every token asked for came"),
        _flag("violates_slo", "time to the first token or per token over its objective, or not ok"),
        _name("outcome", 64, "ok, timeout, or what went wrong"),
    ),
)

DEVICES = Table(
    "devices",
    "One row per device that serving lends and per sample. Fractions are of the time since the device's row before.",
    (
        _instant("time_s", "when the sample was taken"),
        _name("device", 64, "the device"),
        _real("serving_busy_frac", "fraction", "the serving engine ran on the device"),
        _real("rollout_busy_frac", "fraction", "the rollout engine ran on the device"),
        _real("gate_held_frac", "fraction", "the gate kept the rollout engine from running"),
        _remark("quota", 64, "what limits the rollout engine besides the gate"),
    ),
)

TABLES: Final[dict[str, Table]] = {t.name: t for t in (STEPS, SYNCS, TURNS, TRAJECTORIES, EVENTS, SERVING_REQUESTS, DEVICES)}
