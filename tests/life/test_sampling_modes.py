"""Whole runs by DAPO and fully asynchronously: what they record, and a SIGKILL in the middle of an asynchronous one."""

import os
import signal

import pytest
from running import Launched, shared_memory, small_run, summary, wait_for_checkpoint

from rose_hpc.metrics.run import Run

pytestmark = [pytest.mark.life, pytest.mark.engine, pytest.mark.mpi, pytest.mark.chaos]  # whole runs, minutes


def test_dapo_trains_on_groups_with_variance_and_goes_on_with_what_still_ran(run_dir, launched):
    run = launched(small_run, run_dir, 'sampling.mode="dapo"', "sampling.oversample_frac=1.0", "steps=5")
    assert run.finish(240) == 0, run.output
    found = Run(run_dir)
    details = list(found.events.query("kind == 'sampling'")["detail"])
    assert len(details) == 5 and all(" stale dropped" in d for d in details)
    assert (found.steps["trajectories"] % 8 == 0).all() and found.steps["trajectories"].sum() == len(found.trajectories)
    assert len(found.steps.query("not skipped")) >= 1
    assert_each_group_counts_once(found)


def test_an_asynchronous_run_overlaps_keeps_its_bound_and_survives_a_sigkill(run_dir, launched):
    before = shared_memory()
    run = launched(small_run, run_dir, 'sampling.mode="async"', "sampling.max_staleness=1", "steps=10")
    wait_for_checkpoint(run_dir, 4)
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait(10)
    assert run.wait_gone(30) == {}
    resumed = launched(Launched, "resume", run_dir)
    assert resumed.finish(240) == 0, resumed.output
    assert resumed.wait_gone(5) == {} and shared_memory() <= before
    found, told = Run(run_dir), summary(run_dir)
    assert told["complete"] and told["weights"]["verified"] == told["weights"]["versions"]
    steps = found.steps.set_index("step")
    assert list(steps.index) == list(range(10))
    assert_each_group_counts_once(found)
    # Rollouts of a step began before the step before it had ended: while the trainer trained
    first_turn_s = found.turns.groupby("step")["start_s"].min()
    overlaps = [first_turn_s[s] < steps["time_s"][s - 1] for s in range(1, 10) if s in first_turn_s.index]
    assert sum(overlaps) >= len(overlaps) - 1
    details = list(found.events.query("kind == 'sampling'")["detail"])
    assert max(int(d.rsplit(" most", 1)[0].rsplit(" ", 1)[1]) for d in details) == 1


def assert_each_group_counts_once(found):
    """Each step accounts for whole groups, and each turn belongs to a trajectory that is there."""
    sizes = found.trajectories.groupby(["step", "group"]).size()
    assert set(sizes) == {8}
    turns = found.turns.groupby(["step", "trajectory"]).size()
    played = found.trajectories.set_index(["step", "trajectory"])["turns"]
    assert turns.to_dict() == played[played > 0].to_dict()
