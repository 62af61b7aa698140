"""How far an apply is: what makes SIGKILL at any instant harmless. A file of fixed size, mapped.

    slot 0:  mark                                  slot 1: mark

    begin    a mark says: everything before this bucket is in the image, the bucket itself perhaps in part
    apply    the bucket goes into the image, change by change, in the order of its lanes; the next mark goes into the other slot

    newest mark     meaning                                              recovery
    none, or idle   the image is what state.json says                    nothing
    active          the buckets before it are applied, none behind it    the rest of its bucket, then those behind it

No copy of what is being written is kept. A delta holds differences, which must not be added twice, so recovery has to know how many of
a bucket's changes are in the image: the digest tells. With `digest` as it was before the bucket, exactly one number k of changes
explains the digest that the image has now (kernels.count_applied; another one would do so by chance once in 2^64 / changes). Where
none does, somebody else wrote to the image, and it is nothing.
A bucket that travelled dense holds absolute bits and is copied again; its mark has the digest without the bucket's lanes.

Invariant: a mark is believed only with its checksum, and the newest by sequence number counts. One that was cut short leaves the
older one in force.

The order of stores is the program's order: a kernel adds a bucket's changes one after the other, and has returned before the next mark
is written. A killed process leaves a prefix of its stores, so no fence or sync is needed (and none would help against the loss of
power).
"""

from __future__ import annotations

import mmap
import struct
import zlib
from typing import NamedTuple

_MARK = struct.Struct("<4sQqqIIQQ?")  # magic, sequence, and the fields of Mark
_CHECKSUM = struct.Struct("<I")
_MAGIC = b"RSJ2"
_SLOT_BYTES = 128
JOURNAL_BYTES = 2 * _SLOT_BYTES
NO_VERSION = -1


class Mark(NamedTuple):
    """How far an apply is.

    version, base: of the delta being applied; version −1: idle. stream: its place in the record's streams; bucket: index; both of the
    bucket that is being applied. changes, digest: of the whole apply, and of the image, before this bucket.
    dense: the bucket holds absolute bits, and the digest is without the lanes that it covers.
    """

    version: int
    base: int
    stream: int = 0
    bucket: int = 0
    changes: int = 0
    digest: int = 0
    dense: bool = False

    @property
    def is_active(self) -> bool:
        return self.version != NO_VERSION


IDLE = Mark(NO_VERSION, NO_VERSION)


class Journal:
    """The journal in a writable mapping of JOURNAL_BYTES. Anybody may look; only a `JournalWriter` writes."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self.mapping = mapping

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

    def begin(self, mark: Mark) -> None:
        """From here on the mark's bucket may be in the image in part, and everything before it is."""
        sequence = self._sequence + 1
        start = _SLOT_BYTES * (sequence % 2)
        body = _MARK.pack(_MAGIC, sequence, *mark)
        self._journal.mapping[start : start + _MARK.size + _CHECKSUM.size] = body + _CHECKSUM.pack(zlib.crc32(body))
        self._sequence, self.mark = sequence, mark

    def clear(self) -> None:
        """No apply is under way: state.json tells."""
        self.begin(IDLE)
