"""The lock on an arena's image: flock on a file of its own, with a deadline, never held by a dead process.

    shared      any number of holders at once        exclusive    one thread of one process, and nobody else

Invariants
- The kernel releases the lock of a process that was killed: nothing here can be left locked.
- Every wait ends at its deadline with TransferTimeout.
- A thread that holds the lock exclusively may take it again, either way, through the same object; holds may end in any order.

flock(2) belongs to the open file, so each hold opens the file anew: two threads of one process exclude each other as two
processes do. It polls, because flock has no timed wait: SIGALRM would be the process's, and F_OFD_SETLKW has none either.
Hazard: a child forked without exec while the lock is held keeps it until it ends, should its parent be killed.
It does not queue: steady readers can hold a writer off until its deadline.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from rose_hpc.errors import TransferTimeout

FIRST_SLEEP_S, LONGEST_SLEEP_S, SLEEP_GROWTH = 0.0005, 0.005, 1.5


class ImageLock:
    """One lock file; it is made by the first who takes the lock and never removed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._guard = threading.Lock()
        self._owner = -1  # thread that holds it exclusively through this object
        self._holds, self._fd = 0, -1

    @contextlib.contextmanager
    def shared(self, deadline_s: float) -> Iterator[None]:
        """Beside other shared holders. Raises TransferTimeout when it is not free within deadline_s."""
        if self._enter_again():
            try:
                yield
            finally:
                self._leave()
            return
        fd = self._acquire(fcntl.LOCK_SH, deadline_s)
        try:
            yield
        finally:
            _release(fd)

    @contextlib.contextmanager
    def exclusive(self, deadline_s: float) -> Iterator[None]:
        """Alone. Raises TransferTimeout when it is not free within deadline_s."""
        if not self._enter_again():
            fd = self._acquire(fcntl.LOCK_EX, deadline_s)
            with self._guard:
                self._owner, self._holds, self._fd = threading.get_ident(), 1, fd
        try:
            yield
        finally:
            self._leave()

    def _enter_again(self) -> bool:
        """One more hold, when this thread has the lock exclusively already."""
        with self._guard:
            if self._owner != threading.get_ident():
                return False
            self._holds += 1
            return True

    def _leave(self) -> None:
        with self._guard:
            self._holds -= 1
            if self._holds:
                return
            fd, self._fd, self._owner = self._fd, -1, -1
        _release(fd)

    def _acquire(self, kind: int, deadline_s: float) -> int:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        end_s, sleep_s = time.monotonic() + deadline_s, FIRST_SLEEP_S
        try:
            while not _try(fd, kind):
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    raise self._timeout(kind, deadline_s)
                time.sleep(min(sleep_s, left_s))
                sleep_s = min(sleep_s * SLEEP_GROWTH, LONGEST_SLEEP_S)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _timeout(self, kind: int, deadline_s: float) -> TransferTimeout:
        return TransferTimeout(
            f"the image in {self._path.parent} is in use",
            got=f"locked for {deadline_s:g} s",
            expected="no writer" if kind == fcntl.LOCK_SH else "no reader and no other writer",
            remedy="wait longer, or find the process that holds image.lock (/proc/locks)",
        )


def _try(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _release(fd: int) -> None:
    """Unlock before closing: a forked child may hold the same open file."""
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)
