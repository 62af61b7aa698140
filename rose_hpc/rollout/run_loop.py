"""The training loop: sync a version, take a batch of rollouts, train, checkpoint. One loop for all sampling modes.

    version v serves ──▶ next batch ──▶ advantages ──▶ train ──▶ sync version v+1 ──▶ …
                            ▲  │             │ no row has a signal
                            │  │             └──▶ skip: no update, no new version, counted
                            │  └─ what is still running goes on while the trainer trains (dapo, async) ─┐
                            └───────────────────────────────────────────────────────────────────────────┘

Which groups are started, dropped and taken is decided in intake.py; under synchronous GRPO nothing runs while the trainer trains.
Steps are counted in optimisation opportunities: a skipped step is a step. Versions are counted in updates.
What walks every token of a batch runs in a thread: its groups no longer change, and what goes on meanwhile must not wait.
A step of which every trajectory failed ends the run: it would skip for ever. So does a record with holes: it must not look well.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rose_hpc.config import SamplingConfig, TrainConfig
from rose_hpc.errors import RunFailed
from rose_hpc.messages import CheckpointSaved, Row, SaveCheckpoint, StepTrained, TrainStep, pack_rows
from rose_hpc.metrics.writer import MetricsClient, record_event
from rose_hpc.rollout.groups import RolloutBatch
from rose_hpc.rollout.intake import rules_of
from rose_hpc.rollout.sampler import Plays, Sampler
from rose_hpc.rollout.sampling import is_zero_signal, training_rows
from rose_hpc.rollout.saved_rollouts import RolloutFiles
from rose_hpc.rollout.step_records import failure_counts, record_batch, sampling_detail, step_row, success_frac
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
    collector: Plays
    deliver: Callable[[int], Awaitable[SyncResult]]  # a version to all executors; returns when the dedicated ones serve it
    metrics: MetricsClient
    progress: Progress
    rollouts: RolloutFiles


class RunLoop:
    """Runs steps `first_step` … `steps` − 1, starting from policy version `version`."""

    def __init__(self, parts: LoopParts, seed: int, steps: int, sampling: SamplingConfig, train: TrainConfig) -> None:
        self._p, self._steps, self._sampling, self._train = parts, steps, sampling, train
        self._sampler = Sampler(parts.collector, sampling, seed)
        self._max_staleness = rules_of(sampling).max_staleness
        self._success: list[float] = []

    async def run(self, first_step: int, version: int) -> None:
        """Train to the end. Raises RoseError; every completed step is recorded by then, unless the writer is what failed."""
        try:
            await self._run(first_step, version)
        finally:
            await self._sampler.close()

    async def _run(self, first_step: int, version: int) -> None:
        self._p.progress.step, self._p.progress.steps = first_step, self._steps
        await self._sync(version)
        if first_step > 0:
            self._sampler.restore(await asyncio.to_thread(self._p.rollouts.load, first_step))
        for step in range(first_step, self._steps):
            version = await self._step(step, version)
            check_record(self._p.metrics)
            if (step + 1) % self._train.checkpoint_every == 0 or step + 1 == self._steps:
                await self._checkpoint(step + 1, version)

    async def _step(self, step: int, version: int) -> int:
        """One step; returns the policy version that serves afterwards."""
        start = time.monotonic()
        self._p.progress.phase = "rollout"
        batch = await self._sampler.next_batch(version)
        self._note_failures(step, batch)
        rows = await asyncio.to_thread(training_rows, batch.taken, self._sampling, version - self._max_staleness)
        trained: StepTrained | None = None
        synced: SyncResult | None = None
        if not is_zero_signal(rows):
            trained = await self._optimise(step, rows)
            synced = await self._sync(version + 1)
        if self._sampling.mode != "grpo":
            self._event("sampling", f"step {step}", await asyncio.to_thread(sampling_detail, batch, version, self._max_staleness))
        await record_batch(self._p.metrics, step, batch)
        self._p.metrics.record("steps", **step_row(step, version, batch, trained, synced, time.monotonic() - start))
        self._show(step, success_frac(batch), time.monotonic() - start)
        return version if synced is None else synced.version

    def _note_failures(self, step: int, batch: RolloutBatch) -> None:
        """One event per reason. Raises RunFailed when no trajectory is left."""
        reasons = failure_counts(batch)
        for reason, count in reasons.most_common():
            self._event("trajectories_failed", reason, str(count))
        if batch.trajectories and reasons.total() == len(batch.trajectories):
            reason, count = reasons.most_common(1)[0]
            raise RunFailed(
                f"every trajectory of step {step} failed",
                got=f"{count} times: {reason}",
                remedy="see the events, and logs/ in the run folder",
            )

    async def _optimise(self, step: int, rows: list[Row]) -> StepTrained:
        self._p.progress.phase = "train"
        packed = await asyncio.to_thread(pack_rows, rows)
        replies = await self._p.workers.call(
            self._p.trainers, lambda i: TrainStep(i, step, packed), StepTrained, self._train.step_deadline_s
        )
        trained = replies[self._p.trainers[0]]
        if trained.logprob_diff_mean > self._train.logprob_diff_alarm:
            detail = f"mean |trainer − engine| {trained.logprob_diff_mean:.3g} nat, alarm above {self._train.logprob_diff_alarm:g}"
            self._event("logprob_mismatch", f"step {step}", detail)
        return trained

    async def _sync(self, version: int) -> SyncResult:
        self._p.progress.phase = "sync"
        result = await self._p.deliver(version)
        self._p.progress.policy_version = version
        return result

    async def _checkpoint(self, steps_done: int, version: int) -> None:
        """The rollouts first: a trainers' checkpoint that is complete must have them beside it."""
        self._p.progress.phase = "checkpoint"
        await asyncio.to_thread(self._p.rollouts.save, steps_done, self._sampler.saved())
        replies = await self._p.workers.call(
            self._p.trainers, lambda i: SaveCheckpoint(i, steps_done, version), CheckpointSaved, self._train.step_deadline_s
        )
        save_s = max(r.save_s for r in replies.values())
        self._event("checkpoint", f"step {steps_done}", f"version {version}, {save_s:.3f} s")

    def _show(self, step: int, success: float, step_s: float) -> None:
        self._success.append(success)
        progress = self._p.progress
        progress.step, progress.success_frac, progress.step_s = step + 1, success, step_s
        progress.success_recent = float(np.mean(self._success[-10:]))

    def _event(self, kind: str, subject: str, detail: str) -> None:
        record_event(self._p.metrics, kind, subject, detail)


def check_record(metrics: MetricsClient) -> None:
    """Raises RunFailed when rows are missing from the metrics."""
    if metrics.failed is not None or metrics.dropped > 0:
        raise RunFailed(
            "the metrics writer failed",
            got=metrics.failed if metrics.failed is not None else f"{metrics.dropped} rows dropped",
            expected="every row of the run in its metrics file",
            remedy="see the space on the disk, and logs/ in the run folder; then resume",
        )
