"""The training loop over scripted parts: what cannot be trained on, or is not recorded, ends the run."""

import asyncio

import pytest

from rose_hpc.config import SamplingConfig, TrainConfig
from rose_hpc.errors import RunFailed
from rose_hpc.messages import CheckpointSaved
from rose_hpc.rollout.run_loop import LoopParts, Progress, RunLoop
from rose_hpc.rollout.step_run import RolloutBatch
from rose_hpc.rollout.trajectories import Trajectory
from rose_hpc.rollout.versions import SyncResult


class Metrics:
    """Rows in memory; `failed` and `dropped` as the writer's client tells them."""

    def __init__(self):
        self.rows, self.failed, self.dropped = [], None, 0

    def record(self, table, **row):
        self.rows.append((table, row))

    def events(self, kind):
        return [(r["subject"], r["detail"]) for t, r in self.rows if t == "events" and r["kind"] == kind]


class Workers:
    async def call(self, ids, command, kind, deadline_s):
        assert kind is CheckpointSaved  # every step here is without a signal
        return {w: CheckpointSaved(1, 0.1) for w in ids}


class Collector:
    """Four trajectories a step; those in `failures` fail for that reason, the others are solved."""

    def __init__(self, failures, after_step=lambda step: None):
        self.failures, self.after_step, self.steps = failures, after_step, 0

    async def collect(self, step, seeds):
        self.steps += 1
        trajectories = [Trajectory(f"s{step}.{i}", 0, i) for i in range(4)]
        for i, trajectory in enumerate(trajectories):
            trajectory.open([1])
            if i in self.failures:
                trajectory.fail(self.failures[i])
                continue
            trajectory.start_turn("a", trajectory.next_request_id())
            trajectory.turn_sampled([1], [-0.1], [0])
            trajectory.finish(1.0, True)
        self.after_step(step)
        return RolloutBatch(trajectories, end_s=dict.fromkeys(range(4), 0.0))


def run_with(collector, metrics, steps=3):
    async def deliver(version):
        return SyncResult(version, 1, 0, 0.0)

    parts = LoopParts(Workers(), ["trainer-0"], collector, deliver, metrics, Progress())
    loop = RunLoop(parts, 0, steps, SamplingConfig(groups=1, group_size=4), TrainConfig())
    asyncio.run(asyncio.wait_for(loop.run(0, 0), 20))


def test_failed_trajectories_are_recorded_by_reason_and_the_run_goes_on():
    metrics, collector = (
        Metrics(),
        Collector({0: "the context is full", 1: "the context is full", 3: "no answer\n  got: TimeoutError()\n  x"}),
    )
    run_with(collector, metrics, steps=2)
    assert collector.steps == 2
    assert metrics.events("trajectories_failed") == [("the context is full", "2"), ("no answer got: TimeoutError()", "1")] * 2


def test_a_step_of_which_every_trajectory_failed_ends_the_run_and_names_the_most_common_reason():
    metrics = Metrics()
    collector = Collector({0: "no answer", 1: "the context is full", 2: "the context is full", 3: "the context is full"})
    with pytest.raises(RunFailed, match="every trajectory of step 0 failed") as failure:
        run_with(collector, metrics)
    assert "3 times: the context is full" in str(failure.value) and len(metrics.events("trajectories_failed")) == 2


def test_a_metrics_writer_that_failed_ends_the_run_after_the_step():
    metrics = Metrics()
    collector = Collector({}, lambda step: setattr(metrics, "failed", "ended with status 1: No space left") if step == 1 else None)
    with pytest.raises(RunFailed, match="the metrics writer failed") as failure:
        run_with(collector, metrics)
    assert "No space left" in str(failure.value) and collector.steps == 2


def test_rows_that_were_dropped_end_the_run_after_the_step():
    metrics = Metrics()
    with pytest.raises(RunFailed, match="7 rows dropped"):
        run_with(Collector({}, lambda step: setattr(metrics, "dropped", 7)), metrics)
