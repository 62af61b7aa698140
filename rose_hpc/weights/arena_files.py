"""Files of an arena: private, appearing whole or not at all, never through a link, never past the end of the file system.

Invariants
- A file appears by rename when all of it is written: whoever opens it sees all of it, and a SIGKILL leaves a name that starts
  with TEMPORARY or nothing.
- A file that is mapped for writing has all its blocks allocated before (posix_fallocate): a store into a hole on a full file
  system ends the process with SIGBUS, an allocation raises EnvironmentFault.
- Folders have mode 0700, files 0600, and O_NOFOLLOW is set on every open.

SIGKILL is what it is safe against, not the loss of power: nothing is synced, an arena lies in memory.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from rose_hpc.errors import EnvironmentFault, WeightsError

TEMPORARY = "."  # first character of names that mean nothing
MAX_JSON_BYTES = 64 << 20
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_serial = itertools.count()

T = TypeVar("T")


def make_folder(path: Path) -> None:
    """Make a private folder, or make an existing one private. Raises WeightsError for what is no folder of this user."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_folder(path, others_may_write=True)
    if path.stat().st_mode & 0o077:
        path.chmod(0o700)


def check_folder(path: Path, others_may_write: bool = False) -> None:
    """Raises WeightsError unless path is a folder, no link, of this user, in which nobody else can make files."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or (found.st_mode & 0o022 and not others_may_write):
        raise WeightsError(
            f"{path} cannot be an arena",
            got=f"mode {stat.filemode(found.st_mode)}, user {found.st_uid}",
            expected=f"a folder that only user {os.geteuid()} can write",
        )


def write_file(path: Path | str, parts: Sequence[bytes | memoryview]) -> None:
    """A file of these parts, mode 0600, by rename. Raises EnvironmentFault when there is no room; then path is as it was."""
    folder, name = os.path.split(path)
    temporary = f"{folder}/{TEMPORARY}{name}.{os.getpid()}.{next(_serial)}"
    with _room(folder, name, sum(len(p) for p in parts)):
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            try:
                for part in parts:
                    _write_all(fd, memoryview(part))
            finally:
                os.close(fd)
            os.rename(temporary, path)
        except BaseException:
            remove_file(temporary)
            raise


def allocate_file(path: Path, nbytes: int) -> None:
    """A file of nbytes zeros whose blocks are all there, by rename. Raises EnvironmentFault when there is no room."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}.{os.getpid()}.{next(_serial)}")
    with _room(str(path.parent), path.name, nbytes):
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            try:
                os.posix_fallocate(fd, 0, nbytes)
            finally:
                os.close(fd)
            os.rename(temporary, path)
        except BaseException:
            remove_file(temporary)
            raise


def read_file(path: Path | str, max_bytes: int = MAX_JSON_BYTES) -> bytes | None:
    """The content, or None where there is no such file. Raises WeightsError when it is longer than max_bytes."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with open(fd, "rb") as file:
        content = file.read(min(os.fstat(file.fileno()).st_size, max_bytes) + 1)  # read() takes memory for all that it is asked for
    if len(content) > max_bytes:
        raise WeightsError(f"{path} is too long", expected=f"at most {max_bytes} bytes")
    return content


def file_stamp(path: str) -> tuple[int, int] | None:
    """Another one for every file that has had this name, as files here appear by rename; None where there is none."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


class WatchedFile(Generic[T]):
    """What a file of ours holds, parsed anew when another has taken its place. parse: of its content, None where there is none."""

    def __init__(self, path: Path, parse: Callable[[bytes | None], T], max_bytes: int = MAX_JSON_BYTES) -> None:
        self._path, self._parse, self._max_bytes = os.fspath(path), parse, max_bytes
        self._stamp: tuple[int, int] | None = None
        self._found: T

    def read(self) -> T:
        """Raises what `parse` raises, and WeightsError when the file is longer than max_bytes."""
        stamp = file_stamp(self._path)
        if stamp is None:
            return self._parse(None)
        if stamp != self._stamp:
            self._found, self._stamp = self._parse(read_file(self._path, self._max_bytes)), stamp
        return self._found


def map_file(path: Path | str, nbytes: int | None = None, writable: bool = False) -> mmap.mmap | None:
    """A shared mapping of a whole file, or None where there is none; it outlives the name.

    nbytes: the size it must have. Raises WeightsError on another size: a store behind the end would be SIGBUS.
    """
    try:
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        size = os.fstat(fd).st_size
        if size == 0 or (nbytes is not None and size != nbytes):
            raise WeightsError(f"{path} is not what it was made as", got=f"{size} bytes", expected=f"{nbytes} bytes")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return mmap.mmap(fd, size, mmap.MAP_SHARED, protection)
    finally:
        os.close(fd)


def remove_folder(path: Path) -> None:
    """Gone at once: renamed, then removed. Nothing happens where there is none."""
    gone = path.with_name(f"{TEMPORARY}{path.name}.{os.getpid()}.{next(_serial)}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, gone)
        shutil.rmtree(gone, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove what writers that were killed left behind. Only where no writer is at work in this very folder."""
    for path in folder.iterdir():
        if path.name.startswith(TEMPORARY):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                remove_file(path)


@contextlib.contextmanager
def _room(folder: str, name: str, nbytes: int) -> Iterator[None]:
    """Turn a full file system into an EnvironmentFault."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        room = os.statvfs(folder)
        raise EnvironmentFault(
            f"no room for {folder}/{name}",
            got=f"{error.strerror}; {room.f_bavail * room.f_frsize} bytes free",
            expected=f"{nbytes} bytes",
            remedy="enlarge the file system, point weights.arena_root elsewhere, or lower weights.retained_versions",
        ) from error


def _write_all(fd: int, content: memoryview) -> None:
    content = content.cast("B")
    while content:
        content = content[os.write(fd, content) :]


def remove_file(path: Path | str) -> None:
    """Nothing happens where there is none."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
