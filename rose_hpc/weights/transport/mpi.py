"""MPI transport: point-to-point messages inside one world, built from Isend, Iprobe and Irecv with deadlines.

The only module that imports mpi4py, and only a relay imports it: MPI lives in a disposable process that never forks.
Blocking calls are not used: a peer that was killed would hang them for ever. Waiting sleeps between tests, because an MPI
wait burns a core that the trainer and the engines need.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import mpi4py

from rose_hpc.errors import EnvironmentFault, TransferTimeout, WeightsError

mpi4py.rc.thread_level = "single"

from mpi4py import MPI  # noqa: E402  (the thread level must be set before MPI starts)

_TAG = 7
_FIRST_NAP_S, _LONGEST_NAP_S = 20e-6, 2e-3


class MpiTransport:
    """Peers are the ranks of COMM_WORLD. Building it is collective: every rank takes part within deadline_s."""

    def __init__(self, expected_size: int, deadline_s: float) -> None:
        self._comm = MPI.COMM_WORLD
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        self.sent_bytes = self.received_bytes = 0
        signal.signal(signal.SIGTERM, _end_without_traces)
        if self.size != expected_size:
            _unlink_mapped_segments()
            raise EnvironmentFault(
                "MPI started separate worlds instead of one",
                got=f"a world of {self.size}",
                expected=f"one world of {expected_size}",
                remedy="use the launcher of the MPI that mpi4py loads (python -m mpi4py --mpi-lib-version), or set weights.mpiexec",
            )

        if not _until(self._comm.Ibarrier().Test, deadline_s):
            raise TransferTimeout("the relays of this world did not all start", got=f"nothing in {deadline_s:g} s")
        _unlink_mapped_segments()

    def send(self, peer: int, content: bytes | memoryview, deadline_s: float) -> None:
        request = self._comm.Isend([content, MPI.BYTE], dest=peer, tag=_TAG)
        if not _until(request.Test, deadline_s):
            request.Cancel()
            raise TransferTimeout(f"relay {self.rank}: peer {peer} does not take a message", got=f"nothing in {deadline_s:g} s")
        self.sent_bytes += memoryview(content).nbytes

    def receive(self, peer: int, max_bytes: int, deadline_s: float) -> memoryview:
        status = MPI.Status()
        if not _until(lambda: self._comm.Iprobe(source=peer, tag=_TAG, status=status), deadline_s):
            raise TransferTimeout(f"relay {self.rank}: no message from peer {peer}", got=f"nothing in {deadline_s:g} s")
        nbytes = status.Get_count(MPI.BYTE)
        if nbytes > max_bytes:
            raise WeightsError(
                f"relay {self.rank}: peer {peer} announces too long a message", got=f"{nbytes} bytes", expected=f"at most {max_bytes}"
            )
        buffer = bytearray(nbytes)
        request = self._comm.Irecv([buffer, MPI.BYTE], source=peer, tag=_TAG)
        if not _until(request.Test, deadline_s):
            request.Cancel()
            raise TransferTimeout(
                f"relay {self.rank}: a message from peer {peer} stopped half way", got=f"incomplete after {deadline_s:g} s"
            )
        self.received_bytes += nbytes
        return memoryview(buffer)


def _unlink_mapped_segments() -> None:
    """Take the names of MPICH's shared-memory segments away once all local ranks have them mapped.

    MPICH removes them in MPI_Finalize only: a SIGKILL would leave them in /dev/shm for good. It does not mind that they are gone.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        if found := re.search(r"/dev/shm/mpich_shm_\w+$", line):
            Path(found[0]).unlink(missing_ok=True)


def _end_without_traces(number: int, frame: FrameType | None) -> None:
    """On SIGTERM the world ends, whoever still starts: MPI_Finalize would wait for peers that may be gone."""
    _unlink_mapped_segments()
    os._exit(128 + number)


def _until(ready: Callable[[], bool], deadline_s: float) -> bool:
    """Poll with growing naps; False when the deadline passed."""
    end, nap_s = time.monotonic() + deadline_s, _FIRST_NAP_S
    while not ready():
        if time.monotonic() > end:
            return False
        time.sleep(nap_s)
        nap_s = min(nap_s * 1.5, _LONGEST_NAP_S)
    return True
