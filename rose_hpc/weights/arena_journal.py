"""Redo journal of an apply: what makes SIGKILL at any instant harmless. A file of fixed size, mapped.

    slot 0:  mark │ lanes int64 [BLOCK_LANES] │ bits uint16 [BLOCK_LANES]          slot 1: the same

    stage    absolute bits of one block go into the slot that the newest mark does not use
    complete the slot's mark says: this block may be in the image in part; everything before it is there
    scatter  the block goes into the image; the next block is staged into the other slot

    A bucket that travelled dense needs no slot: its stored message holds absolute bits. Its mark alone is written before the copy.

    newest mark     meaning                                                        recovery
    none, or idle   the image is what state.json says                              nothing
    active          the blocks before it are applied, its own perhaps in part,     scatter its block again, go on behind it
                    none behind it

Invariants
- A mark is believed only with its checksum, and the newest by sequence number counts. One that was cut short leaves the other,
  older slot in force, whose block is whole: staging never touches it.
- Bits are absolute, so scattering a block twice is scattering it once.
- Progress, the number of changes and the digest so far are part of the mark: they survive with it.

The order of stores is the program's order: staging is a compiled call that has returned before the mark is written. A killed
process leaves a prefix of its stores, so no fence or sync is needed (and none would help against the loss of power).
"""

from __future__ import annotations

import mmap
import struct
import zlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rose_hpc.weights.arena_kernels import scatter, stage, sum_bits

Lanes = NDArray[np.uint16]

BLOCK_LANES = 8192  # 80 KiB a slot: both stay in L2 together with the image lines of a block
_MARK = struct.Struct("<4sQqqIIQQQIQ?")  # magic, sequence, and the fields of Mark
_CHECKSUM = struct.Struct("<I")
_MAGIC = b"RSJ1"
_MARK_BYTES = 128
_LANES_BYTES, _BITS_BYTES = BLOCK_LANES * 8, BLOCK_LANES * 2
_SLOT_BYTES = _MARK_BYTES + _LANES_BYTES + _BITS_BYTES
JOURNAL_BYTES = 2 * _SLOT_BYTES
NO_VERSION = -1


class Mark(NamedTuple):
    """How far an apply is.

    version, base: of the delta being applied; version −1: idle. stream: its place in the record's streams; bucket: index;
    done: lanes of this bucket that are in the image once the block is scattered. changes, digest: so far, of the whole apply.
    lanes: lanes in the block; bits_sum: its part of the new digest, which proves the block when it is read again.
    dense: the block is the bucket's stored message instead, and its part of the new digest is still to be added.
    """

    version: int
    base: int
    stream: int = 0
    bucket: int = 0
    done: int = 0
    changes: int = 0
    digest: int = 0
    lanes: int = 0
    bits_sum: int = 0
    dense: bool = False

    @property
    def is_active(self) -> bool:
        return self.version != NO_VERSION


IDLE = Mark(NO_VERSION, NO_VERSION)


class Journal:
    """The journal in a writable mapping of JOURNAL_BYTES. Anybody may look; only a `JournalWriter` writes."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self.mapping = mapping
        starts = [_SLOT_BYTES * slot for slot in (0, 1)]
        self.lanes = [np.frombuffer(mapping, np.int64, BLOCK_LANES, start + _MARK_BYTES) for start in starts]
        self.bits = [np.frombuffer(mapping, np.uint16, BLOCK_LANES, start + _MARK_BYTES + _LANES_BYTES) for start in starts]

    def newest(self) -> Mark:
        """The mark in force; IDLE when there has never been one."""
        return self.in_force()[1]

    def in_force(self) -> tuple[int, Mark]:
        """(sequence, mark); sequence 0 and IDLE when neither slot holds one."""
        found = [m for m in (self._read(slot) for slot in (0, 1)) if m is not None]
        return max(found, default=(0, IDLE))

    def _read(self, slot: int) -> tuple[int, Mark] | None:
        start = _SLOT_BYTES * slot
        body = self.mapping[start : start + _MARK.size]
        if body[:4] != _MAGIC or _CHECKSUM.unpack_from(self.mapping, start + _MARK.size)[0] != zlib.crc32(body):
            return None
        _, sequence, *fields = _MARK.unpack(body)
        return sequence, Mark(*fields)


class JournalWriter:
    """Goes on from the mark in force. Make one under the exclusive lock, and use it only there."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._sequence, self.mark = journal.in_force()

    def stage(self, image: Lanes, lanes: NDArray[np.int64], values: Lanes, absolute: bool) -> tuple[int, int]:
        """Write a block's absolute bits into the free slot. Returns its part of the digest (before, after).

        lanes: image lanes, at most BLOCK_LANES of them; values: new bits where absolute, else differences from the image's.
        The image is not changed. `complete` must follow before the next `stage`.
        """
        slot = (self._sequence + 1) % 2
        before, after = stage(image, lanes, values, absolute, self._journal.lanes[slot], self._journal.bits[slot])
        return int(before), int(after)

    def complete(self, mark: Mark) -> None:
        """The mark of what has been staged; from here on the block counts."""
        sequence = self._sequence + 1
        start = _SLOT_BYTES * (sequence % 2)
        body = _MARK.pack(_MAGIC, sequence, *mark)
        self._journal.mapping[start : start + _MARK.size + _CHECKSUM.size] = body + _CHECKSUM.pack(zlib.crc32(body))
        self._sequence, self.mark = sequence, mark

    def scatter(self, image: Lanes) -> None:
        """Write the block of the mark in force into the image."""
        scatter(image, *self._block())

    def is_whole(self) -> bool:
        """Whether the block of the mark in force is what was staged: memory may have been written to by others."""
        return int(sum_bits(*self._block())) == self.mark.bits_sum

    def clear(self) -> None:
        """No apply is under way: state.json tells."""
        self.complete(IDLE)

    def _block(self) -> tuple[NDArray[np.int64], Lanes]:
        slot, lanes = self._sequence % 2, self.mark.lanes
        return self._journal.lanes[slot][:lanes], self._journal.bits[slot][:lanes]
