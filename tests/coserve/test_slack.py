"""The paper's slacks, computed by hand and as invariants; the step times' fit on steps of a known engine."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_hpc.coserve.slack import (
    LEAST_CHUNK_TOKENS,
    Budgets,
    ServingState,
    StepTimes,
    StepTimesFit,
    WaitingRequest,
    fitting_tokens,
    slack_s,
)

BUDGETS = Budgets(ttft_s=0.5, tpot_s=0.15)
TIMES = StepTimes(prefill_token_s=0.001, decode_base_s=0.004, decode_request_s=0.0005)

seconds = st.floats(0, 1e6)
requests = st.builds(WaitingRequest, seconds, st.integers(0, 100_000))
states = st.builds(
    ServingState,
    st.lists(requests, max_size=6).map(tuple),
    st.lists(requests, max_size=6).map(tuple),
    st.lists(seconds, max_size=6).map(tuple),
    st.integers(0, 20),
)
budgets = st.builds(Budgets, st.floats(0.01, 10), st.floats(0.01, 10))
times = st.builds(StepTimes, st.floats(0, 0.01), st.floats(0, 0.1), st.floats(0, 0.01))


def test_a_waiting_prompt_has_the_first_token_budget_less_its_age_and_its_prefill() -> None:
    state = ServingState(waiting=(WaitingRequest(arrival_s=10.0, prompt_tokens=100),))
    assert slack_s(state, BUDGETS, TIMES, now_s=10.1) == pytest.approx(0.5 - 0.1 - (0.004 + 0.1))


def test_a_prompt_that_is_being_prefilled_has_its_remaining_tokens_to_go() -> None:
    state = ServingState(prefilling=(WaitingRequest(arrival_s=10.0, prompt_tokens=40),), batch=1)
    assert slack_s(state, BUDGETS, TIMES, now_s=10.2) == pytest.approx(0.5 - 0.2 - (0.004 + 0.04))


def test_a_running_request_has_the_token_budget_less_its_wait_and_the_next_step() -> None:
    state = ServingState(last_token_s=(10.0, 10.02), batch=3)
    assert slack_s(state, BUDGETS, TIMES, now_s=10.05) == pytest.approx(0.15 - 0.05 - (0.004 + 3 * 0.0005))


def test_the_tightest_request_decides() -> None:
    calm = ServingState(waiting=(WaitingRequest(10.0, 10),), last_token_s=(10.0,), batch=1)
    tight = replace(calm, waiting=(*calm.waiting, WaitingRequest(9.5, 10)))
    assert slack_s(tight, BUDGETS, TIMES, 10.0) == pytest.approx(0.5 - 0.5 - 0.014)
    assert slack_s(tight, BUDGETS, TIMES, 10.0) < slack_s(calm, BUDGETS, TIMES, 10.0)


def test_an_engine_that_owes_nothing_has_infinite_slack() -> None:
    assert slack_s(ServingState(), BUDGETS, TIMES, now_s=1e9) == math.inf


def spent(needs: list[int], tokens: int) -> tuple[int, int]:
    """Prompt tokens and decoding requests that a scheduler serves from a budget, in order."""
    prompt = batch = 0
    for need in needs:
        took = min(need, tokens)
        tokens -= took
        prompt, batch = (prompt, batch + took) if need == 1 else (prompt + took, batch)
    return prompt, batch


def test_the_budget_ends_where_the_time_does() -> None:
    line = StepTimes(prefill_token_s=0.001, decode_base_s=0.010, decode_request_s=0.002)
    needs = [1, 1, 1, 500, 40]
    assert fitting_tokens(needs, 0.010, line) == 0
    assert fitting_tokens(needs, 0.0125, line) == 1  # a part of those that decode
    assert fitting_tokens(needs, 0.0165, line) == 3
    assert fitting_tokens(needs, 0.0165 + 0.001 * (LEAST_CHUNK_TOKENS - 1), line) == 3  # too little of the prompt to be worth it
    assert fitting_tokens(needs, 0.1165, line) == 3 + 100
    assert fitting_tokens(needs, 0.5365, line) == 3 + 500 + 20
    assert fitting_tokens(needs, math.inf, line) == sum(needs)


def test_a_prompt_that_is_short_fits_whole_or_waits() -> None:
    line = StepTimes(prefill_token_s=0.001, decode_base_s=0.0, decode_request_s=0.0)
    assert fitting_tokens([5], 0.0051, line) == 5
    assert fitting_tokens([5], 0.0049, line) == 0


@given(states, budgets, times, seconds, st.floats(0, 1e3))
def test_slack_falls_as_time_passes(state: ServingState, budget: Budgets, step: StepTimes, now_s: float, later_s: float) -> None:
    before, after = slack_s(state, budget, step, now_s), slack_s(state, budget, step, now_s + later_s)
    assert after == pytest.approx(before - later_s, abs=1e-6) if state.busy else after == before == math.inf


@given(states, requests, seconds, budgets, times, seconds)
def test_another_request_never_adds_slack(
    state: ServingState, request: WaitingRequest, token_s: float, budget: Budgets, step: StepTimes, now_s: float
) -> None:
    slack = slack_s(state, budget, step, now_s)
    more = [
        replace(state, waiting=(*state.waiting, request)),
        replace(state, prefilling=(*state.prefilling, request), batch=state.batch + 1),
        replace(state, last_token_s=(*state.last_token_s, token_s), batch=state.batch + 1),
    ]
    assert all(slack_s(m, budget, step, now_s) <= slack for m in more)


works = st.lists(st.just(1) | st.integers(1, 2000), max_size=40)
limits = st.floats(-1, 10)


@given(works, limits, times)
def test_a_budget_is_never_predicted_to_overrun(needs: list[int], limit_s: float, line: StepTimes) -> None:
    tokens = fitting_tokens(needs, limit_s, line)
    assert 0 <= tokens <= sum(needs)
    assert not tokens or line.step_s(*spent(needs, tokens)) <= limit_s * (1 + 1e-9)


@given(works, limits, st.floats(0, 10), times)
def test_more_time_is_never_fewer_tokens(needs: list[int], limit_s: float, more_s: float, line: StepTimes) -> None:
    assert fitting_tokens(needs, limit_s, line) <= fitting_tokens(needs, limit_s + more_s, line)


@given(st.integers(0, 40), st.integers(LEAST_CHUNK_TOKENS, 2000), st.floats(0.01, 1), times)
def test_the_budget_is_the_largest_that_fits(batch: int, prompt: int, limit_s: float, line: StepTimes) -> None:
    needs = [1] * batch + [prompt]
    tokens = fitting_tokens(needs, limit_s, line)
    more = max(tokens + 1, batch + LEAST_CHUNK_TOKENS) if tokens >= batch else tokens + 1
    assert more > sum(needs) or line.step_s(*spent(needs, more)) >= limit_s * (1 - 1e-9)


steps = st.tuples(st.integers(0, 4096), st.integers(0, 256), st.floats(0, 60))


@given(st.lists(steps, max_size=60), st.floats(0.01, 0.9))
def test_fitted_times_are_finite_and_never_negative(seen: list[tuple[int, int, float]], weight: float) -> None:
    fit = StepTimesFit(StepTimes(0.0, 0.0, 0.0), weight)
    for step in seen:
        fit.observe(*step)
    fitted = (fit.times.prefill_token_s, fit.times.decode_base_s, fit.times.decode_request_s)
    assert all(0 <= value < math.inf for value in fitted)


@given(st.floats(1e-5, 1e-2), st.floats(1e-3, 1e-1), st.floats(1e-5, 1e-2), st.integers(0, 1000))
def test_the_fit_finds_the_line_that_the_steps_lie_on(token_s: float, base_s: float, request_s: float, offset: int) -> None:
    true, fit = StepTimes(token_s, base_s, request_s), StepTimesFit(StepTimes(0.0, 0.0, 0.0))
    for i in range(200):
        batch = 1 + (7 * i + offset) % 32
        fit.observe(0, batch, true.decode_s(batch))
    for tokens in (64, 500, 128):
        fit.observe(tokens, 8, true.decode_s(8) + tokens * token_s)
    assert fit.times.decode_base_s == pytest.approx(base_s, rel=0.05, abs=1e-6)
    assert fit.times.decode_request_s == pytest.approx(request_s, rel=0.05)
    assert fit.times.prefill_token_s == pytest.approx(token_s, rel=0.05, abs=1e-6)


def test_the_fit_follows_an_engine_that_slows_down() -> None:
    fit = StepTimesFit(StepTimes(0.0, 0.0, 0.0))
    for step_s in [0.01] * 100 + [0.03] * 100:
        fit.observe(0, 4, step_s)
    assert fit.times.decode_s(4) == pytest.approx(0.03, rel=0.02)


def test_what_was_measured_can_be_taken_back_in_part() -> None:
    fit = StepTimesFit(StepTimes(0.0, 0.0, 0.0))
    for batch in (2, 10) * 20:
        fit.observe(0, batch, 0.01 + 0.001 * batch)
    fit.observe(100, 2, 0.012 + 0.1)
    fit.scale(0.5, 0.25)
    assert fit.times.decode_s(2) == pytest.approx(0.006, rel=0.02)
    assert fit.times.prefill_token_s == pytest.approx(0.00025, rel=0.02)
    fit.observe(0, 10, 0.01)  # as long as the line now says: it stays
    assert fit.times.decode_s(10) == pytest.approx(0.01, rel=0.02)
