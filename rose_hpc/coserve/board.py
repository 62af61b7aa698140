"""The board: what a serving engine owes its requests, written by its scheduler, read by the rollout engine's on the same machine.

    serving engine's scheduler ──publish──▶ PATH        slots.py: double buffer, sequence, CRC-32, writer's identity
                               ──1 byte───▶ PATH.wake   FIFO: a rollout engine that holds sleeps until the board loosens
                                            PATH.gate   slots.py: the gate's counters, the other way round (gate.py)

Payload of a record, little-endian, no padding; times are seconds of CLOCK_MONOTONIC:

    version u32 | stamp f64 | busy since f64 (NaN: idle) | prefill_token_s f64 | decode_base_s f64 | decode_request_s f64
    | KV cache in use f64 (0 to 1) | waiting total u32 | prefilling total u32 | decoding total u32 | batch u32 | entries w, p, d: 3 × u16
    | w arrivals f64 | w prompt tokens u32 | p arrivals f64 | p prompt tokens u32 | d last tokens f64

w, p, d ≤ 256. Of more requests the 256 with the least slack of each kind are kept, so that the least slack of all is exact;
the totals always count everybody.

It holds no request ids, tokens or text: nothing of the operator's users leaves the serving engine.
"""

from __future__ import annotations

import errno
import heapq
import math
import os
import select
import stat
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from rose_hpc.coserve.slack import ServingState, StepTimes, WaitingRequest, latest_start_s
from rose_hpc.coserve.slots import SlotReader, SlotWriter, Writer, read_record
from rose_hpc.errors import EnvironmentFault, RoseError

ENTRIES = 256
VERSION = 2  # of the record
VERSION_FIELD = struct.Struct("<I")
HEAD = struct.Struct("<I6d4I3H")
CAPACITY_BYTES = HEAD.size + ENTRIES * (12 + 12 + 8)
WAKE_RETRY_S = 0.1  # between two looks for a reader's end of the FIFO: one costs a failing open(2)
DRAIN_BYTES = 65536  # capacity of a FIFO (pipe(7)): one read empties it


@dataclass(frozen=True, slots=True)
class BoardReading:
    """One record of the board. busy_since_s: when the engine last went from owing nothing to owing something; None while idle.

    state: its entries are capped, see the module's docstring; the *_total count all.
    """

    state: ServingState
    times: StepTimes
    stamp_s: float
    busy_since_s: float | None
    waiting_total: int
    prefilling_total: int
    decoding_total: int
    sequence: int
    writer: Writer


class BoardWriter:
    """The serving engine's end. The first record says idle: a new engine owes nothing."""

    def __init__(self, path: Path, now_s: float) -> None:
        self._slots = SlotWriter(path, CAPACITY_BYTES)
        self._wake = WakeSender(wake_path(path))
        self._busy_since_s: float | None = None
        self.publish(ServingState(), StepTimes(0.0, 0.0, 0.0), now_s)

    def publish(self, state: ServingState, times: StepTimes, now_s: float, wake: bool = True) -> None:
        """Replace the board. wake=False: the state can only have got tighter, so that no sleeper need look. Raises OSError."""
        if not state.busy:
            self._busy_since_s = None
        elif self._busy_since_s is None:
            self._busy_since_s = now_s
        self._slots.write(encode(state, times, now_s, self._busy_since_s))
        if wake:
            self._wake.send(now_s)

    def close(self) -> None:
        """Give up the board; its last record stays."""
        self._slots.close()
        self._wake.close()


class BoardReader:
    """The rollout engine's end; one per board, since a FIFO wakes one reader."""

    def __init__(self, path: Path) -> None:
        self._slots = SlotReader(path, CAPACITY_BYTES)
        self._wake = WakeReceiver(wake_path(path))

    def read(self) -> BoardReading | None:
        """What the serving engine last published; None: none has, ever, on the file that we have open. Raises RoseError: slots.py."""
        record = self._slots.read()
        return None if record is None else decode(record.payload, record.sequence, record.writer)

    def reopen(self) -> None:
        """Look for the file again: it may have appeared, or another may have taken its place."""
        self._slots.reopen()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a wake-up comes; False after timeout_s. Those that came since the last `wait` count: none is lost."""
        return self._wake.wait(timeout_s)

    def close(self) -> None:
        """Let go of both files."""
        self._slots.close()
        self._wake.close()


def last_reading(path: Path) -> BoardReading | None:
    """What was last published there, for whoever is not the board's one reader: it leaves the FIFO alone. Raises RoseError, OSError."""
    record = read_record(path, CAPACITY_BYTES)
    return None if record is None else decode(record.payload, record.sequence, record.writer)


# ── the record ───────────────────────────────────────────────────────────────────────────────────────────────────────


