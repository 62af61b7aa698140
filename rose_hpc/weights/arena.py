"""Node-local home of policy versions, outside every process: files in shared memory that outlive who wrote them.

    ARENA/ (mode 0700)
      layout.json            the image layout, written once
      v7.img                 the image of version 7; sparse where this node holds only some slices
      v7.shard0.json         trainer side: rank 0's slices of version 7 are complete (runs, digest)
      v7.json                commit record: the image is complete and verified; appears by rename, last of all

Invariants
- A version is visible (`record`, `map_version`) only when its commit record exists: SIGKILL at any instant leaves a version
  either committed and whole, or absent.
- A committed image is never written again; `prune` unlinks it, and a reader that has it mapped keeps what it maps.
- Writes go through pwrite, never through a mapping: on a full file system pwrite raises an error, a store to a mapped page
  ends the process with SIGBUS.

It does not move bytes between nodes (relay.py) and does not know tensors (publisher.py, vllm_backend.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rose_hpc.errors import EnvironmentFault, LayoutError, WeightsError
from rose_hpc.weights.layout import ImageLayout, Run, from_json, to_json

_COMMIT = re.compile(r"v(\d+)\.json")


@dataclass(frozen=True)
class VersionRecord:
    """A committed version and the digest of its whole image."""

    version: int
    digest: int


@dataclass(frozen=True)
class ShardRecord:
    """What one trainer rank wrote of a version: its runs of the image and their digest."""

    version: int
    rank: int
    digest: int
    runs: tuple[Run, ...]


class Arena:
    """One arena folder. Use `create` on the writing side and `open` on the reading side."""

    def __init__(self, path: Path, layout: ImageLayout) -> None:
        self.path, self.layout = path, layout

    @classmethod
    def create(cls, path: Path, layout: ImageLayout) -> Arena:
        """Make the folder, or join one that holds the same layout. Raises LayoutError when it holds another."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (path / "layout.json").exists():
            _write(path / "layout.json", to_json(layout))
        found = from_json((path / "layout.json").read_text())
        if found.fingerprint != layout.fingerprint:
            raise LayoutError(f"{path} holds another layout", got=found.fingerprint[:12], expected=layout.fingerprint[:12])
        return cls(path, found)

    @classmethod
    def open(cls, path: Path, deadline_s: float = 0.0) -> Arena:
        """Open an existing arena, waiting up to deadline_s for its layout. Raises WeightsError when there is none."""
        end = time.monotonic() + deadline_s
        while not (path / "layout.json").exists():
            if time.monotonic() >= end:
                raise WeightsError("no arena here", got=f"{path} without layout.json after {deadline_s:g} s")
            time.sleep(0.02)
        return cls(path, from_json((path / "layout.json").read_text()))

    # ── writing ──

    def reserve(self, version: int, nbytes: int | None = None) -> None:
        """Make room for a version's image (all of it, or nbytes of a sparse one). Raises EnvironmentFault when there is none."""
        wanted = self.layout.image_bytes if nbytes is None else nbytes
        room = os.statvfs(self.path)
        if room.f_bavail * room.f_frsize < wanted:
            raise EnvironmentFault(
                f"the file system of {self.path} is too small for a policy version",
                got=f"{room.f_bavail * room.f_frsize} bytes free",
                expected=f"{wanted} bytes",
                remedy="enlarge it, point weights.arena_root elsewhere, or lower weights.retained_versions",
            )
        with self._image_file(version) as fd:
            os.ftruncate(fd, self.layout.image_bytes)

    def write(self, version: int, run: Run, content: memoryview | bytes | NDArray[np.uint8]) -> None:
        """Store one run of an uncommitted version. Raises WeightsError: outside the image, wrong size, or already committed."""
        view = memoryview(content).cast("B")
        if run.offset_bytes < 0 or run.end_bytes > self.layout.image_bytes or view.nbytes != run.nbytes:
            raise WeightsError(
                "write outside the image", got=f"{run}, {view.nbytes} bytes", expected=f"inside {self.layout.image_bytes} bytes"
            )
        if self.record(version) is not None:
            raise WeightsError(f"version {version} is committed and cannot be written again")
        with self._image_file(version) as fd:
            done = 0
            while done < run.nbytes:
                done += os.pwrite(fd, view[done:], run.offset_bytes + done)

    def complete_shard(self, shard: ShardRecord) -> None:
        """Trainer side: this rank's slices of the version are all written."""
        runs = [[r.offset_bytes, r.nbytes] for r in shard.runs]
        _write(self.path / f"v{shard.version}.shard{shard.rank}.json", json.dumps({"digest": shard.digest, "runs": runs}))

    def commit(self, version: int, digest: int) -> None:
        """The image is whole and verified: make it visible."""
        _write(self.path / f"v{version}.json", json.dumps({"version": version, "digest": digest}))

    def discard(self, version: int) -> None:
        """Drop a version, committed or not; the commit record goes first."""
        for path in (self.path / f"v{version}.json", *sorted(self.path.glob(f"v{version}.*"))):
            path.unlink(missing_ok=True)

    def prune(self, keep: int) -> None:
        """Keep the newest `keep` versions of those present."""
        present = {int(m[1]) for p in self.path.iterdir() if (m := re.match(r"v(\d+)\.", p.name))}
        for version in sorted(present)[:-keep]:
            self.discard(version)

    # ── reading ──

    def record(self, version: int) -> VersionRecord | None:
        """The commit record, or None while the version is not complete here."""
        try:
            tree = json.loads((self.path / f"v{version}.json").read_text())
        except FileNotFoundError:
            return None
        return VersionRecord(int(tree["version"]), int(tree["digest"]))

    def versions(self) -> list[int]:
        """Committed versions, oldest first."""
        return sorted(int(m[1]) for p in self.path.iterdir() if (m := _COMMIT.fullmatch(p.name)))

    def shards(self, version: int) -> list[ShardRecord]:
        """Trainer side: the complete shards of a version on this node, by rank."""
        return sorted((_read_shard(p, version) for p in self.path.glob(f"v{version}.shard*.json")), key=lambda s: s.rank)

    def map_version(self, version: int, committed: bool = True) -> NDArray[np.uint8]:
        """The image, read-only, uint8 [image_bytes]; it stays valid after `prune`. Raises WeightsError when it is not there."""
        if committed and self.record(version) is None:
            raise WeightsError(f"version {version} is not committed in {self.path}", got=f"versions {self.versions()}")
        return np.memmap(self.path / f"v{version}.img", np.uint8, "r", shape=(self.layout.image_bytes,))

    @contextlib.contextmanager
    def _image_file(self, version: int) -> Iterator[int]:
        fd = os.open(self.path / f"v{version}.img", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            yield fd
        finally:
            os.close(fd)


def _read_shard(path: Path, version: int) -> ShardRecord:
    tree = json.loads(path.read_text())
    rank = int(path.name.split(".shard")[1].removesuffix(".json"))
    return ShardRecord(version, rank, int(tree["digest"]), tuple(Run(int(o), int(n)) for o, n in tree["runs"]))


def _write(path: Path, text: str) -> None:
    """Appear by rename; several writers of the same content may race."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.chmod(0o600)
    temporary.replace(path)
