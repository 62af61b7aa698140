from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_hpc.bench.coserve_plan import ALONE, GATED, MODES, cut, fit_load, windows
from rose_hpc.traffic.trace import Request

ARRIVALS = st.lists(st.floats(0, 1000, allow_nan=False), min_size=1, max_size=50).map(sorted)


def requests(arrivals: list[float]) -> list[Request]:
    return [Request(arrival_s, prompt_tokens=i + 1, output_tokens=2) for i, arrival_s in enumerate(arrivals)]


@given(st.integers(1, 12), st.integers(0, 1000))
def test_every_mode_meets_every_segment_once_and_alone_once_for_each_half(segments: int, seed: int) -> None:
    plan = windows(segments, seed)
    assert len(set(plan)) == len(plan)
    assert Counter((w.mode, w.segment) for w in plan) == {
        (mode, segment): 2 if mode is ALONE else 1 for mode in MODES for segment in range(segments)
    }
    assert {w.half for w in plan if w.mode is ALONE} == {0, 1}
    assert plan == windows(segments, seed)


def test_another_seed_gives_another_order() -> None:
    assert windows(4, seed=0) != windows(4, seed=1)


def test_no_segment_begins_with_the_same_order_as_all_others() -> None:
    plan, width = windows(6, seed=3), len(MODES) + 1
    orders = {tuple(w.mode.name for w in plan[i : i + width]) for i in range(0, len(plan), width)}
    assert len(orders) > 1


@given(ARRIVALS, st.integers(1, 9), st.floats(0.5, 50))
def test_cutting_loses_no_request_and_keeps_every_time(arrivals: list[float], segments: int, segment_s: float) -> None:
    fitted = fit_load(requests(arrivals), segments * segment_s)
    pieces = cut(fitted, segment_s, segments)
    assert len(pieces) == segments
    assert [r.prompt_tokens for piece in pieces for r in piece] == [r.prompt_tokens for r in fitted]
    back = [r.arrival_s + i * segment_s for i, piece in enumerate(pieces) for r in piece]
    assert back == pytest.approx([r.arrival_s for r in fitted], abs=1e-6)
    assert all(-1e-9 <= r.arrival_s <= segment_s * (1 + 1e-9) for piece in pieces for r in piece)


def test_a_load_fills_its_time_and_keeps_the_proportions_of_its_gaps() -> None:
    fitted = fit_load(requests([5.0, 6.0, 9.0]), 2.0)
    assert [r.arrival_s for r in fitted] == pytest.approx([0.0, 0.5, 2.0])


def test_requests_that_all_come_at_once_stay_a_burst() -> None:
    assert [r.arrival_s for r in fit_load(requests([3.0, 3.0]), 10.0)] == [0.0, 0.0]


def test_the_modes_differ_in_what_the_comparison_is_about() -> None:
    by_name = {mode.name: mode for mode in MODES}
    assert by_name["full"].rollout == by_name["gate_only"].rollout == by_name["gate_only_long"].rollout == GATED
    assert [mode.name for mode in MODES if mode.confined] == ["quota_only", "full"]
    assert [mode.name for mode in MODES if mode.long_prompts] == ["gate_only_long", "rollout_alone_long"]
    assert by_name["static"].rollout != GATED and not by_name["alone"].rollout
