"""The training loop: sync a version, roll out, train, checkpoint; synchronous GRPO.

    version v serves ──▶ collect trajectories ──▶ advantages ──▶ train ──▶ sync version v+1 ──▶ …
                                        │ no group has a signal
                                        └──▶ skip: no update, no new version, counted

Steps are counted in optimisation opportunities: a skipped step is a step. Versions are counted in updates.
A step of which every trajectory failed ends the run: it would skip for ever. So does a record with holes: it must not look well.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rose_hpc.config import SamplingConfig, TrainConfig
from rose_hpc.errors import RunFailed
from rose_hpc.messages import CheckpointSaved, SaveCheckpoint, StepTrained, TrainStep, pack_rows
from rose_hpc.metrics.writer import MetricsClient
from rose_hpc.rollout.collector import Collector
from rose_hpc.rollout.sampling import dead_groups_frac, group_rewards, is_zero_signal, training_rows
from rose_hpc.rollout.step_run import RolloutBatch
from rose_hpc.rollout.trajectories import State
from rose_hpc.rollout.versions import SyncResult
from rose_hpc.rollout.workers import WorkerPool


@dataclass
class Progress:
    """What the status route shows."""

    phase: str = "starting"
    step: int = 0
    steps: int = 0
    policy_version: int = -1
    success_frac: float | None = None
    success_recent: float | None = None
    step_s: float | None = None


@dataclass(frozen=True)
class LoopParts:
    """What the loop drives; assembled by the controller."""

    workers: WorkerPool
    trainers: Sequence[str]
    collector: Collector
    deliver: Callable[[int], Awaitable[SyncResult]]  # a version to all executors; returns when the dedicated ones serve it
    metrics: MetricsClient
    progress: Progress


class RunLoop:
    """Runs steps `first_step` … `steps` − 1, starting from policy version `version`."""

    def __init__(self, parts: LoopParts, seed: int, steps: int, sampling: SamplingConfig, train: TrainConfig) -> None:
        self._p, self._seed, self._steps = parts, seed, steps
        self._sampling, self._train = sampling, train
        self._success: list[float] = []

    async def run(self, first_step: int, version: int) -> None:
        """Train to the end. Raises RoseError; every completed step is recorded by then, unless the writer is what failed."""
        self._p.progress.step, self._p.progress.steps = first_step, self._steps
        await self._sync(version)
        for step in range(first_step, self._steps):
            version = await self._step(step, version)
            check_record(self._p.metrics)
            if (step + 1) % self._train.checkpoint_every == 0 or step + 1 == self._steps:
                await self._checkpoint(step + 1, version)

    async def _step(self, step: int, version: int) -> int:
        """One step; returns the policy version that serves afterwards."""
        start = time.monotonic()
        self._p.progress.phase = "rollout"
        batch = await self._p.collector.collect(step, self._group_seeds(step))
        self._note_failures(step, batch)
        rewards = group_rewards(batch.trajectories)
        trained: StepTrained | None = None
        synced: SyncResult | None = None
        if not is_zero_signal(rewards):
            trained = await self._optimise(step, batch)
            synced = await self._sync(version + 1)
        self._record(step, version, batch, dead_groups_frac(rewards), trained, synced, time.monotonic() - start)
        return version if synced is None else synced.version

    def _note_failures(self, step: int, batch: RolloutBatch) -> None:
        """One event per reason. Raises RunFailed when no trajectory is left."""
        reasons = failure_counts(batch)
        for reason, count in reasons.most_common():
            self._p.metrics.record("events", time_s=time.time(), kind="trajectories_failed", subject=reason, detail=str(count))
        if batch.trajectories and reasons.total() == len(batch.trajectories):
            reason, count = reasons.most_common(1)[0]
            raise RunFailed(
                f"every trajectory of step {step} failed",
                got=f"{count} times: {reason}",
                remedy="see the events, and logs/ in the run folder",
            )

    def _group_seeds(self, step: int) -> list[int]:
        """Environment seeds, one per group: a function of the run's seed and the step, so that a resumed step sees the same prompts."""
        return [int(s) for s in np.random.SeedSequence([self._seed, step]).generate_state(self._sampling.groups)]

    async def _optimise(self, step: int, batch: RolloutBatch) -> StepTrained:
        self._p.progress.phase = "train"
        rows = pack_rows(training_rows(batch.trajectories))
        replies = await self._p.workers.call(self._p.trainers, lambda i: TrainStep(i, step, rows), StepTrained, self._train.step_deadline_s)
        return replies[self._p.trainers[0]]

    async def _sync(self, version: int) -> SyncResult:
        self._p.progress.phase = "sync"
        result = await self._p.deliver(version)
        self._p.progress.policy_version = version
        return result

    async def _checkpoint(self, steps_done: int, version: int) -> None:
        self._p.progress.phase = "checkpoint"
        replies = await self._p.workers.call(
            self._p.trainers, lambda i: SaveCheckpoint(i, steps_done, version), CheckpointSaved, self._train.step_deadline_s
        )
        save_s = max(r.save_s for r in replies.values())
        self._p.metrics.record(
            "events", time_s=time.time(), kind="checkpoint", subject=f"step {steps_done}", detail=f"version {version}, {save_s:.3f} s"
        )

    def _record(
        self,
        step: int,
        version: int,
        batch: RolloutBatch,
        dead_frac: float,
        trained: StepTrained | None,
        synced: SyncResult | None,
        step_s: float,
    ) -> None:
        self._record_trajectories(step, batch)
        self._p.metrics.record("steps", **step_row(step, version, batch, dead_frac, trained, synced, step_s))
        success = success_frac(batch)
        self._success.append(success)
        progress = self._p.progress
        progress.step, progress.success_frac, progress.step_s = step + 1, success, step_s
        progress.success_recent = float(np.mean(self._success[-10:]))

    def _record_trajectories(self, step: int, batch: RolloutBatch) -> None:
        for turn in batch.turns:
            self._p.metrics.record("turns", step=step, **vars(turn))
        for index, t in enumerate(batch.trajectories):
            self._p.metrics.record(
                "trajectories",
                step=step,
                trajectory=index,
                group=t.group,
                turns=t.turns,
                tokens=len(t.token_ids),
                reward=math.nan if t.reward is None else t.reward,
                success=int(bool(t.success)),
                outcome=t.state.value,
                end_s=batch.end_s[index],
            )


