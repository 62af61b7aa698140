"""Which memory the KV blocks take that a rollout engine may not use, so that it can go back while the engine goes on. CPUs only.

    scheduler ──held blocks──▶ BOARD.held (slots.py) ◀──read, when asked──── worker: gives their pages back (weights/host_pages.py)
                                       └──seen to have changed── engine's process ──collective call──▶ worker

Payload of a record: the ids of the held blocks, u32 each, little-endian.

Invariants
- A page goes back only when no other block lies on it (asserted by the tests).
- The scheduler is not running while workers look: a collective call occupies the engine's loop, so that what they read is held still.

What is given back reads as zeros and costs a page fault when it is written again. On GPUs nothing happens: vLLM's pool cannot be
unmapped in part.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from rose_hpc.coserve.slots import Record, SlotWriter, read_record
from rose_hpc.weights.host_pages import Range


class Placement(Protocol):
    """vLLM's KVCacheTensor: layer l of block b begins at offset + l × layer_stride + b × block_stride of the allocation."""

    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int


def held_path(board: Path) -> Path:
    """The file beside a board with the blocks that its rollout engine may not use."""
    return board.with_name(f"{board.name}.held")


class HeldWriter:
    """The scheduler's end. blocks: of its KV cache."""

    def __init__(self, board: Path, blocks: int) -> None:
        self._slots = SlotWriter(held_path(board), capacity_bytes(blocks))
        self.write(())

    def write(self, block_ids: Iterable[int]) -> None:
        """Replace the list."""
        self._slots.write(_little_endian(array("I", block_ids)).tobytes())

    def close(self) -> None:
        """Give up the file; its last record stays."""
        self._slots.close()


def read_held(board: Path, blocks: int) -> list[int]:
    """The other end: ids of the blocks that are held. blocks: of the KV cache. Raises RoseError: slots.py."""
    record = read_record(held_path(board), capacity_bytes(blocks))
    return [] if record is None else _block_ids(record)


def capacity_bytes(blocks: int) -> int:
    """Of the file's records."""
    return 4 * blocks


def _block_ids(record: Record) -> list[int]:
    """The ids in a record."""
    ids = array("I")
    ids.frombytes(record.payload)
    return _little_endian(ids).tolist()


def _little_endian(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values.byteswap()
    return values


def block_ranges(ids: Iterable[int], placements: Iterable[Placement]) -> list[Range]:
    """Bytes of the allocation that these blocks own, sorted and joined where they touch."""
    pieces: list[Range] = []
    blocks = sorted(ids)
    for place in placements:
        page = min(place.layer_stride, place.block_stride) if len(place.layers) > 1 else place.block_stride
        starts = (place.offset + layer * place.layer_stride + b * place.block_stride for layer in range(len(place.layers)) for b in blocks)
        pieces += [(start, start + page) for start in starts]
    return list(_joined(sorted(pieces)))


def _joined(pieces: list[Range]) -> Iterator[Range]:
    begin = end = -1
    for start, stop in pieces:
        if start > end:
            if end > begin:
                yield begin, end
            begin = start
        end = max(end, stop)
    if end > begin:
        yield begin, end
