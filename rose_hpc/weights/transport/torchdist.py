"""torch.distributed transport: send/recv between the ranks of a process group; gloo on CPUs, nccl on GPUs.

    send ─▶ queue ─▶ Work of one piece ─▶ waiter thread ┐
                                                        ├─▶ finished ─▶ poll
    posted receive of a head ─▶ Work ──▶ waiter thread ─┘

A message is a head (kind, length, the content if it is short) and pieces of at most PIECE_BYTES; per peer and direction one Work
is under way.

What the backends allow, measured with gloo of torch 2.13
- A gloo Work never says is_completed() before somebody waits for it, and a wait that times out closes the pairs to ALL peers.
  So a thread per peer and direction waits, with no timeout of its own; deadlines are poll's.
- A killed peer fails its own Works at once ("Connection closed by peer"), the others go on.
- A thread that still waits while the interpreter ends aborts the process (std::terminate), and ProcessGroup.abort() wakes none.
  So close() lets a wait time out on purpose; an exit without close() does the same.
- An NCCL communicator runs its operations one after another, and a posted receive occupies it: each direction needs a group of its
  own (`reverse`), or two posted receives would wait for each other. A posted receive also occupies an SM of the GPU.
  The path over NCCL has not been verified on a GPU yet.
"""

from __future__ import annotations

import atexit
import datetime
import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from rose_hpc.errors import WeightsError
from rose_hpc.weights.transport.base import (
    LONGEST_NAP_S,
    MAX_MESSAGE_BYTES,
    STALL_S,
    AttendedClock,
    Event,
    Lost,
    Naps,
    Parts,
    Received,
    as_bytes,
    new_buffer,
    not_connected,
    one_line,
)

PIECE_BYTES = 8 << 20
HEAD_BYTES = 1024
_HEAD = struct.Struct("<4sQ")
_SHORT_BYTES = HEAD_BYTES - _HEAD.size
_MESSAGE, _BYE = b"RSD1", b"BYE1"
_FOR_EVER = datetime.timedelta(days=3650)
_LOOK_S = 0.1  # between two looks at deadlines
_END_S = 2.0


@dataclass(slots=True)
class _Outgoing:
    """One tensor to send. closes: payload bytes of the message that it ends, or -1."""

    tensor: torch.Tensor
    closes: int


class _Waiter:
    """A thread that waits for one Work at a time and reports (waiter, error or None) to finished."""

    def __init__(self, peer: str, finished: queue.SimpleQueue[tuple[_Waiter, Exception | None]], polls: bool) -> None:
        self.peer, self.is_busy, self._finished, self._polls, self._ended = peer, False, finished, polls, False
        self._works: queue.SimpleQueue[tuple[dist.Work, torch.Tensor] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"torchdist {peer}", daemon=True)
        self.thread.start()

    @property
    def is_waiting(self) -> bool:
        """Whether a Work is under way, reported or not."""
        return self.thread.is_alive() and self.is_busy

    def watch(self, work: dist.Work, tensor: torch.Tensor) -> None:
        """Wait for this Work, and keep its memory meanwhile."""
        self.is_busy = True
        self._works.put((work, tensor))

    def end(self) -> None:
        """Let the thread end as soon as its Work does."""
        self._ended = True
        self._works.put(None)

    def _run(self) -> None:
        while (item := self._works.get()) is not None:
            error = None
            try:
                self._wait(item[0])
            except RuntimeError as caught:  # what torch.distributed raises
                error = caught
            del item
            self._finished.put((self, error))

    def _wait(self, work: dist.Work) -> None:
        naps = Naps()
        while self._polls and not work.is_completed() and not self._ended:
            time.sleep(naps.next_s(LONGEST_NAP_S))
        if not (self._polls and self._ended):
            work.wait(_FOR_EVER)


@dataclass(slots=True)
class _Line:
    """One peer. is_inside: a message is sent in part; head, buffer, got_bytes: the message that comes in."""

    rank: int
    sending: _Waiter
    receiving: _Waiter
    wrote_s: float
    read_s: float
    head: torch.Tensor
    queue: deque[_Outgoing] = field(default_factory=deque)
    now: _Outgoing | None = None
    is_inside: bool = False
    queued_bytes: int = 0
    buffer: memoryview | None = None
    piece: torch.Tensor | None = None
    got_bytes: int = 0


