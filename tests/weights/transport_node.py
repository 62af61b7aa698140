"""One relay-like process of the transport contract: polls its transport and does what a test says over a Unix socket.

    python transport_node.py KIND NAMES FOLDER        KIND: tcp, gloo (forks the ranks), mpi (is one rank); NAMES: a,b,c

FOLDER holds limits.json and the test's socket. LEAVE_OPEN in the environment: a node ends without closing its transport. Commands
and replies are JSON lines. Contents are made from seeds on both sides; events name them by a checksum.
"""

import json
import os
import socket
import sys
import time
import zlib
from pathlib import Path

import numpy as np

from rose_hpc.errors import RoseError
from rose_hpc.weights.transport.base import Lost

KEY = bytes(range(32))
IDLE_S = 120.0  # a node that hears nothing from its test for so long ends


def content(seed, nbytes):
    return np.random.default_rng(seed).bytes(nbytes)


def checksum(message):
    return zlib.crc32(message)


def make_tcp(names, rank, folder, limits):
    from rose_hpc.weights.transport.tcp import TcpTransport

    return TcpTransport(names[rank], KEY, **limits)


def make_gloo(names, rank, folder, limits):
    import torch.distributed as dist

    from rose_hpc.weights.transport.torchdist import TorchDistTransport

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(names))
    return TorchDistTransport(None, names, **limits)


def make_mpi(names, rank, folder, limits):
    from rose_hpc.weights.transport.mpi import MpiTransport

    return MpiTransport(names, 20.0, **limits)


class Node:
    def __init__(self, transport, control):
        self.transport, self.control, self.events = transport, control, []

    def run(self):
        line, heard = b"", time.monotonic()
        while time.monotonic() - heard < IDLE_S:
            self.note(self.transport.poll(0.01))
            try:
                some = self.control.recv(1 << 16)
            except BlockingIOError:
                continue
            if not some:
                return
            heard, line = time.monotonic(), line + some
            while b"\n" in line:
                command, line = line.split(b"\n", 1)
                self.control.setblocking(True)
                self.control.sendall(json.dumps(self.do(**json.loads(command))).encode() + b"\n")
                self.control.setblocking(False)

    def note(self, events):
        for e in events:
            self.events.append(
                ["lost", e.peer, e.why] if isinstance(e, Lost) else ["received", e.peer, len(e.message), checksum(e.message)]
            )

    def do(self, what, **how):
        try:
            return getattr(self, what)(**how)
        except RoseError as error:
            return {"error": type(error).__name__, "what": str(error)}

    def send(self, peer, messages):
        """messages: [seed, sizes of the parts] each."""
        for seed, sizes in messages:
            whole, ends = memoryview(content(seed, sum(sizes))), np.cumsum(sizes)
            self.transport.send(peer, [whole[end - size : end] for size, end in zip(sizes, ends, strict=True)])

    def take(self):
        events, self.events = self.events, []
        return events

    def counts(self, peer):
        t = self.transport
        return {"sent": t.sent_bytes, "received": t.received_bytes, "queued": t.queued_bytes(peer)}

    def sleep(self, seconds):
        time.sleep(seconds)

    def timed_poll(self, wait_s):
        begun = time.monotonic()
        self.note(self.transport.poll(wait_s))
        return time.monotonic() - begun

    def memory(self):
        return int(next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmPeak")))

    def drop(self, peer):
        self.transport.drop(peer)

    def connect(self, peer, port):
        self.transport.connect(peer, "127.0.0.1", port, KEY, 10.0)


def main(kind, names, folder, rank=None):
    limits = json.loads((Path(folder) / "limits.json").read_text())
    transport = {"tcp": make_tcp, "gloo": make_gloo, "mpi": make_mpi}[kind](names, rank, folder, limits)
    control = socket.socket(socket.AF_UNIX)
    control.connect(f"{folder}/control")
    hello = {"name": transport.name, "pid": os.getpid(), "port": transport.address[1] if kind == "tcp" else 0}
    control.sendall(json.dumps(hello).encode() + b"\n")
    control.setblocking(False)
    Node(transport, control).run()
    if not os.environ.get("LEAVE_OPEN"):
        transport.close()


def fork_all(kind, names, folder):
    """Run every rank in a child, after the imports; the worst exit status."""
    if kind == "gloo":
        import torch.distributed  # noqa: F401
    for rank in range(len(names)):
        if os.fork() == 0:
            return main(kind, names, folder, rank)
    sys.exit(max(os.waitstatus_to_exitcode(os.wait()[1]) % 256 for _ in names))


if __name__ == "__main__":
    (main if sys.argv[1] == "mpi" else fork_all)(sys.argv[1], sys.argv[2].split(","), sys.argv[3])
