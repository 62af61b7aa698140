"""What an MPI process does to end without traces, and how it waits. Imports no MPI."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from rose_hpc.weights.transport.base import Naps


def unlink_mapped_segments() -> None:
    """Take the names of MPICH's shared-memory segments away once all local ranks have them mapped.

    MPICH removes them in MPI_Finalize only: a SIGKILL would leave them in /dev/shm for good. It does not mind that they are gone.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        if found := re.search(r"/dev/shm/mpich_shm_\w+$", line):
            Path(found[0]).unlink(missing_ok=True)


def end_without_traces(number: int, frame: FrameType | None) -> None:
    """On SIGTERM the world ends, whoever still starts: MPI_Finalize would wait for peers that may be gone."""
    unlink_mapped_segments()
    os._exit(128 + number)


def until(ready: Callable[[], bool], deadline_s: float) -> bool:
    """Poll with growing naps; False when the deadline passed."""
    ends_s, naps = time.monotonic() + deadline_s, Naps()
    while not ready():
        if (left_s := ends_s - time.monotonic()) < 0:
            return False
        time.sleep(naps.next_s(left_s))
    return True
