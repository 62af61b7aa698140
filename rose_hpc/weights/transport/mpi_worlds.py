"""Whether two MPI worlds can be joined here, found out by trying. Imports no MPI: two short-lived worlds do.

python -m rose_hpc.weights.transport.mpi_worlds accept|connect PORT_FILE DEADLINE_S      one side, under a launcher
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

_WORD = b"joined"


def can_join_worlds(launcher: Sequence[str] = (), deadline_s: float = 20.0) -> bool:
    """Start two worlds of one rank, join them with MPI_Comm_accept and MPI_Comm_connect and pass a word from one to the other.

    launcher: starts one rank, such as ["mpiexec", "-n", "1"], which is the default. False when anything fails or takes longer.
    """
    command = list(launcher) if launcher else _mpiexec()
    if not command:
        return False
    with tempfile.TemporaryDirectory(prefix="rose-mpi-") as folder:
        port_file = Path(folder) / "port"
        sides = [_start(command, side, port_file, deadline_s) for side in ("accept", "connect")]
        ends_s = time.monotonic() + deadline_s + 5
        return all([_ends_well(side, ends_s) for side in sides])


def _mpiexec() -> list[str]:
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.is_file() else shutil.which("mpiexec")
    return [] if found is None else [found, "-n", "1"]


def _start(command: list[str], side: str, port_file: Path, deadline_s: float) -> subprocess.Popen[bytes] | None:
    arguments = [sys.executable, "-m", __spec__.name if __spec__ else __name__, side, str(port_file), str(deadline_s)]
    try:
        return subprocess.Popen(
            [*command, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
    except OSError:
        return None


def _ends_well(side: subprocess.Popen[bytes] | None, ends_s: float) -> bool:
    if side is None:
        return False
    try:
        return side.wait(max(ends_s - time.monotonic(), 0.1)) == 0
    except subprocess.TimeoutExpired:
        os.killpg(side.pid, signal.SIGKILL)
        side.wait()
        return False


def main(side: str, port_file: Path, deadline_s: float) -> int:
    """Process entry of one side. Exit status 0 when the word has arrived."""
    from rose_hpc.weights.transport.mpi import MpiTransport

    ends_s = time.monotonic() + deadline_s
    world = MpiTransport([side], deadline_s)
    if side == "accept":
        part = port_file.with_suffix(".part")
        part.write_text(world.open_port())
        part.rename(port_file)
        link = world.accept(port_file.read_text(), deadline_s)
        link.send("connect", [_WORD])
        while link.queued_bytes("connect") and time.monotonic() < ends_s:
            link.poll(0.1)
        return int(link.sent_bytes != len(_WORD))
    while not port_file.exists() and time.monotonic() < ends_s:
        time.sleep(0.02)
    link = world.connect(port_file.read_text(), max(ends_s - time.monotonic(), 1.0))
    while not link.received_bytes and time.monotonic() < ends_s:
        link.poll(0.1)
    return int(link.received_bytes != len(_WORD))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])))
