"""One peer's authenticated connections as one session: messages are cut into frames, spread over the streams, put together.

    send ─▶ Session.outgoing ─ next frame ─▶ whichever Stream can write ─▶ … ─▶ Stream ─ chunk ─▶ Assembly ─ in order ─▶ message

Invariants
- A chunk is received into its place in the message's memory, which is taken after the header was found authentic and in bounds.
- Every chunk of a message arrives exactly once; a message is delivered when all before it are.
- A stream whose next frame would take too much memory ahead of its turn waits; the frame that is due next is never held up,
  because the messages in one stream ascend.

Sockets are non-blocking; who calls when is tcp.py's concern. Errors end the session: Tampered, EndOfPeer, OSError.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from rose_hpc.errors import WeightsError
from rose_hpc.weights.transport.base import AttendedClock, new_buffer
from rose_hpc.weights.transport.framing import CHUNK_BYTES, HEADER_BYTES, TAG_BYTES, Agreed, Header, Opener, Sealer

_SIP_BYTES = 256 << 10  # received and hashed at a time: what was just copied is still in the cache
_MOST_VIEWS = 64  # of one sendmsg; the kernel's limit is 1024
_MOST_MESSAGES_AHEAD = 1024


class EndOfPeer(WeightsError):
    """The peer has closed a connection."""


class Outgoing:
    """One queued message: hands out its chunks in order, once."""

    def __init__(self, number: int, views: list[memoryview]) -> None:
        self.number, self.nbytes = number, sum(view.nbytes for view in views)
        self.chunks_left = max(-(-self.nbytes // CHUNK_BYTES), 1)  # not yet written whole
        self._views, self._offset = deque(views), 0

    def next_chunk(self) -> tuple[int, list[memoryview]]:
        """(offset, views of at most CHUNK_BYTES)."""
        offset, chunk, room = self._offset, [], CHUNK_BYTES
        while self._views and room:
            view = self._views.popleft()
            if view.nbytes > room:
                self._views.appendleft(view[room:])
                view = view[:room]
            chunk.append(view)
            room -= view.nbytes
        self._offset += CHUNK_BYTES - room
        return offset, chunk

    @property
    def is_handed_out(self) -> bool:
        return not self._views


class Assembly:
    """Incoming messages of one session that are not whole yet, or wait for an earlier one."""

    def __init__(self, max_message_bytes: int) -> None:
        self._max_bytes, self._next, self._held_bytes = max_message_bytes, 0, 0
        self._partial: dict[int, _Partial] = {}

    def __bool__(self) -> bool:
        return bool(self._partial)

    def check(self, header: Header) -> None:
        """Raises WeightsError for a frame that this peer may not send."""
        if header.total_bytes > self._max_bytes:
            raise WeightsError(
                "a message is announced as too long", got=f"{header.total_bytes} bytes", expected=f"at most {self._max_bytes}"
            )
        expected = min(CHUNK_BYTES, header.total_bytes - header.offset)
        in_place = header.offset % CHUNK_BYTES == 0 and header.nbytes == expected and (expected > 0 or header.total_bytes == 0)
        if not in_place or header.message < self._next:
            raise WeightsError("a frame has no place in a message", got=header)
        partial = self._partial.get(header.message)
        if partial is not None and (partial.total_bytes != header.total_bytes or header.offset in partial.seen):
            raise WeightsError("a frame contradicts the ones before it", got=header)

    def has_room(self, header: Header) -> bool:
        """Whether this frame may be taken in now; that of the message due next always may."""
        if header.message == self._next or header.message in self._partial:
            return True
        ahead = header.message - self._next
        return self._held_bytes + header.total_bytes <= 2 * self._max_bytes and ahead < _MOST_MESSAGES_AHEAD

    def place(self, header: Header) -> memoryview:
        """Where the frame's content belongs."""
        partial = self._partial.get(header.message)
        if partial is None:
            partial = self._partial[header.message] = _Partial(header.total_bytes, new_buffer(header.total_bytes))
            self._held_bytes += header.total_bytes
        partial.seen.add(header.offset)
        return partial.buffer[header.offset : header.offset + header.nbytes]

    def arrived(self, header: Header) -> Iterator[memoryview]:
        """Note that a frame is complete and authentic; the messages that are now due."""
        self._partial[header.message].missing_bytes -= header.nbytes
        while (due := self._partial.get(self._next)) is not None and due.is_whole:
            del self._partial[self._next]
            self._next += 1
            self._held_bytes -= due.total_bytes
            yield due.buffer


@dataclass(slots=True)
class _Partial:
    total_bytes: int
    buffer: memoryview
    missing_bytes: int = -1
    seen: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.missing_bytes = self.total_bytes

    @property
    def is_whole(self) -> bool:
        return self.missing_bytes == 0 and bool(self.seen)


