"""The gate over a real board: every row of its table, its sleep, its counters, and what it refuses."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose_hpc.coserve.board import BoardWriter
from rose_hpc.coserve.gate import LOOK_AGAIN_S, Gate, GateSettings, gate_settings, read_gate_stats
from rose_hpc.coserve.slack import ServingState, StepTimes, WaitingRequest
from rose_hpc.errors import ConfigError, EnvironmentFault

TIMES = StepTimes(0.0, 0.01, 0.0)
IDLE = ServingState()


class Clock:
    """A clock that stands still unless told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def settings(tmp_path: Path) -> GateSettings:
    return GateSettings(tmp_path / "board", ttft_s=0.5, tpot_s=0.1, hold_cap_s=0.02, stale_s=1.0, headroom_frac=0.5)


@pytest.fixture
def gate(settings: GateSettings, clock: Clock) -> Iterator[Gate]:
    gate = Gate(settings, clock)
    yield gate
    gate.close()


@pytest.fixture
def board(settings: GateSettings, clock: Clock) -> Iterator[BoardWriter]:
    board = BoardWriter(settings.board, clock())
    yield board
    board.close()


def decoding(last_token_s: float) -> ServingState:
    return ServingState(last_token_s=(last_token_s,), batch=1)


def test_without_a_board_it_runs(gate: Gate) -> None:
    assert gate.admit(step_s=10.0, may_wait=False)


def test_a_board_that_was_taken_away_holds_until_there_is_one_again(settings: GateSettings, clock: Clock) -> None:
    subprocess.run([sys.executable, "-c", DYING, str(settings.board), str(clock())], check=True, timeout=60)
    gate = Gate(settings, clock)
    settings.board.unlink()
    clock.now_s += 2
    assert not gate.admit(step_s=0.0, may_wait=False)
    successor = BoardWriter(settings.board, clock())
    clock.now_s += LOOK_AGAIN_S
    assert gate.admit(step_s=0.0, may_wait=False)
    successor.close()
    gate.close()


def test_beside_an_idle_engine_it_runs_however_old_the_board(board: BoardWriter, gate: Gate, clock: Clock) -> None:
    clock.now_s += 3600
    assert gate.admit(step_s=10.0, may_wait=False)


def test_beside_a_busy_engine_only_a_step_that_fits_runs(board: BoardWriter, gate: Gate, clock: Clock) -> None:
    board.publish(decoding(clock()), TIMES, clock())  # slack: 0.1 − 0.01
    assert gate.admit(step_s=0.059, may_wait=False)
    assert not gate.admit(step_s=0.061, may_wait=False)
    clock.now_s += 0.08
    assert not gate.admit(step_s=0.059, may_wait=False)
    board.publish(decoding(clock()), TIMES, clock())
    assert gate.admit(step_s=0.059, may_wait=False)


def test_a_busy_board_gone_stale_holds_while_its_writer_lives(board: BoardWriter, gate: Gate, clock: Clock) -> None:
    waiting = ServingState(waiting=(WaitingRequest(clock() + 3600, 1),))  # slack in plenty
    board.publish(waiting, TIMES, clock())
    clock.now_s += 0.9
    assert gate.admit(step_s=0.01, may_wait=False)
    clock.now_s += 0.2
    assert not gate.admit(step_s=0.0, may_wait=False)


DYING = """
import sys
from pathlib import Path
from rose_hpc.coserve.board import BoardWriter
from rose_hpc.coserve.slack import ServingState, StepTimes, WaitingRequest
board = BoardWriter(Path(sys.argv[1]), float(sys.argv[2]))
board.publish(ServingState(waiting=(WaitingRequest(0.0, 1),)), StepTimes(0.0, 0.0, 0.0), float(sys.argv[2]))
"""


def test_the_board_of_an_engine_that_died_busy_expires(settings: GateSettings, clock: Clock) -> None:
    subprocess.run([sys.executable, "-c", DYING, str(settings.board), str(clock())], check=True, timeout=60)
    gate = Gate(settings, clock)
    assert not gate.admit(step_s=0.0, may_wait=False)
    clock.now_s += 1.1
    assert gate.admit(step_s=10.0, may_wait=False)
    gate.close()


def test_an_engine_that_starts_later_is_found_within_half_a_second(settings: GateSettings, clock: Clock, gate: Gate) -> None:
    board = BoardWriter(settings.board, clock())
    board.publish(decoding(clock() - 1), TIMES, clock())
    assert gate.admit(step_s=0.0, may_wait=False)  # not looked yet
    clock.now_s += LOOK_AGAIN_S
    assert not gate.admit(step_s=0.0, may_wait=False)
    board.close()


def test_the_board_that_replaced_a_dead_engines_is_found(settings: GateSettings, clock: Clock) -> None:
    subprocess.run([sys.executable, "-c", DYING, str(settings.board), str(clock())], check=True, timeout=60)
    gate = Gate(settings, clock)
    settings.board.unlink()
    clock.now_s += 2
    successor = BoardWriter(settings.board, clock())
    successor.publish(decoding(clock() - 1), TIMES, clock())
    assert not gate.admit(step_s=0.0, may_wait=False)
    successor.close()
    gate.close()


