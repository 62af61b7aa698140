"""One writer, many readers, one small record in a file: neither ever waits for the other, and no reader takes a torn record.

    offset 0      header   magic 8 bytes "ROSESLOT" | version u32 | capacity u32 | writer pid u32 | zero u32
                           | writer start u64 (clock ticks since boot, proc(5) field 22) | zero 28 bytes | CRC-32 u32     64 bytes
    offset 64     slot 0   sequence u64 | length u32 | CRC-32 u32 | payload, at most `capacity` bytes
    offset 64+16+capacity  slot 1   the same

Little-endian. Record n goes to slot n mod 2, so that record n − 1 stays whole while n is written. A slot's CRC-32 covers
sequence, length and payload: a reader recognises a slot torn by a crash, or by a writer still at it, on any memory model.

Invariants
- `read` returns a record that was written, entire, and never one older than the last it returned from the same file.
- The writer owns an exclusive flock(2) on the file while it lives: a second writer is refused.
- The space is allocated before the first record: a full file system is an error at the start, not a SIGBUS later.

The writer writes through a mapping: in the middle of a serving step, with cold caches, pwrite(2) took 18 µs. Like any file
that a process maps, it must not be truncated by hand. The reader uses pread(2), which no truncation can hurt.
Put the file on a memory file system (/dev/shm): on a disk, writing it back can make the writer wait.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from rose_hpc.errors import EnvironmentFault, RoseError

MAGIC, VERSION = b"ROSESLOT", 1
HEADER = struct.Struct("<8sIIIIQ28x")  # and its CRC-32
HEADER_BYTES = 64
SLOT_HEAD = struct.Struct("<QII")
PREFIX = struct.Struct("<QI")  # what of SLOT_HEAD the CRC covers
CRC = struct.Struct("<I")
READ_ATTEMPTS = 8  # one fails only when the writer writes two records during a read


@dataclass(frozen=True, slots=True)
class Writer:
    """Identity of a process: a process id alone is reused."""

    pid: int
    start_ticks: int

    def alive(self) -> bool:
        """Whether that very process still runs. A zombie does not."""
        return start_ticks(self.pid) == self.start_ticks


@dataclass(frozen=True, slots=True)
class Record:
    """What was read. sequence: counts the file's records, over all of its writers."""

    payload: bytes
    sequence: int
    writer: Writer


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None when there is none or it is a zombie (proc(5), stat)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZXx" else int(fields[19])