class Stream:
    """One connection after its handshake: writes frames, reads frames.

    blocked: the kernel takes no more for now. paused: reading waits until the session's earlier messages are whole.
    """

    def __init__(self, sock: socket.socket, agreed: Agreed, assembly: Assembly) -> None:
        self.sock, self.blocked, self.paused, self.is_inside_frame = sock, False, False, False
        self._sealer, self._opener = Sealer(agreed.send_key), Opener(agreed.receive_key)
        self._out: deque[memoryview] = deque()
        self._writing: Outgoing | None = None
        self._reader = self._read_frames(assembly)

    def start(self, message: Outgoing) -> None:
        """Take the message's next chunk as the frame to write."""
        offset, chunk = message.next_chunk()
        head, tail = self._sealer.seal(message.number, message.nbytes, offset, chunk)
        self._out.extend((memoryview(head), *chunk, memoryview(tail)))
        self._writing = message

    @property
    def writing(self) -> Outgoing | None:
        """The message of which a frame is being written."""
        return self._writing

    def write(self) -> int:
        """Give the kernel what it takes; the number of bytes. Afterwards the frame is written or the stream is blocked."""
        written = 0
        while self._out and not self.blocked:
            try:
                n = self.sock.sendmsg(list(islice(self._out, _MOST_VIEWS)))
            except BlockingIOError:
                self.blocked = True
                break
            written += n
            while self._out and n >= self._out[0].nbytes:
                n -= self._out.popleft().nbytes
            if n:
                self._out[0] = self._out[0][n:]
        if not self._out:
            self._writing = None
        return written

    def read(self, messages: list[memoryview]) -> int:
        """Take in about one chunk at most, append whole messages; the number of bytes. Raises WeightsError, OSError."""
        nbytes = 0
        for step in self._reader:
            if isinstance(step, memoryview):
                messages.append(step)
            else:
                nbytes += step
                if step == 0 or nbytes >= CHUNK_BYTES:
                    break
        return nbytes

    def _read_frames(self, assembly: Assembly) -> Iterator[int | memoryview]:
        """For ever: the number of bytes that came (0: none now, or paused) and whole messages."""
        head, tail = memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(TAG_BYTES))
        while True:
            self.is_inside_frame = False
            yield from self._fill(head)
            header = self._opener.open(head)
            assembly.check(header)
            while not assembly.has_room(header):
                self.paused = True
                yield 0
            yield from self._fill(assembly.place(header), self._opener.update)
            yield from self._fill(tail)
            self._opener.close(tail)
            yield from assembly.arrived(header)

    def _fill(self, view: memoryview, seen: Callable[[memoryview], None] = lambda _: None) -> Iterator[int]:
        while view.nbytes:
            try:
                n = self.sock.recv_into(view[:_SIP_BYTES])
            except BlockingIOError:
                yield 0
                continue
            if n == 0:
                raise EndOfPeer("the peer closed the connection " + ("inside a message" if self.is_inside_frame else "between messages"))
            self.is_inside_frame = True
            seen(view[:n])
            view = view[n:]
            yield n


class Session:
    """All streams that one side opened to the other. queued_bytes: payload of messages that have not gone whole."""

    def __init__(self, connections: list[tuple[socket.socket, Agreed]], max_message_bytes: int, clock: AttendedClock) -> None:
        self._assembly, self._clock = Assembly(max_message_bytes), clock
        self.streams = [Stream(sock, agreed, self._assembly) for sock, agreed in connections]
        self.queued_bytes = 0
        self._outgoing: deque[Outgoing] = deque()
        self._numbered = self._unsent = 0  # messages: so far; of which something has not gone
        self._wrote_s = self._read_s = clock.now_s

    def send(self, views: list[memoryview]) -> None:
        if not self.queued_bytes:
            self._wrote_s = self._clock.now_s
        message = Outgoing(self._numbered, views)
        self._numbered += 1
        self._unsent += 1
        self.queued_bytes += message.nbytes
        self._outgoing.append(message)

    @property
    def is_writing(self) -> bool:
        return self._unsent > 0

    @property
    def can_write(self) -> bool:
        """Whether a call of write would try something."""
        return self._unsent > 0 and any(not stream.blocked and (stream.writing or self._outgoing) for stream in self.streams)

    def write(self) -> list[int]:
        """One frame at most for every stream that can write; the payload of each message that has gone whole. Raises OSError."""
        gone = []
        for stream in self.streams:
            if stream.writing is None and self._outgoing and not stream.blocked:
                self._start(stream)
            if (message := stream.writing) is not None and stream.write():
                self._wrote_s = self._clock.now_s
                if stream.writing is None and self._is_gone(message):
                    gone.append(message.nbytes)
        return gone

    def read(self, stream: Stream, messages: list[memoryview]) -> None:
        """Append the whole messages that came, in order, by this stream. Raises as Stream.read, with what came before appended."""
        if stream.read(messages):
            self._read_s = self._clock.now_s
        if messages:
            for paused in self.streams:
                paused.paused = False

    def stalled_s(self) -> float:
        """For how long there has been something to write, or the rest of a message to come, and nothing moved."""
        now, late = self._clock.now_s, [0.0]
        if self.is_writing:
            late.append(now - self._wrote_s)
        if self._assembly or any(stream.is_inside_frame for stream in self.streams):
            late.append(now - self._read_s)
        return max(late)

    def _start(self, stream: Stream) -> None:
        message = self._outgoing[0]
        stream.start(message)
        if message.is_handed_out:
            self._outgoing.popleft()

    def _is_gone(self, message: Outgoing) -> bool:
        """Note that one more chunk is written."""
        message.chunks_left -= 1
        if message.chunks_left:
            return False
        self.queued_bytes -= message.nbytes
        self._unsent -= 1
        return True
