"""Open, held, starved: what the agent says of an engine from two looks at its counters."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_hpc.coserve.progress import ProgressReading, progress_state
from rose_hpc.coserve.progress_watch import LOOK_S, ProgressWatch, wants_cpu

BEFORE = ProgressReading(100.0, cpu_s=5.0, steps=50, held_steps=10, held_s=1.0)


def after(**changes: float) -> str:
    values = {"time_s": 102.0, "cpu_s": 5.0, "runnable": False, "steps": 50, "held_steps": 10, "held_s": 1.0}
    return progress_state(BEFORE, ProgressReading(**{**values, **changes}))  # type: ignore[arg-type]


def test_an_engine_that_steps_or_has_nothing_to_do_is_open() -> None:
    assert after(steps=60, cpu_s=6.5, runnable=True) == "open"
    assert after() == "open"


def test_a_gate_that_has_held_without_a_step_or_for_half_of_the_time_is_told_as_such() -> None:
    assert after(held_steps=11, held_s=1.005) == "held"
    assert after(steps=52, held_steps=200, held_s=2.0) == "held"
    assert after(steps=52, held_steps=30, held_s=1.1) == "open"


def test_an_engine_that_wants_a_core_and_gets_none_is_starved() -> None:
    assert after(runnable=True) == "starved"
    assert after(runnable=True, cpu_s=5.5) == "open"  # it computes: a long step


def test_the_counters_of_a_new_engine_count_from_zero() -> None:
    assert after(cpu_s=1.0, steps=3, held_steps=0, held_s=0.0) == "open"
    assert after(cpu_s=1.0, steps=0, held_steps=2, held_s=0.01, runnable=True) == "held"
    assert after(cpu_s=0.0, steps=0, held_steps=0, held_s=0.0, runnable=True) == "starved"


readings = st.builds(
    ProgressReading, st.floats(0, 100), st.floats(0, 100), st.booleans(), st.integers(0, 100), st.integers(0, 100), st.floats(0, 100)
)


@given(before=readings, now=readings)
def test_an_engine_that_made_a_step_or_got_cpu_time_is_never_starved(before: ProgressReading, now: ProgressReading) -> None:
    state = progress_state(before, now)
    assert state in ("open", "held", "starved")
    if state == "starved":
        assert now.runnable and (now.steps == before.steps or now.steps < before.steps or now.held_s < before.held_s)


@pytest.mark.processes
@pytest.mark.parametrize(("program", "wants"), [("while True: pass", True), ("import time; time.sleep(60)", False)])
def test_whether_a_process_wants_a_core_is_seen_from_outside(program: str, wants: bool, tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        watch = ProgressWatch(tmp_path / "board")
        time.sleep(2 * LOOK_S)
        assert wants_cpu(process.pid) == wants
        assert watch.state(process.pid) == "open"  # it gets what it wants
    finally:
        process.kill()
        process.wait(10)
    assert not wants_cpu(process.pid)
