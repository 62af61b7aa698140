"""MPI transport: messages between ranks from Issend, Iprobe and Irecv, polled. The only module that imports mpi4py.

    MpiTransport: the ranks of one world ── MpiLines: one communicator, driven by polls ── mpi_messages.py: heads and pieces
                                         └─ accept, connect: MpiLines to a relay of another world

Invariants
- Importing starts no MPI; MpiTransport does. MPI lives in a disposable process that never forks.
- Nothing blocks: a peer that was killed would hang a blocking call for ever. Waiting sleeps between tests, because an MPI wait
  burns a core that the trainer and the engines need.
- Every send is synchronous (it completes when the receiver has matched it), a few at a time per peer. With MPICH the unread small
  messages to a killed peer otherwise fill the sender's shared-memory cells (64), and it can send to nobody any more. (Between
  processes of one machine without CMA a long message does that nevertheless: then the others are Lost, too, after stall_s.)
- One message at a time is taken in per peer, after its size was checked.
- Memory that an operation on a lost peer may still touch is kept until the process ends.

Who drops a peer, or closes, tells it (one small message), so that it need not wait for stall_s; a dropped peer stays dropped.
MPI_Finalize waits for every rank, dead or alive: it is called only when all ranks close together and nobody was ever lost (rank 0
has heard it of all, and says so). A launcher must therefore let ranks end without it, and let survivors live: mpi/.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import mpi4py

from rose_hpc.errors import EnvironmentFault, TransferTimeout, WeightsError
from rose_hpc.weights.transport.base import (
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
from rose_hpc.weights.transport.framing import NAME_BYTES, check_name
from rose_hpc.weights.transport.mpi_messages import HEAD_BYTES, read_head, to_travel
from rose_hpc.weights.transport.mpi_process import end_without_traces, unlink_mapped_segments, until

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False

from mpi4py import MPI  # noqa: E402  (rc must be set first)

_MOST_POSTED = 4  # sends in flight per peer; a dead peer keeps so many of MPICH's cells
_TESTS_PER_NAP = 8  # while something is in flight: without CMA or a NIC's help, it moves inside tests only
_FAREWELL_S = 2.0
_TAG_HEAD, _TAG_PIECE, _TAG_BYE, _TAG_NAME = 7, 8, 9, 10  # the same in every generation
_CLOSES, _LEAVES, _DROPS, _FINALIZES = b"C", b"L", b"D", b"F"  # farewells; L: closes, and has lost somebody or gives up waiting
_FINALIZE_S = 5.0


@dataclass(slots=True)
class _Message:
    """A queued message. pieces_left: MPI messages that have not been taken."""

    nbytes: int
    pieces_left: int


@dataclass(slots=True)
class _Incoming:
    """A message of which the head, or all pieces, have been asked for."""

    buffer: memoryview
    requests: list[MPI.Request]
    is_head: bool


@dataclass(slots=True)
class _Line:
    """One peer. queue, posted: sends still to be posted, and posted but not yet taken; wrote_s, read_s: when something moved."""

    rank: int
    wrote_s: float
    read_s: float
    queue: deque[tuple[int, memoryview, _Message]] = field(default_factory=deque)
    posted: list[tuple[MPI.Request, memoryview, _Message]] = field(default_factory=list)
    queued_bytes: int = 0
    incoming: _Incoming | None = None


class MpiLines:
    """A transport over one communicator (of one world, or between two). ranks: peer name → rank, in the remote group if there is one.

    Touches MPI from the thread that calls it only.
    """

    def __init__(self, comm: MPI.Comm, name: str, ranks: Mapping[str, int], *, max_message_bytes: int, stall_s: float) -> None:
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.name, self.sent_bytes, self.received_bytes = name, 0, 0
        self._comm, self._max_message_bytes, self._stall_s = comm, max_message_bytes, stall_s
        self._clock, self._naps = AttendedClock(), Naps()
        self._lines = {peer: _Line(rank, self._clock.now_s, self._clock.now_s) for peer, rank in ranks.items()}
        self._events: list[Event] = []
        self._names = {rank: peer for peer, rank in ranks.items()}
        self._said: dict[str, bytes] = {}  # farewells
        self._is_whole = True  # nobody was lost but by closing, and nothing was under way then
        self._kept: list[object] = []  # what MPI may still touch

    @property
    def peers(self) -> list[str]:
        return sorted(self._lines)

    def is_connected(self, peer: str) -> bool:
        return peer in self._lines

    # ── Transport ──

    def send(self, peer: str, parts: Parts) -> None:
        if (line := self._lines.get(peer)) is None:
            raise not_connected(peer)
        travelling = to_travel(views := as_bytes(parts))
        message = _Message(sum(view.nbytes for view in views), len(travelling))
        if not line.queue and not line.posted:
            line.wrote_s = self._clock.now_s
        line.queue.extend((_TAG_PIECE if i else _TAG_HEAD, view, message) for i, view in enumerate(travelling))
        line.queued_bytes += message.nbytes

    def queued_bytes(self, peer: str) -> int:
        return 0 if (line := self._lines.get(peer)) is None else line.queued_bytes

    def poll(self, wait_s: float) -> list[Event]:
        ends_s = time.monotonic() + wait_s
        while True:
            sent = self.sent_bytes
            if self._advance():
                self._naps.reset()
            left_s = ends_s - time.monotonic()
            if self._events or self.sent_bytes != sent or left_s <= 0:
                events, self._events = self._events, []
                return events
            time.sleep(self._naps.next_s(left_s))

    def drop(self, peer: str) -> None:
        if (line := self._lines.pop(peer, None)) is not None:
            self._abandon(line)
            self._is_whole = False
            self._say(line.rank, _DROPS)
        self._events = [event for event in self._events if event.peer != peer]

    def close(self) -> None:
        while self._lines:
            line = self._lines.popitem()[1]
            self._abandon(line)
            self._say(line.rank, _LEAVES)

    # ── one round of everything ──

    def _advance(self) -> bool:
        """Whether anything moved, in one test or, while something is in flight, the first of several that moves it."""
        self._clock.tick()
        moved = self._round()
        for _ in range(_TESTS_PER_NAP):
            if moved or not any(line.posted or line.incoming for line in self._lines.values()):
                break
            moved = self._round()
        self._lose_what_stalls()
        return moved

    def _round(self) -> bool:
        moved = False
        somebody_speaks = self._somebody_speaks()
        for peer, line in list(self._lines.items()):
            try:
                if line.queue or line.posted:
                    moved |= self._send_on(line)
                if somebody_speaks or line.incoming is not None:
                    moved |= self._receive_from(peer, line)
            except (MPI.Exception, WeightsError) as error:
                self._lose(peer, one_line(error))
        self._hear_farewells()
        return moved

    def _somebody_speaks(self) -> bool:
        """An error here does not say whose it is: let each peer's own call find out."""
        try:
            return bool(self._comm.Iprobe(source=MPI.ANY_SOURCE, tag=_TAG_HEAD))
        except MPI.Exception:
            return True

    def _send_on(self, line: _Line) -> bool:
        moved, still = False, []
        for request, view, message in line.posted:
            if not request.Test():
                still.append((request, view, message))
                continue
            moved, line.wrote_s = True, self._clock.now_s
            message.pieces_left -= 1
            if not message.pieces_left:
                line.queued_bytes -= message.nbytes
                self.sent_bytes += message.nbytes
        line.posted = still
        while line.queue and len(line.posted) < _MOST_POSTED:
            tag, view, message = line.queue.popleft()
            line.posted.append((self._comm.Issend([view, MPI.BYTE], dest=line.rank, tag=tag), view, message))
        return moved

    def _receive_from(self, peer: str, line: _Line) -> bool:
        if line.incoming is None:
            self._ask_for_head(line)
        incoming = line.incoming
        if incoming is None:
            return False
        waiting = len(incoming.requests)
        incoming.requests = [request for request in incoming.requests if not request.Test()]
        moved = len(incoming.requests) < waiting
        if moved:
            line.read_s = self._clock.now_s
        if not incoming.requests:
            line.incoming = None
            if incoming.is_head:
                self._after_head(peer, line, incoming.buffer)
            else:
                self._deliver(peer, incoming.buffer)
        return moved

    def _ask_for_head(self, line: _Line) -> None:
        status = MPI.Status()
        if not self._comm.Iprobe(source=line.rank, tag=_TAG_HEAD, status=status):
            return
        nbytes = status.Get_count(MPI.BYTE)
        if not 0 < nbytes <= HEAD_BYTES:
            raise WeightsError("a message's head has an impossible size", got=f"{nbytes} bytes", expected=f"1 to {HEAD_BYTES}")
        self._ask_for(line, memoryview(bytearray(nbytes)), [nbytes], _TAG_HEAD)

    def _after_head(self, peer: str, line: _Line, head: memoryview) -> None:
        whole, sizes = read_head(head, self._max_message_bytes)
        if whole is not None:
            self._deliver(peer, whole)
        else:
            self._ask_for(line, new_buffer(sum(sizes)), sizes, _TAG_PIECE)

    def _ask_for(self, line: _Line, buffer: memoryview, sizes: list[int], tag: int) -> None:
        line.incoming, offset = _Incoming(buffer, [], tag == _TAG_HEAD), 0
        for nbytes in sizes:
            request = self._comm.Irecv([buffer[offset : offset + nbytes], MPI.BYTE], source=line.rank, tag=tag)
            line.incoming.requests.append(request)
            offset += nbytes

    def _deliver(self, peer: str, message: memoryview) -> None:
        self.received_bytes += message.nbytes
        self._events.append(Received(peer, message))

    # ── partings ──

    def _hear_farewells(self) -> None:
        status, kind = MPI.Status(), bytearray(1)
        with suppress(MPI.Exception):  # whoever it is will fail at its own calls
            while self._comm.Iprobe(source=MPI.ANY_SOURCE, tag=_TAG_BYE, status=status):
                peer = self._names[status.Get_source()]
                self._comm.Irecv([kind, MPI.BYTE], source=status.Get_source(), tag=_TAG_BYE).Wait()  # it has arrived
                self._said[peer] = bytes(kind)
                self._is_whole &= kind in (_CLOSES, _FINALIZES)
                self._lose(peer, "it has dropped us" if kind == _DROPS else "it has closed", heard=True)

    def _lose_what_stalls(self) -> None:
        now_s = self._clock.now_s
        for peer, line in list(self._lines.items()):
            if (line.queue or line.posted) and now_s - line.wrote_s > self._stall_s:
                self._lose(peer, f"it took nothing for {now_s - line.wrote_s:.1f} s")
            elif line.incoming is not None and now_s - line.read_s > self._stall_s:
                self._lose(peer, f"it stopped inside a message {now_s - line.read_s:.1f} s ago")

    def _lose(self, peer: str, why: str, heard: bool = False) -> None:
        if (line := self._lines.pop(peer, None)) is None:
            return
        self._abandon(line)
        self._events.append(Lost(peer, why))
        if not heard:
            self._is_whole = False
            self._say(line.rank, _DROPS)

    def _abandon(self, line: _Line) -> None:
        line.queue.clear()
        if line.posted or line.incoming is not None:
            self._is_whole = False
            self._kept.append(line)

    def _say(self, rank: int, kind: bytes) -> None:
        with suppress(MPI.Exception):  # it is gone already
            self._kept.append(self._comm.Isend([kind, MPI.BYTE], dest=rank, tag=_TAG_BYE))


