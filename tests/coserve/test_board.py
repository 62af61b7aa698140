"""The board: what is published is what is read, the least slack survives any crowd, sleepers are woken and nobody waits to write."""

from __future__ import annotations

import os
import stat
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_hpc.coserve.board import ENTRIES, BoardReader, BoardWriter, WakeReceiver, WakeSender, decode, encode, wake_path
from rose_hpc.coserve.slack import Budgets, ServingState, StepTimes, WaitingRequest, slack_s
from rose_hpc.coserve.slots import Writer
from rose_hpc.errors import EnvironmentFault, RoseError

TIMES = StepTimes(0.001, 0.004, 0.0005)
BUSY = ServingState(waiting=(WaitingRequest(1.0, 5),))
NOBODY = Writer(0, 0)

seconds = st.floats(0, 1e6)
requests = st.builds(WaitingRequest, seconds, st.integers(0, 2**32 - 1))


def crowd(most: int) -> st.SearchStrategy[ServingState]:
    return st.builds(
        ServingState,
        st.lists(requests, max_size=most).map(tuple),
        st.lists(requests, max_size=most).map(tuple),
        st.lists(seconds, max_size=most).map(tuple),
        st.integers(0, 2**32 - 1),
        st.floats(0, 1),
    )


def repeated(state: ServingState, times: int) -> ServingState:
    return ServingState(state.waiting * times, state.prefilling * times, state.last_token_s * times, state.batch)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "board"


@given(crowd(12), st.builds(StepTimes, seconds, seconds, seconds), seconds, st.none() | seconds)
def test_a_reading_is_what_was_published(state: ServingState, times: StepTimes, stamp_s: float, since_s: float | None) -> None:
    reading = decode(encode(state, times, stamp_s, since_s), 7, NOBODY)
    assert (reading.state, reading.times, reading.stamp_s, reading.busy_since_s) == (state, times, stamp_s, since_s)
    assert (reading.waiting_total, reading.prefilling_total) == (len(state.waiting), len(state.prefilling))
    assert reading.decoding_total == len(state.last_token_s)


@given(crowd(12), st.integers(1, 60), st.floats(0.01, 10), st.floats(0.01, 10), seconds)
def test_the_least_slack_survives_any_crowd(base: ServingState, copies: int, ttft_s: float, tpot_s: float, now_s: float) -> None:
    state = repeated(base, copies)
    reading = decode(encode(state, TIMES, 0.0, None), 1, NOBODY)
    budgets = Budgets(ttft_s, tpot_s)
    assert slack_s(reading.state, budgets, TIMES, now_s) == slack_s(state, budgets, TIMES, now_s)
    assert reading.waiting_total == len(state.waiting)
    assert len(reading.state.waiting) == min(ENTRIES, len(state.waiting))


def test_a_record_of_another_version_is_refused() -> None:
    payload = bytearray(encode(BUSY, TIMES, 0.0, None))
    payload[0] += 1
    with pytest.raises(RoseError, match="another version"):
        decode(bytes(payload), 1, NOBODY)


def test_of_more_requests_than_fit_the_tightest_are_kept_and_all_are_counted() -> None:
    late = [WaitingRequest(arrival_s=float(i), prompt_tokens=1) for i in range(1000)]
    tight = WaitingRequest(arrival_s=999.5, prompt_tokens=5_000_000)
    state = ServingState(waiting=(*late[::-1], tight), last_token_s=tuple(float(i) for i in range(999, -1, -1)), batch=1000)
    reading = decode(encode(state, TIMES, 0.0, None), 1, NOBODY)
    assert set(reading.state.waiting) == {tight, *late[: ENTRIES - 1]}
    assert sorted(reading.state.last_token_s) == [float(i) for i in range(ENTRIES)]
    assert (reading.waiting_total, reading.decoding_total, reading.state.batch) == (1001, 1000, 1000)


