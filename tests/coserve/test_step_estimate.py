"""The prediction of a step: moved little by one slow step, given up while it holds, and taken back when it was right."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_hpc.coserve.slack import StepTimes
from rose_hpc.coserve.step_estimate import HALF_LIFE_S, LONGEST_HALF_LIFE_S, OUTLIER, WEIGHT, StepEstimate

steps = st.floats(1e-3, 10)


BATCH = 4


def decode_s(estimate: StepEstimate) -> float:
    return estimate.times.decode_s(BATCH)


def after(*took_s: float) -> StepEstimate:
    estimate = StepEstimate()
    for step_s in took_s:
        estimate.ran(0, BATCH, step_s)
    return estimate


def test_a_step_never_run_costs_nothing_and_the_first_is_believed() -> None:
    assert StepEstimate().times == StepTimes(0.0, 0.0, 0.0)
    assert not StepEstimate().knows_prefill
    assert decode_s(after(0.5)) == 0.5


def test_a_profile_is_believed_until_there_are_steps_which_it_caps() -> None:
    profile = StepTimes(0.001, 0.01, 0.0)
    estimate = StepEstimate(profile)
    assert estimate.times == profile and estimate.knows_prefill
    estimate.ran(0, BATCH, 0.02)
    assert decode_s(estimate) == pytest.approx(0.02)


@given(st.lists(steps, min_size=1, max_size=20), st.floats(0, 1e6))
def test_one_slow_step_among_others_moves_the_prediction_by_a_bounded_factor(seen: list[float], slow_s: float) -> None:
    estimate = after(*seen)
    before_s, weight = decode_s(estimate), max(WEIGHT, 1 / (len(seen) + 1))
    estimate.ran(0, BATCH, slow_s)
    assert decode_s(estimate) <= before_s * (1 + weight * (OUTLIER - 1)) * (1 + 1e-9)


@given(st.lists(st.tuples(st.integers(16, 2048), st.integers(0, 64)), min_size=1, max_size=20), st.floats(1, 1e6))
def test_one_slow_prompt_moves_the_cost_of_a_token_by_a_bounded_factor(shapes: list[tuple[int, int]], slow_s: float) -> None:
    true, estimate = StepTimes(0.001, 0.004, 0.0001), after()
    for _ in range(10):
        estimate.ran(0, BATCH, true.decode_s(BATCH))
    for prompt, batch in shapes:
        estimate.ran(prompt, batch, true.step_s(prompt, batch))
    before = estimate.times
    estimate.ran(512, BATCH, slow_s)
    assert estimate.times.prefill_token_s <= OUTLIER * (before.step_s(512, BATCH)) / 512 * (1 + 1e-9)
    assert estimate.times.decode_s(BATCH) == before.decode_s(BATCH)


def test_a_lasting_change_is_followed() -> None:
    assert decode_s(after(*[0.01] * 10, *[1.0] * 30)) == pytest.approx(1.0, rel=0.01)
    assert decode_s(after(0.0, *[1.0] * 60)) == pytest.approx(1.0, rel=0.01)


def test_prompts_and_decoding_are_told_apart() -> None:
    true, estimate = StepTimes(0.0005, 0.004, 0.0002), StepEstimate()
    for i in range(100):
        batch = 1 + 7 * i % 24
        estimate.ran(0, batch, true.decode_s(batch))
        estimate.ran(256, batch, true.step_s(256, batch))
    assert estimate.times.step_s(0, 12) == pytest.approx(true.decode_s(12), rel=0.05)
    assert estimate.times.step_s(800, 12) == pytest.approx(true.step_s(800, 12), rel=0.1)


def test_while_it_holds_it_halves_with_each_half_life() -> None:
    estimate = after(1.0)
    for _ in range(100):
        estimate.held(2 * HALF_LIFE_S / 100, prompts_only=False)
    assert decode_s(estimate) == pytest.approx(0.25)


def test_prompts_that_wait_while_decoding_goes_on_are_doubted_alone() -> None:
    estimate = after(*[0.01] * 10)
    estimate.ran(100, BATCH, 0.11)
    for _ in range(10):
        estimate.held(HALF_LIFE_S / 10, prompts_only=True)
        estimate.ran(0, BATCH, 0.01)
    assert decode_s(estimate) == pytest.approx(0.01)
    assert estimate.times.prefill_token_s == pytest.approx(0.001 / 2)


def test_a_probe_that_was_as_short_as_predicted_settles_it() -> None:
    estimate = after(1.0)
    estimate.held(4 * HALF_LIFE_S, prompts_only=False)
    estimate.ran(0, BATCH, 0.01)
    assert decode_s(estimate) < 1 / 16


def test_a_probe_of_a_prompt_settles_its_tokens_cost() -> None:
    estimate = after(*[0.01] * 10)
    estimate.ran(100, BATCH, 0.01 + 1.0)  # the kernel gave the core away
    estimate.held(8 * HALF_LIFE_S, prompts_only=True)
    estimate.ran(16, BATCH, 0.01 + 16 * 2e-5)
    assert estimate.times.prefill_token_s < 0.01 / 200
    assert decode_s(estimate) == pytest.approx(0.01)


def test_steps_that_are_slow_indeed_are_probed_ever_more_rarely() -> None:
    estimate, fits_s, waits_s = after(0.3), 0.1, []
    for _ in range(10):
        waited_s = 0.0
        while decode_s(estimate) >= fits_s:
            estimate.held(0.1, prompts_only=False)
            waited_s += 0.1
        waits_s.append(waited_s)
        estimate.ran(0, BATCH, 0.3)
        assert decode_s(estimate) == pytest.approx(0.3)
    assert waits_s[0] < 2 * HALF_LIFE_S and waits_s[1] > 1.9 * waits_s[0]
    assert waits_s == sorted(waits_s) and LONGEST_HALF_LIFE_S < waits_s[-1] < 2 * LONGEST_HALF_LIFE_S


def test_the_jitter_of_ordinary_steps_between_short_holds_does_not_make_probes_rarer() -> None:
    estimate = after(0.01)
    for i in range(200):
        estimate.held(0.005, prompts_only=False)
        estimate.ran(0, BATCH, 0.01 + 0.002 * (-1) ** i)
    usual_s = decode_s(estimate)
    estimate.held(HALF_LIFE_S, prompts_only=False)
    assert decode_s(estimate) == pytest.approx(usual_s / 2)