def check_record(metrics: MetricsClient) -> None:
    """Raises RunFailed when rows are missing from the metrics."""
    if metrics.failed is not None or metrics.dropped > 0:
        raise RunFailed(
            "the metrics writer failed",
            got=metrics.failed if metrics.failed is not None else f"{metrics.dropped} rows dropped",
            expected="every row of the run in its metrics file",
            remedy="see the space on the disk, and logs/ in the run folder; then resume",
        )


def failure_counts(batch: RolloutBatch) -> Counter[str]:
    """How many trajectories failed, by what went wrong and was got: the first two lines of the reason."""
    reasons = [t.failure or "" for t in batch.trajectories if t.state is State.FAILED]
    return Counter(" ".join(" ".join(reason.splitlines()[:2]).split()) for reason in reasons)


def success_frac(batch: RolloutBatch) -> float:
    """Fraction of all trajectories that solved the task; a failed trajectory did not."""
    return float(np.mean([bool(t.success) for t in batch.trajectories]))


def step_row(
    step: int, version: int, batch: RolloutBatch, dead_frac: float, trained: StepTrained | None, synced: SyncResult | None, step_s: float
) -> dict[str, Any]:
    """The row of the table `steps`. Figures of the optimiser are absent (NaN) where the step was skipped."""
    done = [t for t in batch.trajectories if t.reward is not None]
    row: dict[str, Any] = {
        "step": step,
        "policy_version": version,
        "time_s": time.time(),
        "trajectories": len(batch.trajectories),
        "reward_mean": float(np.mean([t.reward for t in done])) if done else math.nan,
        "success_frac": success_frac(batch),
        "turns_mean": float(np.mean([t.turns for t in batch.trajectories])),
        "dead_groups_frac": dead_frac,
        "optimizer_steps": 0,
        "skipped": int(trained is None),
        "rollout_s": batch.rollout_s,
        "train_s": 0.0,
        "sync_s": 0.0,
        "step_s": step_s,
        "rollout_tokens_dedicated": batch.new_tokens("dedicated"),
        "rollout_tokens_opportunistic": batch.new_tokens("opportunistic"),
        "prompt_tokens": sum(t.prompt_tokens for t in batch.turns),
        "cached_prompt_tokens": sum(t.cached_tokens for t in batch.turns),
        "wire_bytes": 0,
    }
    if trained is not None:
        row |= {
            name: getattr(trained, name)
            for name in ("loss", "kl", "grad_norm", "clip_frac", "logprob_diff_mean", "entropy", "optimizer_steps", "train_s")
        }
    if synced is not None:
        row |= {"wire_bytes": synced.wire_bytes, "sync_s": synced.sync_s}
    return row