class MpiTransport(MpiLines):
    """The relays of one MPI world. names: of all ranks, in order. Starts MPI; building it is collective within deadline_s.

    Raises EnvironmentFault when the launcher started separate worlds, TransferTimeout when not all ranks came.
    """

    def __init__(
        self, names: Sequence[str], deadline_s: float, *, max_message_bytes: int = MAX_MESSAGE_BYTES, stall_s: float = STALL_S
    ) -> None:
        if not MPI.Is_initialized():
            MPI.Init_thread(MPI.THREAD_FUNNELED)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, end_without_traces)
        comm = MPI.COMM_WORLD
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        MPI.COMM_SELF.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank, self.size, self._has_joined = comm.Get_rank(), comm.Get_size(), False
        if self.size != len(names):
            unlink_mapped_segments()
            raise EnvironmentFault(
                "MPI started separate worlds instead of one",
                got=f"a world of {self.size}",
                expected=f"one world of {len(names)}",
                remedy="use the launcher of the MPI that mpi4py loads (python -m mpi4py --mpi-lib-version), or set weights.mpiexec",
            )
        all_came = until(comm.Ibarrier().Test, deadline_s)
        unlink_mapped_segments()
        if not all_came:
            raise TransferTimeout("the relays of this world did not all start", got=f"nothing in {deadline_s:g} s")
        others = {name: rank for rank, name in enumerate(names) if rank != self.rank}
        super().__init__(comm, names[self.rank], others, max_message_bytes=max_message_bytes, stall_s=stall_s)

    def close(self) -> None:
        """Say farewell; where every rank of the world does so within a few seconds, end MPI. Otherwise the process just ends."""
        stays_whole = self._is_whole and not self._has_joined and not any(line.posted for line in self._lines.values())
        for rank, peer in self._names.items():
            if stays_whole or peer in self._lines:
                self._say(rank, _CLOSES if stays_whole else _LEAVES)
        if stays_whole and until(self._all_end, _FAREWELL_S):
            _finalize()
        elif stays_whole and self.rank:
            self._say(0, _LEAVES)
        self._lines.clear()
        self._events.clear()

    def _all_end(self) -> bool:
        """Whether every rank closes and waits to end MPI. Rank 0 decides."""
        self._round()
        if self.rank:
            return self._said.get(self._names[0]) == _FINALIZES
        if self._lines or not self._is_whole or any(said != _CLOSES for said in self._said.values()):
            return False
        for rank in self._names:
            self._say(rank, _FINALIZES)
        return True

    # ── other worlds of the same run ──

    def open_port(self) -> str:
        """A port that relays of other worlds can connect to. Raises EnvironmentFault where this MPI has none."""
        try:
            return str(MPI.Open_port())
        except MPI.Exception as error:
            raise EnvironmentFault(
                "this MPI opens no ports", got=one_line(error), remedy="reach the other worlds by TCP (weights.transport)"
            ) from error

    def accept(self, port: str, deadline_s: float) -> MpiLines:
        """Wait for one relay of another world. Blocks, and burns a core. Raises TransferTimeout, WeightsError."""
        return self._join(MPI.COMM_SELF.Accept, port, deadline_s)

    def connect(self, port: str, deadline_s: float) -> MpiLines:
        """Connect to a relay of another world that waits in accept. Raises TransferTimeout, WeightsError."""
        return self._join(MPI.COMM_SELF.Connect, port, deadline_s)

    def _join(self, join: Callable[[str, MPI.Info], MPI.Intercomm], port: str, deadline_s: float) -> MpiLines:
        ends_s = time.monotonic() + deadline_s
        info = MPI.Info.Create()
        info.Set("timeout", str(max(math.ceil(deadline_s), 1)))
        self._has_joined = True
        try:
            comm = join(port, info)
            comm.Set_errhandler(MPI.ERRORS_RETURN)
            peer = _exchange_names(comm, self.name, ends_s - time.monotonic())
        except MPI.Exception as error:
            raise WeightsError(
                f"{self.name}: the other world is not reached by MPI", got=one_line(error), remedy="reach it by TCP"
            ) from error
        return MpiLines(comm, self.name, {peer: 0}, max_message_bytes=self._max_message_bytes, stall_s=self._stall_s)


def _exchange_names(comm: MPI.Intercomm, name: str, deadline_s: float) -> str:
    """Who the other side is. Raises TransferTimeout, WeightsError."""
    ours, theirs = check_name(name).ljust(NAME_BYTES, b"\0"), bytearray(NAME_BYTES)
    requests = [comm.Isend([ours, MPI.BYTE], dest=0, tag=_TAG_NAME), comm.Irecv([theirs, MPI.BYTE], source=0, tag=_TAG_NAME)]
    if not until(lambda: all([request.Test() for request in requests]), deadline_s):
        raise TransferTimeout("the other world does not say who it is", got=f"nothing in {deadline_s:.1f} s")
    try:
        peer = theirs.rstrip(b"\0").decode()
        check_name(peer)
    except UnicodeDecodeError:
        raise WeightsError("the other world's name is not UTF-8") from None
    return peer


def _finalize() -> None:
    """End MPI, or this process where that takes too long: a rank may have died since it said that it waits."""
    rescue = threading.Timer(_FINALIZE_S, os._exit, (0,))
    rescue.daemon = True
    rescue.start()
    MPI.Finalize()
    rescue.cancel()