def encode(state: ServingState, times: StepTimes, stamp_s: float, busy_since_s: float | None) -> bytes:
    """Payload of a record."""
    waiting, prefilling = _tightest(state.waiting, times), _tightest(state.prefilling, times)
    decoding = state.last_token_s if len(state.last_token_s) <= ENTRIES else heapq.nsmallest(ENTRIES, state.last_token_s)
    return _layout(len(waiting), len(prefilling), len(decoding)).pack(
        VERSION,
        stamp_s,
        math.nan if busy_since_s is None else busy_since_s,
        times.prefill_token_s,
        times.decode_base_s,
        times.decode_request_s,
        state.kv_frac,
        len(state.waiting),
        len(state.prefilling),
        len(state.last_token_s),
        state.batch,
        len(waiting),
        len(prefilling),
        len(decoding),
        *[r.arrival_s for r in waiting],
        *[r.prompt_tokens for r in waiting],
        *[r.arrival_s for r in prefilling],
        *[r.prompt_tokens for r in prefilling],
        *decoding,
    )


def decode(payload: bytes, sequence: int, writer: Writer) -> BoardReading:
    """The reading that a record's payload holds; the payload is whole (slots.py). Raises RoseError: written by another version."""
    if (version := VERSION_FIELD.unpack_from(payload)[0]) != VERSION:
        raise RoseError(
            "the board was written by another version", got=version, expected=VERSION, remedy="run the same rose_hpc on both sides"
        )
    w, p, d = HEAD.unpack_from(payload)[-3:]
    fields = _layout(w, p, d).unpack(payload)
    _, stamp_s, since_s, prefill_token_s, base_s, request_s, kv_frac, waiting, prefilling, decoding, batch = fields[:11]
    entries = fields[14:]
    rest = entries[2 * w :]
    return BoardReading(
        state=ServingState(_requests(entries, w), _requests(rest, p), rest[2 * p :], batch, kv_frac),
        times=StepTimes(prefill_token_s, base_s, request_s),
        stamp_s=stamp_s,
        busy_since_s=None if math.isnan(since_s) else since_s,
        waiting_total=waiting,
        prefilling_total=prefilling,
        decoding_total=decoding,
        sequence=sequence,
        writer=writer,
    )


def _requests(fields: Sequence[float], count: int) -> tuple[WaitingRequest, ...]:
    return tuple(WaitingRequest(arrival, int(tokens)) for arrival, tokens in zip(fields[:count], fields[count : 2 * count], strict=True))


def _tightest(requests: Sequence[WaitingRequest], times: StepTimes) -> Sequence[WaitingRequest]:
    return requests if len(requests) <= ENTRIES else heapq.nsmallest(ENTRIES, requests, key=lambda r: latest_start_s(r, times))


@lru_cache(maxsize=1024)
def _layout(waiting: int, prefilling: int, decoding: int) -> struct.Struct:
    return struct.Struct(f"{HEAD.format}{waiting}d{waiting}I{prefilling}d{prefilling}I{decoding}d")


# ── the wake-up ──────────────────────────────────────────────────────────────────────────────────────────────────────


def wake_path(board: Path) -> Path:
    """The FIFO beside a board."""
    return board.with_name(f"{board.name}.wake")


class WakeReceiver:
    """Owns the FIFO's reading end. It holds a writing end as well, so that a serving engine that leaves is no end of file."""

    def __init__(self, path: Path) -> None:
        with suppress(FileExistsError):  # of a reader before us
            os.mkfifo(path, 0o600)
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        if not stat.S_ISFIFO(os.fstat(self._fd).st_mode):
            os.close(self._fd)
            raise EnvironmentFault(f"{path} is not a FIFO", remedy="remove it, or give the board another path")
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a byte has come, and take all there are; False after timeout_s."""
        if not self._poll.poll(max(0.0, timeout_s) * 1000):
            return False
        os.read(self._fd, DRAIN_BYTES)
        return True

    def close(self) -> None:
        """Close both ends; the FIFO stays for the next reader."""
        os.close(self._fd)


class WakeSender:
    """The FIFO's writing end: never blocks, never fails. Without a reader it looks for one now and then."""

    def __init__(self, path: Path) -> None:
        self._path, self._fd, self._next_look_s = path, -1, -math.inf

    def send(self, now_s: float) -> None:
        """One byte to whoever sleeps."""
        if self._fd < 0 and not self._look(now_s):
            return
        try:
            os.write(self._fd, b"\0")
        except BlockingIOError:
            return  # full: its reader has wake-ups enough
        except BrokenPipeError:  # the reader is gone; another may come
            self.close()

    def _look(self, now_s: float) -> bool:
        if now_s < self._next_look_s:
            return False
        self._next_look_s = now_s + WAKE_RETRY_S
        try:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENXIO):
                return False  # no FIFO, or nobody reads from it
            raise
        if stat.S_ISFIFO(os.fstat(self._fd).st_mode):
            return True
        self.close()
        return False

    def close(self) -> None:
        """Let go of the FIFO."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
