"""What a training step leaves in the metrics: its row, its trajectories and turns, its events. Computes and writes; decides nothing.

A batch accounts for every group that was taken or dropped since the step before, so that a filter does not flatter the curves:
success and reward are means over all of its trajectories, whether or not they were trained on.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import Any

import numpy as np

from rose_hpc.messages import StepTrained
from rose_hpc.metrics.writer import MetricsClient
from rose_hpc.rollout.groups import RolloutBatch, oldest_version
from rose_hpc.rollout.sampling import dead_groups_frac
from rose_hpc.rollout.trajectories import State
from rose_hpc.rollout.versions import SyncResult

OPTIMIZER_FIGURES = ("loss", "kl", "grad_norm", "clip_frac", "logprob_diff_mean", "entropy", "optimizer_steps", "train_s")


def record_batch(metrics: MetricsClient, step: int, batch: RolloutBatch) -> None:
    """Rows of the tables `turns` and `trajectories`."""
    for turn in batch.turns:
        metrics.record("turns", step=step, **vars(turn))
    index = 0
    for number, group in enumerate(batch.groups):
        for t in group.trajectories:
            metrics.record(
                "trajectories",
                step=step,
                trajectory=index,
                group=number,
                turns=t.turns,
                tokens=len(t.token_ids),
                reward=math.nan if t.reward is None else t.reward,
                success=int(bool(t.success)),
                outcome=t.state.value,
                end_s=group.end_s[t.index],
            )
            index += 1


def record_event(metrics: MetricsClient, kind: str, subject: str, detail: str) -> None:
    """A row of the table `events`."""
    metrics.record("events", time_s=time.time(), kind=kind, subject=subject, detail=detail)


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
    turns = batch.turns
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
