"""Read the metrics of a run: pandas frames and a summary, while the run goes on, after it, and after it was killed.

Attempts are joined: where a later attempt did a step again (it resumed from a checkpoint), the earlier attempt's rows of that
step and of all after it are left out. Syncs, events and serving requests are kept, because they did happen.
A `Run` is a snapshot: each table is read once, when it is first asked for. Make a new one to see newer rows.
Only the summary is decided here; how it looks is decided in report.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rose_hpc.errors import UsageError
from rose_hpc.metrics.files import Header, attempt_files, read_header, read_table
from rose_hpc.metrics.schema import DEVICES, EVENTS, SERVING_REQUESTS, STEPS, SYNCS, TRAJECTORIES, TURNS, Column, Table
from rose_hpc.metrics.serving import percentiles, spans_s, weighted_mean_or_none

WINDOW_STEPS = 10  # steps at either end of a run over which the summary averages success
DEVICE_FRACTIONS = ("serving_busy_frac", "rollout_busy_frac", "gate_held_frac")


class Run:
    """The metrics of a run folder, or of one file: a metrics file, or what the client of a serving engine recorded.

    Frames have the columns of the schema, texts decoded and flags as bool, and `attempt`; rows in the order of their writing.
    Raises UsageError: no metrics there, not a metrics file, or written by a newer rose_hpc.

        Run("runs/quickstart").steps.plot("step", "success_frac")
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        files = list(attempt_files(self.path).values()) if self.path.is_dir() else [self.path]
        if not files:
            raise UsageError("no metrics here", got=f"no metrics.h5 in {self.path}", remedy="give the folder of a run that has started")
        self.attempts = tuple(read_header(file) for file in files)
        serving_files = attempt_files(self.path, "serving").values() if self.path.is_dir() else files
        self._serving_files = tuple(read_header(file) for file in serving_files)
        self.name = self.attempts[-1].run

    @cached_property
    def steps(self) -> pd.DataFrame:
        return self._frame(STEPS)

    @cached_property
    def syncs(self) -> pd.DataFrame:
        return self._frame(SYNCS)

    @cached_property
    def turns(self) -> pd.DataFrame:
        return self._frame(TURNS)

    @cached_property
    def trajectories(self) -> pd.DataFrame:
        return self._frame(TRAJECTORIES)

    @cached_property
    def events(self) -> pd.DataFrame:
        return self._frame(EVENTS)

    @cached_property
    def devices(self) -> pd.DataFrame:
        return self._frame(DEVICES)

    @cached_property
    def serving_requests(self) -> pd.DataFrame:
        return _joined(SERVING_REQUESTS, self._serving_files, [read_table(f.path, SERVING_REQUESTS) for f in self._serving_files])

    @property
    def has_serving(self) -> bool:
        """There is a serving side: requests to it, a file for them, or a device that it lends."""
        awaited = self.path.is_dir() and bool(self._serving_files)
        return awaited or bool(len(self.serving_requests)) or bool(len(self.devices))

    @property
    def trains(self) -> bool:
        """There is a training side: false for a file with requests to a serving engine and nothing else."""
        return not self.has_serving or bool(len(self.steps)) or bool(len(self.events))

    def device_means(self) -> pd.DataFrame:
        """Row per device: time-weighted means of DEVICE_FRACTIONS, and the latest quota."""
        parts = {str(name): rows for name, rows in self.devices.groupby("device", sort=True)}
        means = {name: {**_device_means(rows), "quota": rows["quota"].iloc[-1]} for name, rows in parts.items()}
        return pd.DataFrame.from_dict(means, orient="index", columns=[*DEVICE_FRACTIONS, "quota"])

    def summary(self) -> dict[str, Any]:
        """The run in a few figures, all of plain Python types. None: nothing to average yet.

        Token counts are of the steps that count; wall_s includes the work that a resume did again. `serving` is there where there is
        a serving side.
        """
        steps = self.steps
        training = {
            "steps": len(steps),
            "success_first10": mean_or_none(steps["success_frac"].head(WINDOW_STEPS)),
            "success_last10": mean_or_none(steps["success_frac"].tail(WINDOW_STEPS)),
            "rollout_tokens": _rollout_tokens(steps),
            "weights": _weights(self.syncs),
            "skipped_steps": int(steps["skipped"].sum()),
            "logprob_diff_mean": mean_or_none(steps["logprob_diff_mean"]),
            "wall_s": self.wall_s,
            "complete": self.complete,
        }
        return {**training, "serving": _serving(self.serving_requests, self.devices)} if self.has_serving else training

    @cached_property
    def wall_s(self) -> float:
        """Seconds from the start of each attempt to its last step, sync or event, added up."""
        return float(sum(self._attempt_s(i) for i in range(len(self.attempts))))

    @property
    def complete(self) -> bool:
        """The latest attempt ran to its end."""
        latest = self.events[self.events["attempt"] == self.attempts[-1].attempt]
        return bool((latest["kind"] == "run_finished").any())

    def _attempt_s(self, index: int) -> float:
        header = self.attempts[index]
        times_s = np.concatenate([read_table(header.path, t)["time_s"] for t in (STEPS, SYNCS, EVENTS)]) - header.started_s
        return float(np.nanmax(times_s, initial=0.0))

    def _frame(self, table: Table) -> pd.DataFrame:
        return _joined(table, self.attempts, [self._rows(i, table) for i in range(len(self.attempts))])

    def _rows(self, index: int, table: Table) -> NDArray[np.void]:
        rows = read_table(self.attempts[index].path, table)
        if "step" not in table.column_names:
            return rows
        redone_from = min(self._first_steps[index + 1 :], default=np.inf)
        return rows[rows["step"] < redone_from]

    @cached_property
    def _first_steps(self) -> list[float]:
        """The first step that each attempt worked on, infinity where it has none yet. Unread for the first attempt."""
        return [np.inf, *(_first_step(header.path) for header in self.attempts[1:])]


