"""Sockets of the TCP transport: listen, resolve, dial, wait for many at once, and a handshake script run over one."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable

from rose_hpc.errors import EnvironmentFault, TransferTimeout, WeightsError
from rose_hpc.weights.transport.framing import Agreed, Refused, Script

Address = tuple[socket.AddressFamily, tuple[str, int] | tuple[str, int, int, int]]


def listen(host: str, backlog: int) -> socket.socket:
    """A listening socket on a free port. host: a name or an address, IPv4 or IPv6. Raises EnvironmentFault."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(address[:2], family=family, backlog=backlog)
    except OSError as error:
        raise EnvironmentFault(
            f"no port to listen on at {host!r}", got=error, remedy="name an address of this machine for the relays"
        ) from error
    listener.setblocking(False)
    return listener


def resolve(host: str, port: int, deadline_s: float) -> list[Address]:
    """Addresses to try in turn. Raises TransferTimeout, WeightsError.

    A name is looked up in a thread: the resolver has no deadline of its own, and may be given up.
    """
    try:
        return _look_up(host, port, socket.AI_NUMERICHOST)
    except OSError:
        pass  # a name
    found: list[list[Address] | OSError] = []

    def look_up() -> None:
        try:
            found.append(_look_up(host, port, 0))
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=look_up, name="resolve", daemon=True)
    thread.start()
    thread.join(deadline_s)
    if not found:
        raise TransferTimeout(f"the name {host!r} is not resolved", got=f"nothing in {deadline_s:g} s")
    if isinstance(found[0], OSError):
        raise WeightsError(f"the name {host!r} cannot be resolved", got=found[0])
    return found[0]


def _look_up(host: str, port: int, flags: int) -> list[Address]:
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, address) for family, _, _, _, address in infos]  # type: ignore[misc]


def dial(address: Address, stall_s: float) -> socket.socket:
    """A socket that is being connected. Raises OSError."""
    sock = socket.socket(address[0], socket.SOCK_STREAM)
    try:
        prepare(sock, stall_s)
        if (code := sock.connect_ex(address[1])) not in (0, errno.EINPROGRESS):
            raise OSError(code, errno.errorcode.get(code, "connect failed"))
    except OSError:
        sock.close()
        raise
    return sock


def prepare(sock: socket.socket, stall_s: float) -> None:
    """Non-blocking, no delay of small messages; a host that vanished ends the connection after stall_s, also when it is idle."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(int(stall_s * 1000), 1))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(int(stall_s / 2), 1))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(int(stall_s / 4), 1))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)


class Watch:
    """Waits for many sockets at once and calls the handler of each that is ready with what it is ready for."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._bell_lock = threading.Lock()
        self._masks: dict[socket.socket, int] = {}

    def set(self, sock: socket.socket, mask: int, handler: Callable[[int], None]) -> None:
        """Wait for EVENT_READ | EVENT_WRITE as mask says, or for nothing. A socket keeps its first handler while mask is not 0."""
        old = self._masks.get(sock, 0)
        if mask == old:
            return
        self._masks[sock] = mask
        if not old:
            self._selector.register(sock, mask, handler)
        elif mask:
            self._selector.modify(sock, mask, handler)
        else:
            self._selector.unregister(sock)

    def close(self, sock: socket.socket) -> None:
        """Close a socket, watched or not."""
        if self._masks.pop(sock, 0):
            self._selector.unregister(sock)
        sock.close()

    def wake(self) -> None:
        """End the wait that is under way, or the next one. From any thread; nothing happens after `end`."""
        with self._bell_lock:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def wait(self, wait_s: float) -> bool:
        """Whether `wake` was called."""
        woken = False
        ready = self._selector.select(0 if wait_s < 1e-3 else wait_s)  # the selector rounds up to a whole millisecond
        if not ready and 0 < wait_s < 1e-3:
            time.sleep(wait_s)
            ready = self._selector.select(0)
        for key, mask in ready:
            if key.fileobj == self._bell:
                woken = bool(os.eventfd_read(self._bell))
            elif isinstance(key.fileobj, socket.socket) and self._masks.get(key.fileobj, 0):  # not closed by one before it
                key.data(mask)
        return woken

    def end(self) -> None:
        """Close everything."""
        for sock in list(self._masks):
            self.close(sock)
        self._selector.close()
        with self._bell_lock:  # its number may be another file's from here on
            if self._bell >= 0:
                os.close(self._bell)
            self._bell = -1


class Handshake:
    """A script of framing.py run over a non-blocking socket, until ends_s (monotonic)."""

    def __init__(self, sock: socket.socket, script: Script, ends_s: float) -> None:
        self.sock, self.ends_s = sock, ends_s
        self._script = script
        self._out, self._need = next(script)
        self._got = b""

    @property
    def interest(self) -> int:
        """What to wait for."""
        return selectors.EVENT_WRITE if self._out else selectors.EVENT_READ

    def advance(self) -> Agreed | None:
        """Go as far as the socket allows; the result at the end. Raises Refused, TransferTimeout, OSError."""
        if time.monotonic() > self.ends_s:
            raise TransferTimeout("a handshake took too long")
        while True:
            try:
                if self._out:
                    self._out = self._out[self.sock.send(self._out) :]
                    continue
                if len(self._got) < self._need:
                    self._got += self._receive()
                    continue
            except BlockingIOError:
                return None
            got, self._got = self._got, b""
            try:
                self._out, self._need = self._script.send(got)
            except StopIteration as end:
                agreed: Agreed = end.value
                return agreed

    def _receive(self) -> bytes:
        if not (some := self.sock.recv(self._need - len(self._got))):
            raise Refused("the peer ended the handshake: another key, another name, or it does not know ours")
        return some
