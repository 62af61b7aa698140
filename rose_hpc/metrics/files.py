"""The metrics files of a run: their names, and how tables lie in HDF5.

    RUN/metrics.h5     attempt 0          RUN/metrics.N.h5     attempt N, after the N-th resume
    RUN/serving.h5     …                  RUN/serving.N.h5     the same, written by the client of the serving engine

One file per attempt and writer, never overwritten. Every file has all tables; those that its writer does not fill stay empty.
Life of a file, which at every instant is one that `read_table` accepts:

    reserved (0 bytes, O_EXCL) ──▶ all tables made under a temporary name, SWMR on, renamed over it ──▶ rows are appended

Only flushed rows are visible. A SIGKILL of the writer leaves the rows of the last flush; no repair is needed. Flushing means
handing the bytes to the operating system: a crash of the whole node may cost what the kernel had not yet written.
Other programs must open a file that was not closed with SWMR as well (h5py: swmr=True), or after `h5clear -s`.
Locks of HDF5 are off, because some cluster file systems have none. This module decides nothing about batching.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from rose_hpc.errors import UsageError
from rose_hpc.metrics.schema import SCHEMA_VERSION, TABLES, Column, Table, Value

# SWMR needs the file format of HDF5 1.10; later features are left unused so that older tools can read the file.
_FORMAT = ("v110", "v110")
# One chunk of a table. Small: a chunk is rewritten at each flush until it is full, and each table occupies at least one.
_CHUNK_BYTES = 64 << 10
_NAME = re.compile(r"(metrics|serving)(?:\.(\d+))?\.h5")


def metrics_file(run_dir: Path, attempt: int) -> Path:
    """Where the controller's metrics of one attempt lie."""
    return _file(run_dir, "metrics", attempt)


def serving_file(run_dir: Path, attempt: int) -> Path:
    """Where the client of the serving engine records its requests of one attempt."""
    return _file(run_dir, "serving", attempt)


def _file(run_dir: Path, stem: str, attempt: int) -> Path:
    return run_dir / (f"{stem}.{attempt}.h5" if attempt else f"{stem}.h5")


def attempt_files(run_dir: Path, stem: str = "metrics") -> dict[int, Path]:
    """The files of one stem in a run folder by attempt, in order; empty where there is none, or no folder."""
    found = {attempt_of(path): path for path in run_dir.glob(f"{stem}*.h5") if _is_named(path, stem)}
    return dict(sorted(found.items()))


def _is_named(path: Path, stem: str) -> bool:
    match = _NAME.fullmatch(path.name)
    return match is not None and match[1] == stem


def next_attempt(run_dir: Path) -> int:
    """The attempt that a start or a resume of this run is: 0 in a fresh folder, never one of which any file is there."""
    return max((*attempt_files(run_dir), *attempt_files(run_dir, "serving")), default=-1) + 1


def attempt_of(path: Path) -> int:
    """The attempt that a file's name states: 0 where it states none."""
    match = _NAME.fullmatch(path.name)
    return int(match[2]) if match and match[2] else 0


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class TableFile:
    """A metrics file open for appending. `close` it; a file that was not closed is readable all the same."""

    def __init__(self, file: h5py.File) -> None:
        self._file = file

    @classmethod
    def create(cls, path: Path, attempt: int, started_s: float) -> TableFile:
        """Make the file with all its tables, empty. Raises UsageError where it exists already."""
        path.parent.mkdir(parents=True, exist_ok=True)
        _reserve(path)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        file = h5py.File(temporary, "w", libver=_FORMAT, locking=False)
        file.attrs.update(schema_version=SCHEMA_VERSION, attempt=attempt, started_s=started_s, run=path.parent.resolve().name)
        for table in TABLES.values():
            _make_table(file, table)
        file.swmr_mode = True
        temporary.replace(path)
        return cls(file)

    def append(self, table: Table, rows: Sequence[Sequence[Value]]) -> None:
        """Add rows to a table and flush it, so that readers see them."""
        dataset = self._file[table.name]
        end = len(dataset) + len(rows)
        dataset.resize((end,))
        dataset[end - len(rows) :] = table.array(rows).view(_file_dtype(table))
        dataset.flush()

    def close(self) -> None:
        self._file.close()


def _reserve(path: Path) -> None:
    """Claim the name, on file systems without hard links too."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    except FileExistsError as error:
        raise UsageError(
            f"{path} exists already; metrics are never overwritten", remedy="resume the run, or start it in another folder"
        ) from error


def _make_table(file: h5py.File, table: Table) -> None:
    chunk_rows = max(1, _CHUNK_BYTES // table.dtype.itemsize)
    dataset = file.create_dataset(table.name, shape=(0,), maxshape=(None,), chunks=(chunk_rows,), dtype=_file_dtype(table))
    dataset.attrs["description"] = table.description
    dataset.attrs["columns"] = table.column_names
    dataset.attrs["units"] = [c.unit for c in table.columns]
    dataset.attrs["descriptions"] = [c.description for c in table.columns]


def _file_dtype(table: Table) -> np.dtype[np.void]:
    """The table's dtype with its texts labelled as UTF-8, which other programs need to know. Same bytes as `table.dtype`."""
    return np.dtype([(c.name, _labelled(c)) for c in table.columns])


def _labelled(column: Column) -> np.dtype[np.generic]:
    dtype = np.dtype(column.dtype)
    labelled: np.dtype[np.generic] = h5py.string_dtype("utf-8", dtype.itemsize) if dtype.kind == "S" else dtype
    return labelled


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Header:
    """Attributes of one metrics file. started_s: Unix time; NaN in a file whose writer had not made its tables yet."""

    path: Path
    attempt: int
    started_s: float
    run: str


def read_header(path: Path) -> Header:
    """Raises UsageError: absent, not a metrics file, or written by a newer rose_hpc."""
    if not path.exists():
        raise UsageError("no metrics here", got=f"no file {path}", remedy="give the folder of a run, or one of its metrics*.h5 files")
    if path.stat().st_size == 0:
        return Header(path, attempt_of(path), math.nan, path.parent.resolve().name)
    with _reading(path) as file:
        attributes = dict(file.attrs)
    _check_version(path, attributes.get("schema_version"))
    return Header(path, int(attributes["attempt"]), float(attributes["started_s"]), str(attributes["run"]))


def _check_version(path: Path, version: object) -> None:
    if version is None:
        raise UsageError(f"{path} is an HDF5 file, but not of metrics", got="no attribute schema_version")
    if int(str(version)) > SCHEMA_VERSION:
        raise UsageError(
            f"{path} was written by a newer rose_hpc",
            got=f"schema version {version}",
            expected=f"at most {SCHEMA_VERSION}",
            remedy="upgrade rose_hpc where you read it",
        )


def read_table(path: Path, table: Table) -> NDArray[np.void]:
    """The rows flushed so far: structured array [rows] of the table's dtype. The file may be in the middle of being written.

    A table that an older schema did not have is empty.
    """
    if path.stat().st_size == 0:
        return np.empty(0, table.dtype)
    with _reading(path) as file:
        if table.name not in file:
            return np.empty(0, table.dtype)
        rows: NDArray[np.void] = file[table.name][...].astype(table.dtype, copy=False)
    return rows


@contextmanager
def _reading(path: Path) -> Iterator[h5py.File]:
    try:
        file = h5py.File(path, "r", libver=_FORMAT, swmr=True, locking=False)
    except OSError as error:
        raise UsageError(f"{path} cannot be read as metrics", got=error, expected="an HDF5 file that rose_hpc wrote") from error
    with file:
        yield file
