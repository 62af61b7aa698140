"""What a lease may take of the operator's memory: the files below its folder, which lies in a memory file system, within what it asked for.

The free memory is compared with that before the lease starts (lease_book.py); during the lease its files must not outgrow it: the
relay writes what the run's controller tells it to. Whoever takes it, when the machine's memory runs short the lease is over: before the
kernel has to choose whom to kill.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import psutil

ALLOWANCE_BYTES = 64 << 20  # beside the arena: tokens, sockets, scratch files of vLLM
LEAST_FREE_FRAC = 0.03  # of the machine's memory
POLL_S = 2.0
BLOCK_BYTES = 512  # of st_blocks: stat(2)


def allocated_bytes(folder: Path) -> int:
    """What everything in the folder takes: a file of several names once, holes and what vanishes not at all. Links are not followed."""
    taken: dict[tuple[int, int], int] = {}
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            try:
                status = os.lstat(os.path.join(parent, name))
            except FileNotFoundError:
                continue
            taken[status.st_dev, status.st_ino] = status.st_blocks
    return BLOCK_BYTES * sum(taken.values())


async def outgrown(folder: Path, arena_bytes: int, poll_s: float = POLL_S) -> int:
    """Returns, once the folder takes more than the arena that was asked for and ALLOWANCE_BYTES, how much it takes."""
    while (taken := await asyncio.to_thread(allocated_bytes, folder)) <= arena_bytes + ALLOWANCE_BYTES:
        await asyncio.sleep(poll_s)
    return taken


async def short_of_memory(poll_s: float = POLL_S) -> int:
    """Returns, once less than LEAST_FREE_FRAC of the machine's memory is available, how many bytes are."""
    while (memory := psutil.virtual_memory()).available >= LEAST_FREE_FRAC * memory.total:
        await asyncio.sleep(poll_s)
    return int(memory.available)
