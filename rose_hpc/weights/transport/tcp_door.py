"""Who comes in and who is called: handshakes of arriving and dialled connections, gathered into sessions.

    listener ─▶ Handshake (stranger, handshake_s) ─▶ _Gathering (authenticated, until all `streams` are there) ─▶ on_session
    call()   ─▶ Handshakes of all streams          ─▶ _Gathering                                              ─▶ on_session

Strangers get the listener's backlog, a few hundred bytes each and handshake_s; when there are too many, the oldest has to go, so
that idle connections keep nobody out.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from rose_hpc.errors import WeightsError
from rose_hpc.weights.transport.framing import (
    ID_BYTES,
    NONCE_BYTES,
    Agreed,
    Hello,
    Refused,
    accept,
    check_key,
    check_name,
    initiate,
)
from rose_hpc.weights.transport.tcp_connection import Address, Handshake, Watch, dial, listen, prepare

Connections = list[tuple[socket.socket, Agreed]]


@dataclass(slots=True)
class Gathering:
    """Connections of one session whose handshake is done, by index. error: why a call failed."""

    ends_s: float
    handshakes: list[Handshake] = field(default_factory=list)
    done: dict[int, tuple[socket.socket, Agreed]] = field(default_factory=dict)
    error: Exception | None = None
    is_complete: bool = False


class Door:
    """on_session(connections in order, whether we called) is called once per session, from inside watch.wait()."""

    def __init__(
        self,
        name: str,
        key: bytes | Callable[[str], bytes] | None,
        host: str,
        watch: Watch,
        on_session: Callable[[Connections, bool], None],
        *,
        stall_s: float,
        handshake_s: float,
        backlog: int,
    ) -> None:
        check_name(name)
        self._name, self._key = name, check_key(key) if isinstance(key, bytes) else key
        self._watch, self._on_session = watch, on_session
        self._stall_s, self._handshake_s, self._backlog = stall_s, handshake_s, backlog
        self._instance = secrets.token_bytes(ID_BYTES)
        self._admitted: dict[str, bytes] = {}
        self._strangers: dict[Handshake, None] = {}  # in order of arrival
        self._gatherings: dict[tuple[str, bytes, bytes], Gathering] = {}
        self._listener = listen(host, backlog)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        watch.set(self._listener, selectors.EVENT_READ, self._on_arrivals)

    def admit(self, peer: str, key: bytes) -> None:
        check_name(peer)
        self._admitted[peer] = check_key(key)

    def revoke(self, peer: str) -> None:
        self._admitted.pop(peer, None)

    # ── calling ──

    def call(self, peer: str, address: Address, key: bytes, streams: int, ends_s: float) -> Gathering:
        """Begin to open a session; it is done when on_session was called, or when the result has an error. Raises OSError."""
        session, gathering = secrets.token_bytes(ID_BYTES), Gathering(ends_s)
        for index in range(streams):
            hello = Hello(streams, index, session, self._instance, secrets.token_bytes(NONCE_BYTES), self._name, peer)
            sock = dial(address, self._stall_s)
            handshake = Handshake(sock, initiate(hello, key), ends_s)
            gathering.handshakes.append(handshake)
            self._watch.set(sock, handshake.interest, partial(self._on_called, gathering, handshake))
        return gathering

    def hang_up(self, gathering: Gathering) -> None:
        """Close what a call has opened so far."""
        for handshake in gathering.handshakes:
            self._watch.close(handshake.sock)

    def _on_called(self, gathering: Gathering, handshake: Handshake, mask: int) -> None:
        try:
            agreed = handshake.advance()
        except (WeightsError, OSError) as error:
            gathering.error = error
            self._watch.set(handshake.sock, 0, _nothing)
            return
        self._watch.set(handshake.sock, 0, _nothing)
        if agreed is None:
            self._watch.set(handshake.sock, handshake.interest, partial(self._on_called, gathering, handshake))
        else:
            self._gather(gathering, handshake.sock, agreed, True)

    # ── answering ──

    def _on_arrivals(self, mask: int) -> None:
        for _ in range(self._backlog):
            try:
                sock, _ = self._listener.accept()
                prepare(sock, self._stall_s)
            except OSError:  # nobody more, or one that has left again
                return
            script = accept(self._name, self._instance, secrets.token_bytes(NONCE_BYTES), self._key_of)
            stranger = Handshake(sock, script, time.monotonic() + self._handshake_s)
            self._strangers[stranger] = None
            self._watch.set(sock, stranger.interest, partial(self._on_stranger, stranger))
            if len(self._strangers) > self._backlog:
                self._turn_away(next(iter(self._strangers)))

    def _key_of(self, peer: str) -> bytes | None:
        return self._admitted.get(peer, self._key(peer) if callable(self._key) else self._key)

    def _on_stranger(self, stranger: Handshake, mask: int) -> None:
        try:
            agreed = stranger.advance()
        except (WeightsError, OSError):
            self._turn_away(stranger)
            return
        self._watch.set(stranger.sock, 0, _nothing)
        if agreed is None:
            self._watch.set(stranger.sock, stranger.interest, partial(self._on_stranger, stranger))
            return
        del self._strangers[stranger]
        who = (agreed.peer, agreed.peer_instance, agreed.hello.session)
        gathering = self._gatherings.setdefault(who, Gathering(stranger.ends_s))
        if self._gather(gathering, stranger.sock, agreed, False):
            del self._gatherings[who]

    def _gather(self, gathering: Gathering, sock: socket.socket, agreed: Agreed, we_called: bool) -> bool:
        """Add a connection to its session; whether the session is complete, and has been handed over."""
        connections, hello = gathering.done, agreed.hello
        first = next(iter(connections.values()))[1].hello if connections else hello
        if hello.index in connections or hello.streams != first.streams:
            gathering.error = Refused("two connections claim the same place in a session")
            self._watch.close(sock)
            return False
        connections[hello.index] = (sock, agreed)
        if len(connections) < hello.streams:
            return False
        gathering.is_complete = True
        self._on_session([connections[i] for i in range(hello.streams)], we_called)
        return True

    # ── ending ──

    def end_what_is_late(self, now_s: float) -> None:
        for stranger in [s for s in self._strangers if s.ends_s < now_s]:
            self._turn_away(stranger)
        for who in [w for w, g in self._gatherings.items() if g.ends_s < now_s]:
            for sock, _ in self._gatherings.pop(who).done.values():
                self._watch.close(sock)

    def close(self) -> None:
        self.end_what_is_late(float("inf"))
        self._watch.close(self._listener)

    def _turn_away(self, stranger: Handshake) -> None:
        del self._strangers[stranger]
        self._watch.close(stranger.sock)


def _nothing(mask: int) -> None:
    pass