class TorchDistTransport:
    """names: of all ranks of the group, in order. reverse: a second group of the same ranks, for messages to lower ranks (NCCL).

    Nothing else may use the groups: receives are always posted in them, and close() breaks their connections (it does not destroy
    them). Raises WeightsError when names do not fit the group.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        names: Sequence[str],
        *,
        reverse: dist.ProcessGroup | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        stall_s: float = STALL_S,
    ) -> None:
        self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)
        is_nccl = dist.get_backend(process_group) == "nccl"
        if len(names) != self.size or self.rank < 0:
            raise WeightsError(
                "the names do not fit the process group", got=f"{len(names)} names", expected=f"{self.size} ranks, this one in it"
            )
        if is_nccl and reverse is None:
            raise WeightsError("nccl needs a second process group, one for each direction", remedy="pass reverse=dist.new_group(...)")
        self.name, self.sent_bytes, self.received_bytes = names[self.rank], 0, 0
        self._upward, self._downward = process_group, process_group if reverse is None else reverse
        self._device = torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")
        self._max_message_bytes, self._stall_s, self._clock = max_message_bytes, stall_s, AttendedClock()
        self._finished: queue.SimpleQueue[tuple[_Waiter, Exception | None]] = queue.SimpleQueue()
        self._events: list[Event] = []
        self._waiters: list[_Waiter] = []
        atexit.register(self.close)
        self._lines = {name: self._line(name, rank, is_nccl) for rank, name in enumerate(names) if rank != self.rank}

    def _line(self, peer: str, rank: int, polls: bool) -> _Line:
        waiters = [_Waiter(peer, self._finished, polls) for _ in range(2)]
        self._waiters += waiters
        now_s = self._clock.now_s
        return _Line(rank, waiters[0], waiters[1], now_s, now_s, self._empty(HEAD_BYTES))

    def _empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    @property
    def peers(self) -> list[str]:
        return sorted(self._lines)

    def is_connected(self, peer: str) -> bool:
        return peer in self._lines

    # ── Transport ──

    def send(self, peer: str, parts: Parts) -> None:
        """As Transport.send; the parts are copied here, so they may change at once."""
        if (line := self._lines.get(peer)) is None:
            raise not_connected(peer)
        content = bytearray().join(as_bytes(parts))
        if not line.queue and line.now is None:
            line.wrote_s = self._clock.now_s
        is_short = len(content) <= _SHORT_BYTES
        head = self._head(_MESSAGE, len(content), content if is_short else b"")
        line.queue.append(_Outgoing(head, len(content) if is_short else -1))
        for offset in [] if is_short else range(0, len(content), PIECE_BYTES):
            piece = torch.frombuffer(content, dtype=torch.uint8, offset=offset, count=min(PIECE_BYTES, len(content) - offset))
            last = offset + PIECE_BYTES >= len(content)
            line.queue.append(_Outgoing(piece, len(content) if last else -1))
        line.queued_bytes += len(content)

    def queued_bytes(self, peer: str) -> int:
        return 0 if (line := self._lines.get(peer)) is None else line.queued_bytes

    def poll(self, wait_s: float) -> list[Event]:
        ends_s = time.monotonic() + wait_s
        while True:
            self._clock.tick()
            for peer in self.peers:
                self._attempt(peer, self._post)
            sent, left_s = self.sent_bytes, max(ends_s - time.monotonic(), 0.0)
            self._take_finished(0.0 if self._events else min(left_s, _LOOK_S))
            self._lose_what_stalls()
            if self._events or self.sent_bytes != sent or time.monotonic() >= ends_s:
                events, self._events = self._events, []
                return events

    def drop(self, peer: str) -> None:
        if (line := self._lines.pop(peer, None)) is not None:
            self._part_from(line)
        self._events = [event for event in self._events if event.peer != peer]

    def close(self) -> None:
        """As Transport.close; ends all Works of the groups, so that no thread waits any more."""
        atexit.unregister(self.close)
        self._lines.clear()
        self._events.clear()
        for waiter in self._waiters:
            waiter.end()
        ends_s = time.monotonic() + _END_S
        if any(waiter.is_waiting for waiter in self._waiters):
            self._break_connections()
        for waiter in self._waiters:
            waiter.thread.join(max(ends_s - time.monotonic(), 0.0))

    def _break_connections(self) -> None:
        """A wait that times out closes gloo's connections to all peers of the group, and fails every Work. Works of nccl end by flag."""
        for group in {self._upward, self._downward} if self._device.type == "cpu" else ():
            for rank in range(self.size):
                with suppress(RuntimeError):  # that peer is gone; or it is the timeout
                    while rank != self.rank and (work := dist.irecv(self._empty(PIECE_BYTES), group=group, group_src=rank)) is not None:
                        work.wait(datetime.timedelta(milliseconds=1))  # until nothing more comes from it

    # ── one round ──

    def _attempt(self, peer: str, step: Callable[[str, _Line], None]) -> None:
        """A step for one peer, which is Lost when it fails."""
        if (line := self._lines.get(peer)) is None:
            return
        try:
            step(peer, line)
        except (RuntimeError, WeightsError) as error:
            self._lose(peer, one_line(error))

    def _post(self, peer: str, line: _Line) -> None:
        """Ask for the next piece, and give the next one."""
        if not line.receiving.is_busy:
            tensor = line.head if line.buffer is None else self._next_piece(line)
            group = self._upward if line.rank < self.rank else self._downward
            self._start(line.receiving, dist.irecv(tensor, group=group, group_src=line.rank), tensor)
        if line.now is None and line.queue and not line.sending.is_busy:
            line.now = line.queue.popleft()
            line.is_inside = line.now.closes < 0
            tensor = line.now.tensor.to(self._device)
            self._start(line.sending, self._isend(line, tensor), tensor)

    def _next_piece(self, line: _Line) -> torch.Tensor:
        """Where the next piece of the message that comes in belongs: the message's own memory, or memory of the device."""
        buffer = line.buffer if line.buffer is not None else memoryview(b"")
        nbytes = min(PIECE_BYTES, buffer.nbytes - line.got_bytes)
        here = torch.frombuffer(buffer, dtype=torch.uint8, offset=line.got_bytes, count=nbytes)
        line.piece = here if self._device.type == "cpu" else self._empty(nbytes)
        return line.piece

    def _isend(self, line: _Line, tensor: torch.Tensor) -> dist.Work | None:
        return dist.isend(tensor, group=self._upward if self.rank < line.rank else self._downward, group_dst=line.rank)

    def _start(self, waiter: _Waiter, work: dist.Work | None, tensor: torch.Tensor) -> None:
        if work is None:
            raise WeightsError("this rank is not in the process group")
        waiter.watch(work, tensor)

    def _take_finished(self, wait_s: float) -> None:
        with suppress(queue.Empty):
            finished = self._finished.get(timeout=wait_s) if wait_s > 0 else self._finished.get_nowait()
            while True:
                self._take(*finished)
                finished = self._finished.get_nowait()

    def _take(self, waiter: _Waiter, error: Exception | None) -> None:
        waiter.is_busy = False
        line = self._lines.get(waiter.peer)
        if line is None:
            return
        if error is not None:
            self._lose(waiter.peer, one_line(error))
        elif waiter is line.sending:
            self._sent(line)
        else:
            self._attempt(waiter.peer, self._received)

    def _sent(self, line: _Line) -> None:
        now, line.now, line.wrote_s = line.now, None, self._clock.now_s
        if now is not None and now.closes >= 0:
            line.is_inside = False
            line.queued_bytes -= now.closes
            self.sent_bytes += now.closes

    def _received(self, peer: str, line: _Line) -> None:
        line.read_s = self._clock.now_s
        if line.buffer is None:
            self._read_head(line)
        elif line.piece is not None:
            nbytes = line.piece.numel()
            if line.piece.device.type != "cpu":
                line.buffer[line.got_bytes : line.got_bytes + nbytes] = line.piece.cpu().numpy().data
            line.got_bytes += nbytes
        if line.buffer is not None and line.got_bytes == line.buffer.nbytes:
            message, line.buffer, line.piece, line.got_bytes = line.buffer, None, None, 0
            self.received_bytes += message.nbytes
            self._events.append(Received(peer, message))

    def _read_head(self, line: _Line) -> None:
        head = line.head.cpu().numpy().tobytes()
        magic, nbytes = _HEAD.unpack_from(head)
        if magic == _BYE:
            raise WeightsError("it has left")
        if magic != _MESSAGE:
            raise WeightsError("a message's head makes no sense", got=magic)
        if nbytes > self._max_message_bytes:
            raise WeightsError("a message is announced as too long", got=f"{nbytes} bytes", expected=f"at most {self._max_message_bytes}")
        line.buffer, line.got_bytes = new_buffer(nbytes), 0
        if nbytes <= _SHORT_BYTES:
            line.buffer[:] = head[_HEAD.size : _HEAD.size + nbytes]
            line.got_bytes = nbytes

    def _head(self, magic: bytes, nbytes: int, content: bytes | bytearray = b"") -> torch.Tensor:
        return torch.frombuffer(bytearray((_HEAD.pack(magic, nbytes) + content).ljust(HEAD_BYTES, b"\0")), dtype=torch.uint8)

    # ── partings ──

    def _lose_what_stalls(self) -> None:
        now_s = self._clock.now_s
        for peer, line in list(self._lines.items()):
            if (line.now is not None or line.queue) and now_s - line.wrote_s > self._stall_s:
                self._lose(peer, f"it took nothing for {now_s - line.wrote_s:.1f} s")
            elif line.buffer is not None and now_s - line.read_s > self._stall_s:
                self._lose(peer, f"it stopped inside a message {now_s - line.read_s:.1f} s ago")

    def _lose(self, peer: str, why: str) -> None:
        if (line := self._lines.pop(peer, None)) is not None:
            self._part_from(line)
            self._events.append(Lost(peer, why))

    def _part_from(self, line: _Line) -> None:
        """Tell the peer, where nothing is under way to it; otherwise it finds out when it stalls."""
        line.queue.clear()
        line.receiving.end()
        if line.now is None and not line.is_inside and not line.sending.is_busy:
            with suppress(RuntimeError):  # it is gone already
                tensor = self._head(_BYE, 0).to(self._device)
                self._start(line.sending, self._isend(line, tensor), tensor)
        line.sending.end()
