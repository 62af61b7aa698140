"""What a lease's files take of the operator's memory."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose_hpc.coserve.lease_memory import ALLOWANCE_BYTES, allocated_bytes, outgrown

MIB = 1 << 20


@pytest.fixture
def folder() -> Iterator[Path]:
    """In a memory file system, where a file takes what was written."""
    with tempfile.TemporaryDirectory(prefix="rose-test-", dir="/dev/shm") as name:
        yield Path(name)


def test_what_is_allocated_counts_and_neither_holes_nor_second_names_nor_what_a_link_points_to(folder: Path, tmp_path: Path) -> None:
    assert allocated_bytes(folder) == allocated_bytes(folder / "absent") == 0
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "er" / "file").write_bytes(bytes(MIB))
    assert allocated_bytes(folder) == MIB
    os.link(folder / "deep" / "er" / "file", folder / "second")
    (tmp_path / "big").write_bytes(bytes(MIB))
    (folder / "link").symlink_to(tmp_path / "big")
    (folder / "folder").symlink_to(tmp_path)
    with (folder / "hole").open("wb") as file:
        file.truncate(100 * MIB)
    assert allocated_bytes(folder) == MIB
    with (folder / "hole").open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, 2 * MIB)
    assert allocated_bytes(folder) == 3 * MIB


def test_it_is_told_once_the_arena_and_the_allowance_are_used_up(folder: Path) -> None:
    async def scene() -> int:
        watching = asyncio.create_task(outgrown(folder, 2 * MIB, poll_s=0.02))
        with (folder / "arena").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, ALLOWANCE_BYTES + 2 * MIB)
            await asyncio.sleep(0.3)
            assert not watching.done()
            os.posix_fallocate(file.fileno(), 0, ALLOWANCE_BYTES + 3 * MIB)
        return await asyncio.wait_for(watching, 5)

    assert asyncio.run(scene()) == ALLOWANCE_BYTES + 3 * MIB