def test_a_new_board_says_idle(path: Path) -> None:
    assert BoardReader(path).read() is None
    writer = BoardWriter(path, now_s=3.0)
    reading = BoardReader(path).read()
    assert reading is not None and not reading.state.busy and reading.stamp_s == 3.0 and reading.busy_since_s is None
    writer.close()


def test_a_restarted_engine_does_not_inherit_what_its_predecessor_owed(path: Path) -> None:
    first = BoardWriter(path, 1.0)
    reader = BoardReader(path)
    first.publish(BUSY, TIMES, 2.0)
    first.close()
    assert (reading := reader.read()) is not None and reading.state == BUSY
    BoardWriter(path, 5.0).close()
    assert (reading := reader.read()) is not None and not reading.state.busy


def test_busy_since_is_kept_from_the_first_debt_to_the_last(path: Path) -> None:
    writer, reader = BoardWriter(path, 0.0), BoardReader(path)
    seen = []
    for now_s, state in ((1.0, BUSY), (2.0, BUSY), (3.0, ServingState()), (4.0, BUSY)):
        writer.publish(state, TIMES, now_s)
        reading = reader.read()
        seen.append(None if reading is None else reading.busy_since_s)
    assert seen == [1.0, 1.0, None, 4.0]


def test_a_sleeper_is_woken_by_a_publication(path: Path) -> None:
    writer, reader = BoardWriter(path, 0.0), BoardReader(path)
    timer = threading.Timer(0.2, lambda: writer.publish(ServingState(), TIMES, time.monotonic()))
    begin_s = time.monotonic()
    timer.start()
    assert reader.wait(10)
    assert 0.1 < time.monotonic() - begin_s < 5
    timer.join()


def test_a_publication_between_a_look_and_the_sleep_is_not_missed(path: Path) -> None:
    writer, reader = BoardWriter(path, 0.0), BoardReader(path)
    reader.read()
    writer.publish(BUSY, TIMES, 1.0)
    assert reader.wait(0)
    assert not reader.wait(0.01)


def test_a_publication_that_only_tightens_wakes_nobody(path: Path) -> None:
    writer, reader = BoardWriter(path, 0.0), BoardReader(path)
    writer.publish(BUSY, TIMES, 1.0, wake=False)
    assert not reader.wait(0.01)
    assert (reading := reader.read()) is not None and reading.state == BUSY


def test_writing_never_waits_for_a_reader_that_sleeps_forever(path: Path) -> None:
    writer, reader = BoardWriter(path, 0.0), BoardReader(path)
    for i in range(70_000):  # more than a FIFO holds
        writer.publish(ServingState(), TIMES, float(i))
    assert reader.wait(0)
    assert not reader.wait(0.01)


def test_a_writer_finds_the_reader_that_came_after_it_and_the_one_after_that(path: Path) -> None:
    writer = BoardWriter(path, 0.0)
    writer.publish(BUSY, TIMES, 1.0)
    for now_s in (2.0, 3.0):
        reader = BoardReader(path)
        writer.publish(BUSY, TIMES, now_s)
        assert reader.wait(0)
        reader.close()
        writer.publish(BUSY, TIMES, now_s + 0.5)  # nobody there


def test_the_fifo_is_private_and_a_stranger_in_its_place_is_refused(path: Path) -> None:
    WakeReceiver(wake_path(path)).close()
    mode = wake_path(path).stat().st_mode
    assert stat.S_ISFIFO(mode) and mode & 0o777 == 0o600
    wake_path(path).unlink()
    wake_path(path).write_bytes(b"not a fifo")
    with pytest.raises(EnvironmentFault, match="not a FIFO"):
        WakeReceiver(wake_path(path))
    WakeSender(wake_path(path)).send(0.0)
    assert wake_path(path).read_bytes() == b"not a fifo"


def test_nothing_is_left_open_by_either_end(path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    writer, reader = BoardWriter(path, 0.0), BoardReader(path)
    writer.publish(BUSY, TIMES, 1.0)
    reader.read()
    writer.close()
    reader.close()
    assert set(os.listdir("/proc/self/fd")) == before
