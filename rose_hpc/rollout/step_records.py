"""What a training step leaves in the metrics: its row, its trajectories and turns, its events. Computes and writes; decides nothing.

A batch accounts for every group that was taken or dropped since the step before, so that a filter does not flatter the curves:
success and reward are means over all of its trajectories, whether or not they were trained on.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from rose_hpc.errors import RunFailed
from rose_hpc.messages import StepTrained
from rose_hpc.metrics.writer import QUEUE_ROWS, MetricsClient
from rose_hpc.rollout.groups import RolloutBatch, oldest_version
from rose_hpc.rollout.sampling import dead_groups_frac
from rose_hpc.rollout.trajectories import State
from rose_hpc.rollout.versions import SyncResult

OPTIMIZER_FIGURES = ("loss", "kl", "grad_norm", "clip_frac", "logprob_diff_mean", "entropy", "optimizer_steps", "train_s")
ROWS_AT_ONCE = 256
MOST_QUEUED = QUEUE_ROWS // 2  # rows; the other half is for whoever else records meanwhile
ROOM_DEADLINE_S = 60.0  # a writer that has taken nothing for so long hangs


async def record_batch(metrics: MetricsClient, step: int, batch: RolloutBatch) -> None:
    """Rows of the tables `turns` and `trajectories`, as many as there are: no faster than the writer takes them, and not all at once.

    Raises RunFailed: the writer does not keep up.
    """
    for count, (table, row) in enumerate(_rows(step, batch)):
        if count % ROWS_AT_ONCE == 0:
            await _until_room(metrics)
        metrics.record(table, **row)


def _rows(step: int, batch: RolloutBatch) -> Iterator[tuple[str, dict[str, Any]]]:
    first = 0  # index in the batch of the group's first trajectory
    for number, group in enumerate(batch.groups):
        for turn in group.turns:
            yield "turns", {**vars(turn), "step": step, "trajectory": first + turn.trajectory}
        for index, t in enumerate(group.trajectories, first):
            yield (
                "trajectories",
                {
                    "step": step,
                    "trajectory": index,
                    "group": number,
                    "turns": t.turns,
                    "tokens": len(t.token_ids),
                    "reward": math.nan if t.reward is None else t.reward,
                    "success": int(bool(t.success)),
                    "outcome": t.state.value,
                    "end_s": group.end_s[t.index],
                },
            )
        first += len(group.trajectories)


async def _until_room(metrics: MetricsClient) -> None:
    """Give way to the event loop, and wait while much is queued. A writer that has failed takes nothing: what it drops is counted."""
    await asyncio.sleep(0)
    end_s = time.monotonic() + ROOM_DEADLINE_S
    while metrics.backlog > MOST_QUEUED and metrics.failed is None:
        if time.monotonic() > end_s:
            raise RunFailed(
                "the metrics writer does not keep up",
                got=f"{metrics.backlog} rows wait after {ROOM_DEADLINE_S:g} s",
                remedy="see the disk, and logs/ in the run folder; then resume",
            )
        await asyncio.sleep(0.01)


def failure_counts(batch: RolloutBatch) -> Counter[str]:
    """How many trajectories failed, by what went wrong and was got: the first two lines of the reason."""
    reasons = [t.failure or "" for t in batch.trajectories if t.state is State.FAILED]
    return Counter(" ".join(" ".join(reason.splitlines()[:2]).split()) for reason in reasons)


def success_frac(batch: RolloutBatch) -> float:
    """Fraction of all trajectories that solved the task; a failed trajectory did not."""
    return float(np.mean([bool(t.success) for t in batch.trajectories]))


def staleness(batch: RolloutBatch, version: int) -> list[int]:
    """Of each trajectory of the groups taken that ended well: how many versions its oldest token is behind this one."""
    oldest = [oldest_version(t) for group in batch.taken for t in group.done]
    return [version - v for v in oldest if v is not None]


def sampling_detail(batch: RolloutBatch, version: int, max_staleness: int) -> str:
    """How the batch came about, for people to read. Staleness is that of what is trained on."""
    behind = staleness(batch, version)
    trained = [s for s in behind if s <= max_staleness]
    most, mean = (max(trained), np.mean(trained)) if trained else (0, 0.0)
    return (
        f"{batch.started} prompts started; {len(batch.taken)} groups taken, {len(behind) - len(trained)} stale trajectories of them not; "
        f"{len(batch.dead)} groups without variance and {len(batch.stale)} stale dropped; "
        f"staleness {mean:.2f} mean, {most} most"
    )


def step_row(
    step: int, version: int, batch: RolloutBatch, trained: StepTrained | None, synced: SyncResult | None, step_s: float
) -> dict[str, Any]:
    """The row of the table `steps`. Figures of the optimiser are absent (NaN) where the step was skipped."""
    rewards = [t.reward for t in batch.trajectories if t.reward is not None]
    turns = [turn for group in batch.groups for turn in group.turns]
    row: dict[str, Any] = {
        "step": step,
        "policy_version": version,
        "time_s": time.time(),
        "trajectories": len(batch.trajectories),
        "reward_mean": float(np.mean(rewards)) if rewards else math.nan,
        "success_frac": success_frac(batch),
        "turns_mean": float(np.mean([t.turns for t in batch.trajectories])),
        "dead_groups_frac": dead_groups_frac(batch.groups),
        "optimizer_steps": 0,
        "skipped": int(trained is None),
        "rollout_s": batch.rollout_s,
        "train_s": 0.0,
        "sync_s": 0.0,
        "step_s": step_s,
        "rollout_tokens_dedicated": batch.new_tokens("dedicated"),
        "rollout_tokens_opportunistic": batch.new_tokens("opportunistic"),
        "prompt_tokens": sum(t.prompt_tokens for t in turns),
        "cached_prompt_tokens": sum(t.cached_tokens for t in turns),
        "wire_bytes": 0,
    }
    if trained is not None:
        row |= {name: getattr(trained, name) for name in OPTIMIZER_FIGURES}
    if synced is not None:
        row |= {"wire_bytes": synced.wire_bytes, "sync_s": synced.sync_s}
    return row
