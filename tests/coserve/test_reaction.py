"""Closings of a gate: how long they took, and which steps began too late."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_hpc.coserve.reaction import EDGES_S, LATE_S, LATE_STEPS, Reactions, quantile


def test_the_step_in_flight_when_serving_gets_busy_is_the_reaction() -> None:
    reactions = Reactions()
    reactions.started(1.0)
    reactions.finished(1.5)
    reactions.looked(1.1, False)
    reactions.looked(1.1, False)  # the same busy period
    assert (reactions.closings, reactions.late_steps) == (1, [1, 0, 0, 0])
    assert reactions.sum_s == reactions.max_s == pytest.approx(0.4) and sum(reactions.times) == 1


def test_a_device_that_was_free_has_no_reaction() -> None:
    reactions = Reactions()
    reactions.started(1.0)
    reactions.finished(1.5)
    reactions.looked(2.0, False)
    assert reactions.closings == 0 and sum(reactions.times) == 0


def test_under_async_scheduling_the_reaction_ends_with_the_last_step_in_flight() -> None:
    reactions = Reactions()
    reactions.started(1.0)
    reactions.started(1.0 + LATE_S)
    reactions.looked(1.0, False)
    assert sum(reactions.times) == 0
    reactions.finished(1.1)
    assert sum(reactions.times) == 0
    reactions.finished(1.2)
    assert reactions.max_s == pytest.approx(0.2) and reactions.closings == 1


@pytest.mark.parametrize(("after_s", "late"), [(LATE_S / 2, 0), (2 * LATE_S, 1)])
def test_a_step_is_late_that_starts_a_while_after_the_request(after_s: float, late: int) -> None:
    reactions = Reactions()
    reactions.started(1.0 + after_s)
    reactions.finished(1.1)
    reactions.looked(1.0, False)
    assert reactions.late_steps[late] == reactions.closings == 1


def test_where_the_first_look_admits_there_is_nothing_to_close() -> None:
    reactions = Reactions()
    reactions.started(1.0)
    reactions.finished(1.5)
    reactions.looked(1.1, True)
    for step in range(3):
        reactions.started(1.5 + step)
        reactions.finished(2.4 + step)
    reactions.looked(1.1, False)  # its slack has run out
    assert reactions.closings == 0


def test_more_late_steps_than_there_are_buckets_count_in_the_last() -> None:
    reactions = Reactions()
    for i in range(LATE_STEPS + 3):
        reactions.started(1.1 + i)
        reactions.finished(1.2 + i)
    reactions.looked(1.0, False)
    assert reactions.late_steps[LATE_STEPS] == 1


@given(st.lists(st.floats(1e-6, 100), min_size=1, max_size=50))
def test_every_closing_beside_a_step_has_one_reaction_in_the_right_bucket(took_s: list[float]) -> None:
    reactions, now_s = Reactions(), 0.0
    for step_s in took_s:
        reactions.started(now_s)
        reactions.finished(now_s + step_s)
        reactions.looked(now_s, False)
        now_s += 1000.0
    assert sum(reactions.times) == reactions.closings == len(took_s)
    assert reactions.times[-1] == pytest.approx(sum(t > EDGES_S[-1] for t in took_s), abs=0)
    assert reactions.max_s == pytest.approx(max(took_s), abs=1e-9)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=10), st.floats(0.01, 1))
def test_a_quantile_is_the_first_bucket_with_enough_up_to_it(counts: list[int], fraction: float) -> None:
    found = quantile(counts, fraction)
    assert sum(counts[: found + 1]) >= fraction * sum(counts)
    assert found == 0 or sum(counts[:found]) < fraction * sum(counts)
