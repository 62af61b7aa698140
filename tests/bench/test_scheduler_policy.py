"""The part `policy` of `rose-hpc bench scheduler`: it drives the scheduler as a run does, and reports what was asked for."""

from __future__ import annotations

import pytest

from rose_hpc.bench.scheduler_policy import SLICES, make_world, measure, rates


@pytest.mark.parametrize("policy", ["expected", "paper"])
def test_decisions_are_counted_with_more_trajectories_than_places(policy):
    world = make_world(policy, trajectories=200, executors=4, seed=0)
    before = world.decisions
    (of_world,) = rates([world], decisions=400)
    assert len(of_world) == SLICES and min(of_world) > 0 and world.decisions - before >= 400
    loads = world.scheduler.snapshot(world.now_s)
    assert loads.queued > 0 and all(e.in_flight == e.max_concurrency for e in loads.executors)


def test_the_report_names_both_policies_and_the_growth():
    report = measure(trajectories=300, executors=4, decisions=200, seed=0)
    assert set(report["by_policy"]) == {"expected", "paper"}
    assert report["decisions_per_s"] == report["by_policy"]["expected"] > 0
    assert report["growth"] > 0 and report["growth_to"] == 16 * 300