def test_it_sleeps_until_the_board_loosens(settings: GateSettings) -> None:
    gate = Gate(GateSettings(settings.board, 0.5, 0.1, hold_cap_s=10.0, stale_s=60.0, headroom_frac=0.0))
    board = BoardWriter(settings.board, time.monotonic())
    gate.admit(0.0)
    time.sleep(LOOK_AGAIN_S)
    board.publish(decoding(0.0), TIMES, time.monotonic())
    timer = threading.Timer(0.3, lambda: board.publish(IDLE, TIMES, time.monotonic()))
    timer.start()
    cpu_s, begin_s = time.thread_time(), time.monotonic()
    assert gate.admit(step_s=0.01)
    waited_s = time.monotonic() - begin_s
    assert 0.2 < waited_s < 5
    assert time.thread_time() - cpu_s < 0.05  # asleep, not polling
    assert gate.stats.held_s == pytest.approx(waited_s, abs=0.01) and gate.stats.held_steps == 0
    timer.join()
    gate.close()
    board.close()


def test_it_never_sleeps_longer_than_its_cap(settings: GateSettings) -> None:
    board = BoardWriter(settings.board, time.monotonic())
    gate = Gate(settings)
    board.publish(decoding(0.0), TIMES, time.monotonic())
    begin_s = time.monotonic()
    assert not gate.admit(step_s=0.0)
    assert settings.hold_cap_s <= time.monotonic() - begin_s < 1
    assert gate.stats.held_steps == 1
    gate.close()
    board.close()


def test_step_times_are_learnt_by_kind(gate: Gate, clock: Clock) -> None:
    assert gate.step_s(True) == gate.step_s(False) == 0.0
    for prefill, took_s in ((True, 0.5), (False, 0.01), (False, 0.02)):
        clock.now_s += took_s
        gate.finished(prefill, clock() - took_s)
    assert gate.step_s(True) == pytest.approx(0.5)
    assert gate.step_s(False) == pytest.approx(0.01 + 0.2 * 0.01)


class Running(Clock):
    """A clock that goes on by a tenth of a second whenever it is read: a decision that holds takes as long."""

    def __call__(self) -> float:
        self.now_s += 0.1
        return self.now_s


def test_one_slow_step_does_not_shut_the_gate_for_good(tmp_path: Path) -> None:
    clock = Running()
    settings = GateSettings(tmp_path / "board", ttft_s=0.5, tpot_s=0.3, hold_cap_s=1e-4, stale_s=10.0, headroom_frac=0.3)
    board, gate = BoardWriter(settings.board, clock()), Gate(settings, clock)
    gate.finished(False, clock() - 0.9)  # takes 1 s: the kernel gave the core to serving
    begin_s, held = clock(), []
    while True:
        board.publish(decoding(clock()), TIMES, clock.now_s)
        predicted_s = gate.step_s(False)
        if gate.admit(predicted_s, prefill=False):
            break
        held.append(predicted_s)
        assert clock.now_s - begin_s < 60, "ten seconds are three half-lives of held time"
    assert predicted_s * 1.3 < 0.3 - 0.01  # what is predicted now fits
    assert held[0] == pytest.approx(1.0) and held == sorted(held, reverse=True)
    gate.close()
    board.close()


@pytest.mark.parametrize("tpot_s", [0.1, 1e-4])
def test_a_prediction_stands_while_no_step_at_all_would_fit(tmp_path: Path, tpot_s: float) -> None:
    clock = Running()
    settings = GateSettings(tmp_path / "board", ttft_s=0.5, tpot_s=tpot_s, hold_cap_s=1e-4, stale_s=10.0, headroom_frac=0.3)
    board, gate = BoardWriter(settings.board, clock()), Gate(settings, clock)
    gate.finished(False, clock() - 0.9)
    board.publish(decoding(clock() - 1), TIMES, clock.now_s)
    assert not any(gate.admit(gate.step_s(False), prefill=False) for _ in range(20))
    assert gate.step_s(False) == pytest.approx(1.0)
    gate.close()
    board.close()


def test_the_counters_can_be_read_by_others(board: BoardWriter, gate: Gate, settings: GateSettings, clock: Clock) -> None:
    began_s = clock()
    clock.now_s += 0.01
    board.publish(decoding(0.0), TIMES, clock())
    clock.now_s += 0.03
    gate.finished(False, began_s)
    assert not gate.admit(0.01, may_wait=False)
    assert not gate.admit(0.01, may_wait=False)
    stats = read_gate_stats(settings.board)
    assert stats == gate.stats
    assert (stats.steps, stats.held_steps, stats.closings) == (1, 2, 1)
    assert stats.step_s == pytest.approx(0.04)
    assert stats.reaction_sum_s == stats.reaction_max_s == pytest.approx(0.03)


def test_there_are_no_counters_where_no_gate_has_been(tmp_path: Path) -> None:
    assert read_gate_stats(tmp_path / "board") is None


def test_a_second_gate_on_a_board_is_refused(gate: Gate, settings: GateSettings) -> None:
    with pytest.raises(EnvironmentFault, match="has a writer already"):
        Gate(settings)


GOOD = {"board": "/dev/shm/b", "ttft_s": 0.5, "tpot_s": 0.1, "hold_cap_s": 1, "stale_s": 1.0, "headroom_frac": 0}


def test_settings_are_read_from_json() -> None:
    assert gate_settings(GOOD) == GateSettings(Path("/dev/shm/b"), 0.5, 0.1, 1.0, 1.0, 0.0)


@pytest.mark.parametrize(
    "change",
    [{"ttft_s": 0}, {"tpot_s": "1"}, {"stale_s": math.nan}, {"headroom_frac": -1}, {"board": 3}, {"more": 1}, {"hold_cap_s": True}],
)
def test_settings_that_make_no_sense_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="rose_gate"):
        gate_settings({**GOOD, **change})


@pytest.mark.parametrize("missing", sorted(GOOD))
def test_a_setting_left_out_is_refused(missing: str) -> None:
    with pytest.raises(ConfigError, match="rose_gate"):
        gate_settings({name: value for name, value in GOOD.items() if name != missing})