def open_private(path: Path) -> int:
    """Open or create our own regular file of mode 0600. Raises EnvironmentFault where something else is in its place."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
        return descriptor
    os.close(descriptor)
    raise EnvironmentFault(
        f"{path} cannot hold shared state",
        got=f"{stat.filemode(found.st_mode)} of user {found.st_uid}",
        expected=f"a regular file of user {os.geteuid()}, mode 0600",
        remedy="remove it, or give another path",
    )


class SlotWriter:
    """Writes records of at most `capacity` bytes. Opens (and where needed creates) the file; `close` leaves it in place."""

    def __init__(self, path: Path, capacity: int) -> None:
        self.path, self._capacity = path, capacity
        self._fd = open_private(path)
        try:
            self._map = self._take_over()
        except BaseException:
            os.close(self._fd)
            raise

    def _take_over(self) -> mmap.mmap:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise EnvironmentFault(f"{self.path} has a writer already", remedy="give each engine a path of its own") from error
        size = _file_bytes(self._capacity)
        self._sequence = max((sequence for sequence, _ in _slots(os.pread(self._fd, size, 0), self._capacity)), default=0)
        os.ftruncate(self._fd, size)
        os.posix_fallocate(self._fd, 0, size)
        ours = start_ticks(os.getpid())
        header = HEADER.pack(MAGIC, VERSION, self._capacity, os.getpid(), 0, 0 if ours is None else ours)
        os.pwrite(self._fd, header + CRC.pack(zlib.crc32(header)), 0)
        return mmap.mmap(self._fd, size)

    def write(self, payload: bytes) -> None:
        """Replace the record; the one before it stays whole until this one is."""
        if len(payload) > self._capacity:
            raise RoseError(f"{self.path}: record too long", got=f"{len(payload)} bytes", expected=f"at most {self._capacity}")
        self._sequence += 1
        slot, begin = slot_bytes(self._sequence, payload), slot_offset(self._sequence, self._capacity)
        self._map[begin : begin + len(slot)] = slot

    def close(self) -> None:
        """Give up the file; its last record stays readable."""
        self._map.close()
        os.close(self._fd)


def read_record(path: Path, capacity: int) -> Record | None:
    """The newest whole record of a file; None: no file, or none written yet. Raises RoseError: see SlotReader.read."""
    reader = SlotReader(path, capacity)
    try:
        return reader.read()
    finally:
        reader.close()


class SlotReader:
    """Reads the newest whole record. Opens the file when it is there; `reopen` looks for a file that has taken its place."""

    def __init__(self, path: Path, capacity: int) -> None:
        self.path, self._capacity = path, capacity
        self._fd = -1
        self._newest = 0  # sequence last returned
        self.reopen()

    @property
    def attached(self) -> bool:
        """Whether there was a file the last time we looked."""
        return self._fd >= 0

    def reopen(self) -> None:
        """Open the file that now has the path, if any."""
        self.close()
        self._newest = 0
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return

    def read(self) -> Record | None:
        """The newest record; None: no file, or no writer has written yet.

        Raises RoseError when the file was written for another capacity or version, or holds no whole slot.
        """
        if not self.attached:
            return None
        for _ in range(READ_ATTEMPTS):
            image = os.pread(self._fd, _file_bytes(self._capacity), 0)
            writer = self._writer(image)
            if writer is None:
                return None
            sequence, payload = max(_slots(image, self._capacity), default=(0, b""))
            if sequence and sequence >= self._newest:  # else a slot read before the writer passed it, and the other while it did
                self._newest = sequence
                return Record(payload, sequence, writer)
            if not any(image[HEADER_BYTES:]):
                return None
        raise RoseError(f"{self.path} holds no whole record", got="two torn slots", remedy="restart its writer")

    def _writer(self, image: bytes) -> Writer | None:
        head = image[:HEADER_BYTES]
        if len(head) < HEADER_BYTES or CRC.pack(zlib.crc32(head[: HEADER.size])) != head[HEADER.size :]:
            return None  # a writer is just opening it
        magic, version, capacity, pid, _, start = HEADER.unpack(head[: HEADER.size])
        if (magic, version, capacity) != (MAGIC, VERSION, self._capacity):
            raise RoseError(
                f"{self.path} is not a file of ours",
                got=(magic, version, capacity),
                expected=(MAGIC, VERSION, self._capacity),
                remedy="run the same rose_hpc on both sides",
            )
        return Writer(pid, start)

    def close(self) -> None:
        """Let go of the file; `read` then returns None."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def slot_bytes(sequence: int, payload: bytes) -> bytes:
    """A slot as it lies in the file."""
    prefix = PREFIX.pack(sequence, len(payload))
    return prefix + CRC.pack(zlib.crc32(payload, zlib.crc32(prefix))) + payload


def slot_offset(sequence: int, capacity: int) -> int:
    """Where the slot of a record begins in the file."""
    return HEADER_BYTES + (sequence % 2) * (SLOT_HEAD.size + capacity)


def _file_bytes(capacity: int) -> int:
    return HEADER_BYTES + 2 * (SLOT_HEAD.size + capacity)


def _slots(image: bytes, capacity: int) -> list[tuple[int, bytes]]:
    """Sequence and payload of each whole slot."""
    found = (_slot(image, slot_offset(which, capacity), capacity) for which in (0, 1))
    return [slot for slot in found if slot is not None]


def _slot(image: bytes, offset: int, capacity: int) -> tuple[int, bytes] | None:
    if len(image) < offset + SLOT_HEAD.size:
        return None
    sequence, length, crc = SLOT_HEAD.unpack_from(image, offset)
    if sequence == 0 or length > capacity:
        return None
    payload = image[offset + SLOT_HEAD.size :][:length]
    whole = zlib.crc32(payload, zlib.crc32(PREFIX.pack(sequence, length))) == crc
    return (sequence, payload) if whole else None
