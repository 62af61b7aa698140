"""What a lease may take of the operator's memory: the files below its folder, which lies in a memory file system, within what it asked for.

The free memory is compared with that before the lease starts (lease_book.py); during the lease its files must not outgrow it: the
relay writes what the run's controller tells it to.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

ALLOWANCE_BYTES = 64 << 20  # beside the arena: tokens, sockets, scratch files of vLLM
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
