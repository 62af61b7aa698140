"""The prediction of a step: moved little by one slow step, given up while it holds, and taken back when it was right."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_hpc.coserve.step_estimate import HALF_LIFE_S, LONGEST_HALF_LIFE_S, OUTLIER, WEIGHT, StepEstimate

steps = st.floats(1e-3, 10)


def after(*took_s: float) -> StepEstimate:
    estimate = StepEstimate()
    for step_s in took_s:
        estimate.ran(step_s)
    return estimate


def test_a_kind_never_run_costs_nothing_and_its_first_step_is_believed() -> None:
    assert StepEstimate().step_s == 0.0
    assert after(0.5).step_s == 0.5


@given(st.lists(steps, min_size=1, max_size=20), st.floats(0, 1e6))
def test_one_slow_step_among_others_moves_the_prediction_by_a_bounded_factor(seen: list[float], slow_s: float) -> None:
    estimate = after(*seen)
    before_s = estimate.step_s
    estimate.ran(slow_s)
    assert estimate.step_s <= before_s * (1 + WEIGHT * (OUTLIER - 1)) * (1 + 1e-9)


def test_a_lasting_change_is_followed() -> None:
    assert after(0.01, *[1.0] * 30).step_s == pytest.approx(1.0, rel=0.01)
    assert after(0.0, *[1.0] * 50).step_s == pytest.approx(1.0, rel=0.01)


def test_while_it_holds_it_halves_with_each_half_life() -> None:
    estimate = after(1.0)
    for _ in range(100):
        estimate.held(2 * HALF_LIFE_S / 100)
    assert estimate.step_s == pytest.approx(0.25)


def test_a_probe_that_was_as_short_as_predicted_settles_it() -> None:
    estimate = after(1.0)
    estimate.held(4 * HALF_LIFE_S)
    estimate.ran(0.01)
    assert estimate.step_s < 1 / 16


def test_steps_that_are_slow_indeed_are_probed_ever_more_rarely() -> None:
    estimate, fits_s, waits_s = after(0.3), 0.1, []
    for _ in range(10):
        waited_s = 0.0
        while estimate.step_s >= fits_s:
            estimate.held(0.1)
            waited_s += 0.1
        waits_s.append(waited_s)
        estimate.ran(0.3)
        assert estimate.step_s == pytest.approx(0.3)
    assert waits_s[0] < 2 * HALF_LIFE_S and waits_s[1] > 1.9 * waits_s[0]
    assert waits_s == sorted(waits_s) and LONGEST_HALF_LIFE_S < waits_s[-1] < 2 * LONGEST_HALF_LIFE_S


def test_the_jitter_of_ordinary_steps_between_short_holds_does_not_make_probes_rarer() -> None:
    estimate = after(0.01)
    for i in range(200):
        estimate.held(0.005)
        estimate.ran(0.01 + 0.002 * (-1) ** i)
    usual_s = estimate.step_s
    estimate.held(HALF_LIFE_S)
    assert estimate.step_s == pytest.approx(usual_s / 2)
