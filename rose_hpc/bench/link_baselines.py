"""Dense and COO transfers over the shaped link, as good as plain TCP streams can make them: what the engine is compared with.

    rank 0 … 3 (near, one process each, a quarter of the image each)  ══ link ══▶  receivers (far, one process each, the whole image)

Each rank's quarter is one stream of frames down a tree of receivers, or straight to every receiver. Frames are encoded, sent, forwarded
and applied as a pipeline: a receiver passes bytes on while the rest of their frame still arrives. Connections stay open throughout.

- "dense": the new bits. No rank gathers first, each streams its quarter at once: a gather that costs nothing. One crossing.
- "coo_tree": COO frames down the engine's own tree. One crossing.
- "coo_all": COO frames from the ranks to every receiver. As many crossings as receivers.

With a delay, a forwarder stands before every receiver that a rank feeds. There is no check, no digest, no shared memory and no recovery
in them, which favours them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import selectors
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

import numpy as np
from numpy.typing import NDArray

from rose_hpc.bench.baselines import Coo, CooEncoder, apply_coo
from rose_hpc.bench.delay import DelayForwarder
from rose_hpc.bench.link_trees import RANKS, SOURCE, Parents
from rose_hpc.bench.shaped_link import LinkCounters, ShapedLink
from rose_hpc.errors import RunFailed, TransferTimeout
from rose_hpc.lifeline import die_with_parent

DENSE_FRAME_LANES = 1 << 19  # 1 MiB
COO_FRAME_LANES = 1 << 22  # scanned per frame: 75 kB of changes at 0.3 %
PIECE_BYTES = 256 << 10  # passed on at once
CONNECT_DEADLINE_S = 20.0
_FRAME = struct.Struct("<IIQ")  # payload bytes, changes (0: dense), first lane
_END = _FRAME.pack(0, 0, (1 << 64) - 1)  # of a version

Lanes = NDArray[np.uint16]


class Way(StrEnum):
    """How a version is brought over."""

    DENSE = "dense"
    COO_TREE = "coo_tree"
    COO_ALL = "coo_all"


@dataclass(frozen=True)
class Timing:
    """seconds: from the command to the last receiver; counted: what crossed the link meanwhile."""

    seconds: float
    counted: LinkCounters


class SharedImages:
    """Images in memory that forked processes share: the trainer's before and after, and one per receiver. uint16 [lanes] each."""

    def __init__(self, base: Lanes, receivers: int) -> None:
        self.old, self.new = _shared(base), _shared(base)
        self.receivers = [_shared(base) for _ in range(receivers)]

    def quarter(self, rank: int) -> slice:
        """Lanes of one rank."""
        lanes = len(self.old)
        cut = [rank * lanes // RANKS // 32 * 32 for rank in range(RANKS)] + [lanes]
        return slice(cut[rank], cut[rank + 1])


class Flood:
    """Processes of one way and one number of receivers. Use as a context manager; `measure` once per version."""

    def __init__(self, link: ShapedLink, images: SharedImages, way: Way, parents: Parents, delay_s: float = 0.0) -> None:
        """delay_s: one way, between the ranks and the receivers that they feed."""
        self._link, self._images, self._way, self._parents, self._delay_s = link, images, way, parents, delay_s
        self._count = len(parents[0])
        self._pids: list[int] = []
        self._starts: list[int] = []  # write ends; closing them ends the ranks
        self._done = -1

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def measure(self, deadline_s: float) -> Timing:
        """Bring images.new to every receiver, once; images.old may become it. Raises TransferTimeout."""
        before, start = self._link.counters(), time.monotonic()
        for fd in self._starts:
            os.write(fd, b"!")
        self._wait(RANKS * self._count, start + deadline_s)
        seconds = time.monotonic() - start
        return Timing(seconds, self._link.counters().since(before))

    def _start(self) -> None:
        listeners, doors = self._listeners(), self._listeners() if self._delay_s else []
        addresses = [listener.getsockname() for listener in listeners]
        entries = [door.getsockname() for door in doors] if doors else addresses
        self._done, done = os.pipe()
        with self._link.inside(self._link.far):
            for i, listener in enumerate(listeners):
                self._fork(lambda i=i, listener=listener: self._receive(i, listener, addresses, done))  # type: ignore[misc]
            if doors:
                self._fork(lambda: _forward(doors, addresses, self._delay_s))
        os.close(done)
        with self._link.inside(self._link.near):
            for rank in range(RANKS):
                start, write = os.pipe()
                self._starts.append(write)
                self._fork(lambda rank=rank, start=start: self._send(rank, start, entries))  # type: ignore[misc]
                os.close(start)
        for listener in (*listeners, *doors):
            listener.close()
        self._wait(RANKS * self._count, time.monotonic() + CONNECT_DEADLINE_S)  # every stream is connected everywhere

    def _listeners(self) -> list[socket.socket]:
        """One per receiver, on free ports of the far side."""
        with self._link.inside(self._link.far):
            return [socket.create_server((self._link.far.address, 0)) for _ in range(self._count)]

    def _fork(self, work: Callable[[], None]) -> None:
        """A child that does `work` and ends, whatever happens in it: it must not unwind our stack."""
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            self._pids.append(pid)
            return
        status = 1
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            die_with_parent(signal.SIGKILL)
            for fd in (*self._starts, self._done):  # ours to keep: a rank ends when the last of them is closed
                os.close(fd)
            work()
            status = 0
        except BaseException:  # the process's edge
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def _wait(self, count: int, end_s: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._done, selectors.EVENT_READ)
            while count:
                if not selector.select(max(0.0, end_s - time.monotonic())):
                    raise TransferTimeout(f"a {self._way} transfer is not done", got=f"{count} of its streams are missing")
                arrived = len(os.read(self._done, count))
                if not arrived:
                    raise RunFailed(f"the receivers of a {self._way} transfer have ended", remedy="see what they wrote above")
                count -= arrived

    def _stop(self) -> None:
        for fd in (*self._starts, self._done):
            if fd >= 0:
                os.close(fd)
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._pids, self._starts, self._done = [], [], -1

    # ── in the children ──

    def _send(self, rank: int, start: int, addresses: Sequence[tuple[str, int]]) -> None:
        children = [_connect(addresses[i], rank) for i, parent in enumerate(self._parents[rank]) if parent == SOURCE]
        frames = self._dense_frames if self._way is Way.DENSE else self._coo_frames
        while os.read(start, 1):
            for header, *payload in frames(rank):
                for child in children:
                    _send_all(child, [header, *payload])
            for child in children:
                child.sendall(_END)

    def _dense_frames(self, rank: int) -> Iterator[list[bytes | memoryview]]:
        quarter = self._images.quarter(rank)
        for first in range(quarter.start, quarter.stop, DENSE_FRAME_LANES):
            lanes = self._images.new[first : min(first + DENSE_FRAME_LANES, quarter.stop)]
            yield [_FRAME.pack(lanes.nbytes, 0, first), lanes.data.cast("B")]

    def _coo_frames(self, rank: int) -> Iterator[list[bytes | memoryview]]:
        quarter, encoder = self._images.quarter(rank), CooEncoder(COO_FRAME_LANES)
        for first in range(quarter.start, quarter.stop, COO_FRAME_LANES):
            part = slice(first, min(first + COO_FRAME_LANES, quarter.stop))
            coo = encoder.encode(self._images.old[part], self._images.new[part], first)
            if len(coo.values):
                header = _FRAME.pack(coo.nbytes, len(coo.values), first)
                yield [header, coo.positions.data.cast("B"), coo.values.data.cast("B")]

    def _receive(self, receiver: int, listener: socket.socket, addresses: Sequence[tuple[str, int]], done: int) -> None:
        """One thread per stream; each reports a connected stream, then every finished version, with a byte."""
        threads = []
        listener.settimeout(CONNECT_DEADLINE_S)
        for _ in range(RANKS):
            source, _ = listener.accept()
            source.settimeout(None)
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream = source.recv(1)[0]
            children = [_connect(addresses[i], stream) for i, parent in enumerate(self._parents[stream]) if parent == receiver]
            threads.append(threading.Thread(target=_follow, args=(source, children, self._images.receivers[receiver], done)))
            threads[-1].start()
        for thread in threads:
            thread.join()


def _forward(doors: Sequence[socket.socket], addresses: Sequence[tuple[str, int]], delay_s: float) -> None:
    """In a child, until it is killed."""
    with contextlib.ExitStack() as stack:
        for door, address in zip(doors, addresses, strict=True):
            stack.enter_context(DelayForwarder(door, address, delay_s))
        signal.pause()


def _shared(content: Lanes) -> Lanes:
    array: Lanes = np.frombuffer(mmap.mmap(-1, content.nbytes), np.uint16)
    np.copyto(array, content)
    return array


def _connect(address: tuple[str, int], stream: int) -> socket.socket:
    connection = socket.create_connection(address, CONNECT_DEADLINE_S)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(bytes([stream]))
    return connection


def _send_all(connection: socket.socket, parts: list[bytes | memoryview]) -> None:
    """All parts in as few calls as the kernel takes them."""
    left = sum(len(part) for part in parts)
    sent = connection.sendmsg(parts)
    while sent < left:
        left -= sent
        while sent >= len(parts[0]):
            sent -= len(parts.pop(0))
        parts[0] = memoryview(parts[0])[sent:]
        sent = connection.sendmsg(parts)


def _follow(source: socket.socket, children: Sequence[socket.socket], image: Lanes, done: int) -> None:
    """Receive, pass on and apply one stream until its parent closes it."""
    os.write(done, b"c")
    room = bytearray(COO_FRAME_LANES * 6)
    raw = image.data.cast("B")
    while header := _exactly(source, _FRAME.size):
        for child in children:
            child.sendall(header)
        if header == _END:
            os.write(done, b"v")
            continue
        nbytes, changes, first = _FRAME.unpack(header)
        target = memoryview(room)[:nbytes] if changes else raw[2 * first : 2 * first + nbytes]
        _pass_on(source, children, target)
        if changes:
            positions = np.frombuffer(target[: 4 * changes], np.int32)
            apply_coo(Coo(positions, np.frombuffer(target[4 * changes :], np.uint16)), image)


def _exactly(source: socket.socket, nbytes: int) -> bytes:
    """So many bytes, or none at the end of the stream."""
    content = b""
    while len(content) < nbytes:
        chunk = source.recv(nbytes - len(content))
        if not chunk:
            return b""
        content += chunk
    return content


def _pass_on(source: socket.socket, children: Sequence[socket.socket], target: memoryview) -> None:
    at = 0
    while at < len(target):
        got = source.recv_into(target[at : at + PIECE_BYTES])
        if not got:
            raise RunFailed("a stream ended in the middle of a frame")
        for child in children:
            child.sendall(target[at : at + got])
        at += got
