"""TCP transport: authenticated streams between named peers, the way into partitions that another user owns.

    TcpTransport ── Door: listener, handshakes (tcp_door.py, framing.py) ── Session: streams, frames (tcp_session.py)

Each listener has a key; whoever connects must know it, or the key admitted for its name, and both sides prove it before a frame
is read. Every frame is authenticated; the first one that is not costs the peer its link. A name is as safe as the key that opens
it: peers that share a key can claim each other's names, admitted names can be claimed by nobody else.

A link holds at most one session from each side, because two relays may connect to each other at the same moment; each goes on
sending on the session it had first. A peer that connects again, or comes back as another instance, has given its old link up:
Lost, then what it sends now.

Not thread-safe: connect and poll move everything. It does not encrypt and does not reconnect.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rose_hpc.errors import TransferTimeout, WeightsError
from rose_hpc.weights.transport.base import (
    MAX_MESSAGE_BYTES,
    STALL_S,
    AttendedClock,
    Event,
    Lost,
    Parts,
    Received,
    as_bytes,
    not_connected,
    one_line,
)
from rose_hpc.weights.transport.framing import MAX_STREAMS, check_key
from rose_hpc.weights.transport.tcp_connection import Address, Watch, resolve
from rose_hpc.weights.transport.tcp_door import Connections, Door
from rose_hpc.weights.transport.tcp_session import Session, Stream

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_LONGEST_WAIT_S = 0.1  # between two looks at deadlines
_MOST_PEERS = 1024


@dataclass(slots=True, eq=False)
class _Link:
    """One peer. sends_on: the session we had first; sessions: by whether we called."""

    peer: str
    instance: bytes
    sends_on: Session
    sessions: dict[bool, Session]


class TcpTransport:
    """Listens on a free port of host and connects to others.

    key: what peers must know to connect to us, at least 32 random bytes, or a function from a peer's name to its key; None: only
    admitted ones. address: (host, port) of the
    listener; for a host of 0.0.0.0 or :: others need a name of this machine instead. streams: connections of a session we open.
    Raises EnvironmentFault when there is no port, WeightsError for a name or key that cannot be used.
    """

    def __init__(
        self,
        name: str,
        key: bytes | Callable[[str], bytes] | None,
        host: str = "127.0.0.1",
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        streams: int = 2,
        stall_s: float = STALL_S,
        handshake_s: float = 5.0,
        backlog: int = 64,
    ) -> None:
        if not 1 <= streams <= MAX_STREAMS:
            raise WeightsError("a session cannot have so many streams", got=streams, expected=f"1 to {MAX_STREAMS}")
        self.name, self.sent_bytes, self.received_bytes = name, 0, 0
        self._max_message_bytes, self._streams, self._stall_s = max_message_bytes, streams, stall_s
        self._watch, self._clock = Watch(), AttendedClock()
        self._links: dict[str, _Link] = {}
        self._events: list[Event] = []
        self._look_s = 0.0  # when to look at deadlines again
        self._woken = False
        self._door = Door(name, key, host, self._watch, self._on_session, stall_s=stall_s, handshake_s=handshake_s, backlog=backlog)
        self.address = self._door.address

    # ── who may connect, who is connected ──

    @property
    def peers(self) -> list[str]:
        return sorted(self._links)

    def is_connected(self, peer: str) -> bool:
        return peer in self._links

    def admit(self, peer: str, key: bytes) -> None:
        """Let this peer connect with this key, and with no other."""
        self._door.admit(peer, key)

    def revoke(self, peer: str) -> None:
        """Forget the key admitted for this peer, and drop the peer."""
        self._door.revoke(peer)
        self.drop(peer)

    def connect(self, peer: str, host: str, port: int, key: bytes, deadline_s: float) -> None:
        """Connect to a listening peer whose key is known; nothing to do where it is connected already.

        Everything else goes on meanwhile; poll reports it later. Raises TransferTimeout, WeightsError.
        """
        ends_s = time.monotonic() + deadline_s
        error: Exception | None = None
        if peer == self.name:
            raise WeightsError("a relay does not connect to itself", got=peer)
        for address in [] if peer in self._links else resolve(host, port, deadline_s):
            error = self._call(peer, address, check_key(key), ends_s)
            if peer in self._links:
                return
        if error is not None:
            kind = TransferTimeout if isinstance(error, TransferTimeout) else WeightsError
            raise kind(f"{self.name}: cannot connect to {peer!r} at {host} port {port}", got=one_line(error)) from error

    def _call(self, peer: str, address: Address, key: bytes, ends_s: float) -> Exception | None:
        """Try one address until the peer is connected, by this call or by its own; why it is not."""
        try:
            call = self._door.call(peer, address, key, self._streams, ends_s)
        except OSError as error:
            return error
        while call.error is None and not call.is_complete:
            if time.monotonic() > ends_s:
                call.error = TransferTimeout("no answer within the deadline")
            else:
                self._round(ends_s)
        if call.error is not None:
            self._door.hang_up(call)
        return call.error

    # ── Transport ──

    def send(self, peer: str, parts: Parts) -> None:
        if (link := self._links.get(peer)) is None:
            raise not_connected(peer)
        link.sends_on.send(as_bytes(parts))

    def queued_bytes(self, peer: str) -> int:
        return 0 if (link := self._links.get(peer)) is None else link.sends_on.queued_bytes

    def poll(self, wait_s: float) -> list[Event]:
        ends_s = time.monotonic() + wait_s
        while True:
            something_went = self._round(0.0 if self._events else ends_s)
            if self._events or something_went or self._woken or time.monotonic() >= ends_s:
                events, self._events, self._woken = self._events, [], False
                return events

    def wake(self) -> None:
        """End the poll that is under way, or the next one. The only method for other threads."""
        self._watch.wake()

    def drop(self, peer: str) -> None:
        if (link := self._links.pop(peer, None)) is not None:
            self._shut(link)
        self._events = [event for event in self._events if event.peer != peer]

    def close(self) -> None:
        for peer in self.peers:
            self.drop(peer)
        self._door.close()
        self._watch.end()

    # ── one round of everything ──

    def _round(self, ends_s: float) -> bool:
        """Write, wait until ends_s for something to come, read, look at deadlines; whether a queued message has gone."""
        self._clock.tick()
        something_went = self._write()
        busy = something_went or any(link.sends_on.can_write for link in self._links.values())
        self._woken |= self._watch.wait(0.0 if busy else min(max(ends_s - time.monotonic(), 0.0), _LONGEST_WAIT_S))
        now_s = time.monotonic()
        if now_s >= self._look_s:
            self._look_s = now_s + min(_LONGEST_WAIT_S, self._stall_s / 4)
            self._door.end_what_is_late(now_s)
            self._lose_what_stalls()
        return something_went

    def _write(self) -> bool:
        something_went = False
        for link in list(self._links.values()):
            if not link.sends_on.can_write:
                continue
            try:
                gone = link.sends_on.write()
            except OSError as error:
                self._lose(link, f"writing failed: {error}")
                continue
            self.sent_bytes += sum(gone)
            something_went |= bool(gone)
            self._watch_streams(link, link.sends_on)
        return something_went

    def _on_stream(self, link: _Link, session: Session, stream: Stream, mask: int) -> None:
        messages: list[memoryview] = []
        error: Exception | None = None
        if mask & _WRITE:
            stream.blocked = False
        if mask & _READ:
            try:
                session.read(stream, messages)
            except (WeightsError, OSError) as caught:
                error = caught
        for message in messages:
            self.received_bytes += message.nbytes
            self._events.append(Received(link.peer, message))
        if error is None:
            self._watch_streams(link, session)
        else:
            self._lose(link, one_line(error))

    def _watch_streams(self, link: _Link, session: Session) -> None:
        """Wait for what each stream can use."""
        for stream in session.streams:
            mask = (0 if stream.paused else _READ) | (_WRITE if stream.blocked else 0)
            self._watch.set(stream.sock, mask, partial(self._on_stream, link, session, stream))

    # ── links ──

    def _on_session(self, connections: Connections, we_called: bool) -> None:
        agreed = connections[0][1]
        session = Session(connections, self._max_message_bytes, self._clock)
        link = self._links.get(agreed.peer)
        if link is not None and (link.instance != agreed.peer_instance or we_called in link.sessions):
            self._lose(link, "it connected anew")
            link = None
        if link is None and len(self._links) >= _MOST_PEERS:
            for sock, _ in connections:
                self._watch.close(sock)
            return
        if link is None:
            link = self._links[agreed.peer] = _Link(agreed.peer, agreed.peer_instance, session, {})
        link.sessions[we_called] = session
        self._watch_streams(link, session)

    def _lose_what_stalls(self) -> None:
        for link in list(self._links.values()):
            if (stalled_s := max(s.stalled_s() for s in link.sessions.values())) > self._stall_s:
                self._lose(link, f"nothing moved for {stalled_s:.1f} s inside a message")

    def _lose(self, link: _Link, why: str) -> None:
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
            self._shut(link)
            self._events.append(Lost(link.peer, why))

    def _shut(self, link: _Link) -> None:
        for session in link.sessions.values():
            for stream in session.streams:
                self._watch.close(stream.sock)
