"""The intake's invariants for any order of events, and what each mode does with them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_hpc.config import SamplingConfig
from rose_hpc.rollout.intake import Intake, IntakeError, Rules, rules_of

GRPO = rules_of(SamplingConfig(mode="grpo", groups=4))
DAPO = rules_of(SamplingConfig(mode="dapo", groups=4, oversample_frac=0.5, max_rounds=3, max_staleness=1))
ASYNC = rules_of(SamplingConfig(mode="async", groups=4, max_staleness=1))


def test_the_modes_are_three_sets_of_numbers():
    expected = {
        "grpo": Rules(batch=4, begins_with=4, most=4, oversample_frac=0.0, drops_dead=False, max_staleness=0),
        "dapo": Rules(batch=4, begins_with=6, most=18, oversample_frac=0.5, drops_dead=True, max_staleness=1),
        "async": Rules(batch=4, begins_with=8, most=12, oversample_frac=0.0, drops_dead=False, max_staleness=1),
    }
    assert expected == {"grpo": GRPO, "dapo": DAPO, "async": ASYNC}


def ended(intake: Intake, *serials: int, signal: bool = True, version: int | None = 0) -> None:
    for serial in serials:
        intake.ended(serial, signal, version)


def test_grpo_waits_for_all_groups_and_keeps_those_without_a_signal():
    intake = Intake(GRPO)
    assert intake.begin(0) == [0, 1, 2, 3]
    ended(intake, 2, 0, 1, signal=False)
    assert not intake.is_complete and intake.refill() == []
    ended(intake, 3, version=None)  # all of its trajectories failed
    assert intake.is_complete
    assert intake.take().taken == [0, 1, 2, 3] and intake.running == []
    assert intake.begin(1) == [4, 5, 6, 7]


def test_dapo_refills_as_soon_as_the_batch_cannot_become_full_any_more():
    intake = Intake(DAPO)
    assert intake.begin(0) == [0, 1, 2, 3, 4, 5]
    ended(intake, 0, 1, signal=False)
    assert intake.refill() == []  # four still run
    ended(intake, 2, signal=False)
    assert intake.refill() == [6, 7]  # one is missing; over-sampled by half, and none waits for 3, 4 and 5
    ended(intake, 3, 4, 6)
    assert not intake.is_complete
    ended(intake, 5)
    assert intake.is_complete and intake.running == [7]
    taken = intake.take()
    assert (taken.taken, taken.dead, taken.stale) == ([3, 4, 5, 6], [0, 1, 2], [])


def test_dapo_lets_what_still_runs_count_for_the_next_step():
    intake = Intake(DAPO)
    intake.begin(0)
    ended(intake, 5, 4, 3, 2, 1)
    assert intake.is_complete and intake.take().taken == [1, 2, 3, 4]
    assert (intake.running, intake.ready) == ([0], [5])
    assert intake.begin(1) == [6, 7, 8, 9]
    ended(intake, 0)
    assert intake.ready == [0, 5]  # one version old: within the bound
    ended(intake, 6, 7, version=1)
    assert intake.take().taken == [0, 5, 6, 7]


def test_dapo_trains_on_what_there_is_when_the_rounds_are_used_up():
    intake = Intake(DAPO)
    serials = intake.begin(0)
    while serials:
        ended(intake, *serials, signal=False)
        serials = intake.refill()
    assert intake.started == 18 and intake.is_complete
    taken = intake.take()
    assert taken.taken == [] and taken.dead == list(range(18))


def test_async_starts_as_many_groups_as_the_bound_allows_and_new_ones_with_each_version():
    intake = Intake(ASYNC)
    assert intake.begin(0) == list(range(8))
    ended(intake, 0, 1, 2, 3, 4)
    assert intake.is_complete and intake.take().taken == [0, 1, 2, 3]  # being trained: they still count
    ended(intake, 5, 6)  # while the trainer trains
    assert intake.begin(1) == [8, 9, 10, 11]
    ended(intake, 8, version=1)
    assert intake.take().taken == [4, 5, 6, 8]


def test_async_drops_what_has_become_too_old_and_makes_up_for_it():
    intake = Intake(ASYNC)
    intake.begin(0)
    ended(intake, *range(8))
    intake.take()
    assert intake.begin(2) == list(range(8, 16))
    assert intake.ready == []
    ended(intake, *range(8, 12), version=2)
    taken = intake.take()
    assert (taken.taken, taken.stale) == ([8, 9, 10, 11], [4, 5, 6, 7])


def test_a_slow_group_is_stale_when_it_ends_and_is_made_up_for_in_the_same_step():
    intake = Intake(ASYNC)
    intake.begin(0)
    ended(intake, *range(1, 8))
    intake.take()
    intake.begin(1)
    intake.take()
    assert intake.begin(3) == [12, 13, 14]  # 0 still runs, as do the four of version 1, which nobody has taken
    ended(intake, 0)
    ended(intake, 8, 9, 10, 11, version=1)
    assert intake.refill() == [15]
    ended(intake, 12, 13, 14, 15, version=3)
    taken = intake.take()
    assert (taken.taken, taken.stale) == ([12, 13, 14, 15], [0, 8, 9, 10, 11])


def test_without_staleness_async_is_synchronous():
    intake = Intake(rules_of(SamplingConfig(mode="async", groups=4, max_staleness=0)))
    for version in range(3):
        serials = intake.begin(version)
        assert len(serials) == 4
        ended(intake, *serials, version=version)
        assert intake.take().taken == serials and intake.running == []


def test_a_restored_intake_goes_on_where_it_was():
    intake = Intake(ASYNC, next_serial=20)
    intake.restore(running=[12, 15], ready=[(13, 3), (14, None)])
    assert intake.begin(4) == [20, 21, 22, 23]
    ended(intake, 15, version=4)
    assert intake.is_complete is False
    ended(intake, 12, version=4)
    assert intake.take().taken == [12, 13, 14, 15]


def test_events_that_cannot_be_are_refused():
    intake = Intake(GRPO)
    intake.begin(3)
    ended(intake, 0)  # of version 0: stale
    with pytest.raises(IntakeError, match="not running"):
        ended(intake, 0)
    with pytest.raises(IntakeError, match="went back"):
        intake.begin(2)
    assert intake.ready == [] and intake.running == [1, 2, 3]


configs = st.builds(
    SamplingConfig,
    mode=st.sampled_from(["grpo", "dapo", "async"]),
    groups=st.integers(1, 6),
    oversample_frac=st.floats(0, 2),
    max_rounds=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
)


@settings(deadline=None)
@given(configs, st.data())
def test_every_prompt_is_accounted_for_once_and_nothing_is_staler_than_the_bound(config, data):
    """Groups end in any order, with or without a signal, with tokens of any version since their start; versions go up by 0 or 1."""
    rules = rules_of(config)
    intake, version = Intake(rules), 0
    start_version: dict[int, int] = {}
    accounted: set[int] = set()
    freshest: dict[int, int | None] = {}

    def start(serials: list[int]) -> None:
        assert not set(serials) & start_version.keys()
        start_version.update(dict.fromkeys(serials, version))

    def end_one() -> None:
        serial = data.draw(st.sampled_from(intake.running))
        freshest[serial] = data.draw(st.one_of(st.none(), st.integers(start_version[serial], version)))
        intake.ended(serial, data.draw(st.booleans()), freshest[serial])

    for _ in range(data.draw(st.integers(1, 6))):
        begun = intake.begin(version)
        start(begun)
        assert len(intake.running) + len(intake.ready) <= rules.begins_with
        while not intake.is_complete:
            end_one()
            start(intake.refill())
            assert intake.started <= rules.most
            assert len(intake.running) + len(intake.ready) <= rules.begins_with
        taken = intake.take()
        assert len(taken.taken) <= rules.batch
        assert len(taken.taken) + len(intake.running) + len(intake.ready) <= rules.begins_with
        for serial in taken.taken:
            assert freshest[serial] is None or version - freshest[serial] <= rules.max_staleness
        newly = [*taken.taken, *taken.dead, *taken.stale]
        assert len(set(newly)) == len(newly) and not set(newly) & accounted
        accounted.update(newly)
        assert newly
        for _ in range(data.draw(st.integers(0, len(intake.running)))):  # while the trainer trains
            end_one()
        version += data.draw(st.integers(0, 1))
    assert start_version.keys() == accounted | set(intake.running) | set(intake.ready) | _waiting(intake)


def _waiting(intake: Intake) -> set[int]:
    """Dropped since the last batch: the next one accounts for them."""
    taken = intake.take()
    return {*taken.taken, *taken.dead, *taken.stale}


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(0, 3), st.data())
def test_groups_that_end_in_the_order_of_their_start_are_never_stale_and_the_bound_is_reached(groups, staleness, data):
    """AReaL's back-pressure: with first in, first out, admission alone keeps the bound; every group's tokens are of its start's version."""
    rules = rules_of(SamplingConfig(mode="async", groups=groups, max_staleness=staleness))
    intake, start_version, seen = Intake(rules), {}, set()
    for version in range(8):
        start_version.update(dict.fromkeys(intake.begin(version), version))
        while not intake.is_complete:
            intake.ended(intake.running[0], True, start_version[intake.running[0]])
        taken = intake.take()
        assert not taken.stale and len(taken.taken) == groups
        seen |= {version - start_version[serial] for serial in taken.taken}
        for _ in range(data.draw(st.integers(0, len(intake.running)))):
            intake.ended(intake.running[0], True, start_version[intake.running[0]])
    assert max(seen) == staleness
