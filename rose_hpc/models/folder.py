"""A new folder appears whole or not at all.

The files are written to a hidden folder beside the target, which is then renamed over it: rename(2) is atomic and
replaces only a missing or an empty folder, so of two writers one wins and the other is refused. An exception removes the
hidden folder. After SIGKILL it stays; it is not swept by the next writer, who cannot tell it from one still in use.
Durability across a power cut is not sought: what is written here can be made again.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rose_hpc.errors import UsageError


class FolderInUse(UsageError):
    """The folder to be made is already there, and not empty."""


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to write into; it becomes `target` when the block ends without an exception.

    Missing parents are made. Raises FolderInUse, before the block where that can be seen already, else after it.
    """
    _refuse_if_taken(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    hidden = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    hidden.mkdir()
    try:
        yield hidden
        _rename(hidden, target)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)  # after the rename it is gone


def _refuse_if_taken(target: Path) -> None:
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists() or target.is_symlink():
        raise _taken(target)


def _rename(hidden: Path, target: Path) -> None:
    try:
        hidden.rename(target)
    except OSError:
        _refuse_if_taken(target)
        raise


def _taken(target: Path) -> FolderInUse:
    return FolderInUse(
        f"{target} cannot be made",
        got="a folder with files in it" if target.is_dir() else "a file of that name",
        expected="no such folder, or an empty one",
        remedy="name another folder, or remove this one yourself: nothing is overwritten",
    )
