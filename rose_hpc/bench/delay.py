"""A TCP forwarder that delivers everything a fixed time later, in both directions: the latency of a long link, without netem.

    client ──▶ forwarder (HOST, a free port) ── delay_s ──▶ target

    python -m rose_hpc.bench.delay HOST TARGET_HOST TARGET_PORT DELAY_S FILE      writes its address into FILE, ends with its parent

Bytes keep their order and their pace; at most WINDOW_BYTES of a direction are under way, after which the sender is held back. Delivery is
late by the kernel's timer, some 60 µs.
"""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from rose_hpc.control import write_private
from rose_hpc.errors import RunFailed
from rose_hpc.lifeline import die_with_parent

CHUNK_BYTES = 64 << 10
WINDOW_BYTES = 64 << 20  # more than 10 Gb/s × 10 ms × 2
CONNECT_DEADLINE_S = 10.0


class DelayForwarder:
    """Use as a context manager; `address` is where to connect instead of the target."""

    def __init__(self, listener: socket.socket, target: tuple[str, int], delay_s: float) -> None:
        """listener: where clients connect; leaving the context closes it."""
        self._target, self._delay_s, self._listener = target, delay_s, listener
        self.address: tuple[str, int] = listener.getsockname()
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for end in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._thread.join(CONNECT_DEADLINE_S)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            try:
                target = socket.create_connection(self._target, CONNECT_DEADLINE_S)
            except OSError:
                client.close()
                continue
            target.settimeout(None)
            self._open += [client, target]
            self._pump([(client, target), (target, client)])

    def _pump(self, ways: Sequence[tuple[socket.socket, socket.socket]]) -> None:
        for source, sink in ways:
            sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            under_way: queue.Queue[tuple[float, bytes]] = queue.Queue(WINDOW_BYTES // CHUNK_BYTES)
            threading.Thread(target=self._read, args=(source, under_way), daemon=True).start()
            threading.Thread(target=_deliver, args=(sink, under_way), daemon=True).start()

    def _read(self, source: socket.socket, under_way: queue.Queue[tuple[float, bytes]]) -> None:
        chunk = b"?"
        while chunk:
            try:
                chunk = source.recv(CHUNK_BYTES)
            except OSError:
                chunk = b""
            under_way.put((time.monotonic() + self._delay_s, chunk))


def _deliver(sink: socket.socket, under_way: queue.Queue[tuple[float, bytes]]) -> None:
    """Until the end of the stream, which is passed on like everything else."""
    with contextlib.suppress(OSError):  # the other side has gone: nobody is there to be told
        while True:
            due_s, chunk = under_way.get()
            time.sleep(max(0.0, due_s - time.monotonic()))
            if not chunk:
                sink.shutdown(socket.SHUT_WR)
                return
            sink.sendall(chunk)


def read_address(file: Path, deadline_s: float) -> tuple[str, int]:
    """Where a forwarder in another process listens, once it does. Raises RunFailed after deadline_s."""
    end_s = time.monotonic() + deadline_s
    while not file.exists():
        if time.monotonic() > end_s:
            raise RunFailed("the forwarder did not start", got=f"no {file} after {deadline_s:g} s")
        time.sleep(0.05)
    host, port = json.loads(file.read_text())
    return str(host), int(port)


def main(host: str, target_host: str, target_port: str, delay_s: str, file: str) -> int:
    """Process entry; ends by a signal."""
    die_with_parent()
    with DelayForwarder(socket.create_server((host, 0)), (target_host, int(target_port)), float(delay_s)) as forwarder:
        write_private(Path(file), json.dumps(forwarder.address))
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:6]))
