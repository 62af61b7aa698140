"""Where a run's arenas live: a private folder in shared memory with an owner, so that nothing leaks.

    ROOT/rose_hpc-UID-RANDOM/ (0700)     lock (held by the owner for its life), tmp/, trainer/, executors/ …

tmp/ is the TMPDIR of the run's processes: sockets and scratch files of vLLM, MPI and torch go with the run, too.

The owner removes it when it ends. If the owner was killed, the lock is free, and the next `create` of the same user on this
machine removes the folder: a lock that can be taken belongs to nobody.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from pathlib import Path

from rose_hpc.weights.vllm_leftovers import remove_shared_memory, worker_groups

PREFIX = "rose_hpc"


class ArenaHome:
    """Use as a context manager; `path` is the folder."""

    def __init__(self, root: Path) -> None:
        sweep(root)
        self.path = root / f"{PREFIX}-{os.getuid()}-{secrets.token_hex(6)}"
        preparing = root / f".{self.path.name}"  # a sweep that runs now must not find the folder before it is locked
        preparing.mkdir(mode=0o700)
        self._lock = os.open(preparing / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        (preparing / "tmp").mkdir(mode=0o700)
        preparing.rename(self.path)

    @property
    def tmp(self) -> Path:
        return self.path / "tmp"

    def __enter__(self) -> ArenaHome:
        return self

    def __exit__(self, *_: object) -> None:
        _remove(self.path)
        os.close(self._lock)


def sweep(root: Path) -> list[Path]:
    """Remove this user's arena homes whose owner is gone; returns them."""
    removed = []
    for path in sorted(root.glob(f"{PREFIX}-{os.getuid()}-*")):
        if not path.is_symlink() and _is_abandoned(path / "lock"):
            _remove(path)
            removed.append(path)
    return removed


def _remove(path: Path) -> None:
    """And what killed engines have left elsewhere in shared memory."""
    remove_shared_memory(worker_groups(path))
    shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(lock: Path) -> bool:
    try:
        fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