def _joined(table: Table, headers: Sequence[Header], parts: Sequence[NDArray[np.void]]) -> pd.DataFrame:
    """One frame from the rows of each file."""
    attempts = np.repeat(np.array([header.attempt for header in headers], np.int64), [len(part) for part in parts])
    rows = np.concatenate([np.empty(0, table.dtype), *parts])
    columns = {c.name: _column(rows[c.name], c) for c in table.columns}
    return pd.DataFrame({**columns, "attempt": attempts})


def _first_step(path: Path) -> float:
    """Turns and trajectories count as well: they are written before the step that they belong to."""
    return float(min(read_table(path, t)["step"].min(initial=np.iinfo(np.int64).max) for t in (STEPS, TRAJECTORIES, TURNS)))


def _column(values: NDArray[Any], column: Column) -> Any:
    if values.dtype.kind == "S":
        return _decoded(values)
    return values.astype(bool) if column.unit == "bool" else values


def _decoded(values: NDArray[np.bytes_]) -> Any:
    """Each distinct text is decoded once: executors and outcomes repeat a thousandfold."""
    distinct, codes = np.unique(values, return_inverse=True)
    texts = pd.array([text.decode("utf-8", "replace") for text in distinct], dtype="str")
    return texts.take(codes)


def mean_or_none(values: pd.Series[Any]) -> float | None:
    """Mean of the values that are not NaN."""
    known = values.dropna()
    return float(known.mean()) if len(known) else None


def _rollout_tokens(steps: pd.DataFrame) -> dict[str, int]:
    dedicated = int(steps["rollout_tokens_dedicated"].sum())
    opportunistic = int(steps["rollout_tokens_opportunistic"].sum())
    return {"total": dedicated + opportunistic, "dedicated": dedicated, "opportunistic": opportunistic}


def _weights(syncs: pd.DataFrame) -> dict[str, int]:
    """Of a version that two attempts synced, the later attempt counts. Of a receiver that needed a second try, the last verdict.

    verified: every receiver recomputed the digest; probed: as much, but that some engine's weights are packed and could only be probed.
    """
    latest = syncs[syncs["attempt"] == syncs.groupby("version")["attempt"].transform("max")]
    verdicts = latest.drop_duplicates(["version", "receiver"], keep="last")
    good = verdicts.groupby("version")["verified"].all()
    digested = (verdicts["proof"] == "digest").groupby(verdicts["version"]).all()
    at_least_probed = verdicts["proof"].isin(["digest", "probe"]).groupby(verdicts["version"]).all()
    return {
        "versions": int(latest["version"].nunique()),
        "verified": int((good & digested).sum()),
        "probed": int((good & at_least_probed & ~digested).sum()),
        "wire_bytes": int(latest["wire_bytes"].sum()),
        "image_bytes": int(latest["image_bytes"].sum()),
    }


def _serving(requests: pd.DataFrame, devices: pd.DataFrame) -> dict[str, Any]:
    return {
        "requests": len(requests),
        "failed_requests": int((~requests["ok"]).sum()),
        **percentiles("ttft", requests["ttft_s"], (50, 99)),
        **percentiles("tpot", requests["tpot_s"], (50, 99)),
        "slo_violations": int(requests["violates_slo"].sum()),
        "busy_frac": _device_means(devices)["serving_busy_frac"],
    }


def _device_means(devices: pd.DataFrame) -> dict[str, float | None]:
    """Each row weighs as long as it speaks for; time between attempts does not count."""
    weights = spans_s(devices["time_s"], list(zip(devices["device"], devices["attempt"], strict=True)))
    return {name: weighted_mean_or_none(devices[name], weights) for name in DEVICE_FRACTIONS}
