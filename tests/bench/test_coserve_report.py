from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import pytest

from rose_hpc.bench.coserve_plan import ALONE, MODES, Mode, Window
from rose_hpc.bench.coserve_report import summarize
from rose_hpc.bench.coserve_revoke import pss_bytes
from rose_hpc.bench.coserve_table import render
from rose_hpc.bench.coserve_windows import Measured
from rose_hpc.traffic.record import OK, Served
from rose_hpc.traffic.trace import Request

BY_NAME = {mode.name: mode for mode in MODES}
REVOKED = {"revoke_to_idle_s": 0.51, "memory_back_s": 0.62, "revoked_bytes": 640_000_000}


def served(ttft_s: float, tpot_s: float = 0.01, outcome: str = OK) -> Served:
    return Served(0, Request(0.0, 10, 5), 0.0, 5, ttft_s, tpot_s, ttft_s + 4 * tpot_s, 0.0, outcome)


def window(mode: Mode, rows: list[Served], half: int = 0, cpu_s: float = 3.0, tokens: int = 0, **more: Any) -> Measured:
    return Measured(Window(mode, 0, half), 0.0, 10.0, rows, cpu_s if mode.serving else 0.0, 0.0, tokens, **more)


def measured(**changed: Measured) -> list[Measured]:
    """One window of each mode, two of alone."""
    rates = {"rollout_alone": 10_000, "rollout_alone_long": 5_000}
    found = {mode.name: window(mode, [served(0.1)] * 100 if mode.serving else [], tokens=rates.get(mode.name, 0)) for mode in MODES}
    return [*(found | changed).values(), window(ALONE, [served(0.1)] * 100, half=1)]


def test_harvest_is_the_rate_over_what_serving_leaves_of_a_device_with_the_same_prompts() -> None:
    report = summarize(
        measured(
            gate_only=window(BY_NAME["gate_only"], [served(0.1)], cpu_s=2.0, tokens=6_000),
            gate_only_long=window(BY_NAME["gate_only_long"], [served(0.1)], cpu_s=5.0, tokens=2_000),
        )
    )
    assert report["gate_only"]["harvested_frac"] == pytest.approx(600 / (1000 * 0.8))
    assert report["gate_only_long"]["harvested_frac"] == pytest.approx(200 / (500 * 0.5))
    assert "harvested_frac" not in report["alone"] and "ttft_p99_s" not in report["rollout_alone"]


def test_alone_max_is_the_larger_half_of_each_figure() -> None:
    report = summarize([*measured(alone=window(ALONE, [served(0.3, 0.01)] * 50, half=0)), window(ALONE, [served(0.1, 0.04)] * 50, half=1)])
    assert report["alone_max"]["ttft_p99_s"] == pytest.approx(0.3)
    assert report["alone_max"]["tpot_p99_s"] == pytest.approx(0.04)
    assert report["alone"]["requests"] == 200


def test_a_violation_is_a_failure_or_over_twice_the_p99_of_alone() -> None:
    rows = [served(0.19), served(0.21), served(0.1, 0.021), served(math.nan, math.nan, "timeout"), served(0.1, math.nan)]
    report = summarize(measured(full=window(BY_NAME["full"], rows)))
    assert report["full"]["slo_violations"] == 3 and report["full"]["failed_requests"] == 1
    assert report["alone"]["slo_violations"] == 0


def test_reactions_are_pooled_over_the_windows_of_a_mode() -> None:
    gate = BY_NAME["gate_only"]
    report = summarize(
        [
            *measured(gate_only=window(gate, [served(0.1)], late_steps=[98, 0, 0, 0], reactions=[98, *[0] * 24])),
            window(gate, [served(0.1)], late_steps=[0, 0, 2, 0], reactions=[0, 2, *[0] * 23]),
        ]
    )
    assert report["gate_only"]["closings"] == 100
    assert report["gate_only"]["reaction_steps_p99"] == 2
    assert report["gate_only"]["reaction_p99_s"] == pytest.approx(0.0005 * 2**0.5)
    assert "closings" not in report["static"]


def test_the_table_has_a_row_for_every_mode_and_fits_the_page() -> None:
    report = summarize(measured(full=window(BY_NAME["full"], [served(0.1)] * 1000, tokens=6_000)))
    report["full"] |= REVOKED
    text = render(report | {"wall_s": 1500.0})
    assert all(mode.name in text for mode in MODES)
    assert "idle after 0.51 s, memory back after 0.62 s" in text and "× 1.00" in text and "1500 s" in text
    assert max(map(len, text.splitlines())) <= 140


def test_memory_of_a_living_process_is_counted_and_of_a_gone_one_not() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(30)
    assert pss_bytes([os.getpid()]) > 1 << 20
    assert pss_bytes([gone.pid]) == 0
