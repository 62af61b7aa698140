"""Versions in an arena, as files: each bucket's message verbatim, the record of a complete delta, the trainer's shards.

    v7/s0.b3          bucket 3 of stream 0 of version 7          v7/record.json    version 7 is complete here
    v7/shard0.json    trainer side: rank 0 has published its part of version 7

Invariants
- Everything appears by rename: a bucket or a record is whole or absent, whenever the writer is killed.
- A bucket is stored only if its header is what the plan says about its place: version, stream, index, lanes, plan, sizes,
  checksum. Names are made from integers that were compared with the plan before.
- A record exists only when every bucket that it speaks of is stored.
- What a reader has mapped stays readable after `prune`.

It knows nothing of the image and does not decode.
"""

from __future__ import annotations

import json
import os
import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rose_hpc.errors import WeightsError
from rose_hpc.weights import wire
from rose_hpc.weights.arena_files import file_stamp, map_file, read_file, remove_file, remove_folder, write_file
from rose_hpc.weights.bucket_plan import BucketPlan, check_delta, sorted_streams
from rose_hpc.weights.wire import BucketHeader

MAX_RANK = 1 << 20
MAPPED = 1024  # buckets kept mapped: storing, applying and serving one to two peers look at it four times
_VERSION = re.compile(r"v(\d{1,19})")
_BUCKET = re.compile(r"s(\d{1,9})\.b(\d{1,9})")
_SHARD = re.compile(r"shard(\d{1,9})\.json")
RECORD = "record.json"


@dataclass(frozen=True)
class DeltaRecord:
    """A complete delta. digest: of the lanes of `streams` at this version; nbytes: of its buckets' messages."""

    version: int
    base: int
    digest: int
    streams: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class ShardRecord:
    """What one trainer rank has published. base −1: no delta, only the image. digest: of the rank's streams; encoded_bytes: messages."""

    version: int
    rank: int
    digest: int
    base: int
    streams: tuple[int, ...]
    encoded_bytes: int
    changes: int


class DeltaStore:
    """The versions under one arena's folder. It reads the folder each time: other processes write there, too."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._root = folder, os.fspath(folder)
        self._mapped: OrderedDict[str, tuple[tuple[int, int], memoryview]] = OrderedDict()  # path → stamp of the file, its content

    # ── buckets ──

    def has(self, header: BucketHeader) -> bool:
        """Whether the bucket with this header is stored."""
        return os.path.lexists(self._bucket_path(header.version, header.stream_id, header.index))

    def store(self, header: BucketHeader, message: bytes | memoryview) -> None:
        """Store a bucket that was checked against the plan. Raises EnvironmentFault: no room."""
        folder = self._version_folder(header.version)
        is_new = _make(folder)
        try:
            write_file(self._bucket_path(header.version, header.stream_id, header.index), [message])
        except BaseException:
            if is_new:
                _remove_if_empty(folder)
            raise

    def stored(self, version: int, plan: BucketPlan) -> dict[int, set[int]]:
        """Stream → indices of its stored buckets; streams without any are left out."""
        found: dict[int, set[int]] = {}
        for name in self._names(version):
            if (match := _BUCKET.fullmatch(name)) is not None:
                stream, index = int(match[1]), int(match[2])
                if stream < len(plan.counts) and index < plan.counts[stream]:
                    found.setdefault(stream, set()).add(index)
        return found

    def bucket(self, version: int, stream_id: int, index: int) -> memoryview | None:
        """One message, mapped read-only, or None while it is not there."""
        path = self._bucket_path(version, stream_id, index)
        stamp = file_stamp(path)
        found = self._mapped.get(path)
        if stamp is not None and found is not None and found[0] == stamp:
            return found[1]
        self._mapped.pop(path, None)
        mapping = map_file(path)
        if mapping is None or stamp is None:
            return None
        message = memoryview(mapping)
        self._mapped[path] = stamp, message
        if len(self._mapped) > MAPPED:
            self._mapped.popitem(last=False)
        return message

    def drop_bucket(self, version: int, stream_id: int, index: int) -> None:
        """Forget a damaged bucket, and with it that the delta was complete: it can be stored anew."""
        self.withdraw(version)
        remove_file(self._bucket_path(version, stream_id, index))

    # ── records ──

    def commit(self, record: DeltaRecord) -> None:
        """The delta is complete: the caller has seen every bucket."""
        self._write(self._version_folder(record.version), RECORD, record)

    def delta(self, version: int) -> DeltaRecord | None:
        """The record of a complete delta."""
        tree = _read(self._version_folder(version) / RECORD)
        return None if tree is None else DeltaRecord(version, tree["base"], tree["digest"], tuple(tree["streams"]), tree["nbytes"])

    def withdraw(self, version: int) -> None:
        """The delta did not lead where its record says: its record goes, its buckets stay until they are pruned."""
        (self._version_folder(version) / RECORD).unlink(missing_ok=True)

    def record_shard(self, shard: ShardRecord) -> None:
        """Trainer side: one rank's part is published."""
        folder = self._version_folder(shard.version)
        _make(folder)
        self._write(folder, f"shard{shard.rank}.json", shard)

    def shards(self, version: int) -> list[ShardRecord]:
        """The shards of a version, by rank."""
        folder = self._version_folder(version)
        ranks = sorted(int(match[1]) for name in self._names(version) if (match := _SHARD.fullmatch(name)))
        trees = [tree for rank in ranks if (tree := _read(folder / f"shard{rank}.json")) is not None]
        return [ShardRecord(**{**tree, "streams": tuple(tree["streams"])}) for tree in trees]

    # ── retention ──

    def versions(self) -> dict[int, bool]:
        """Version → whether it is complete here (a record, or a shard of a trainer), in increasing order."""
        found = sorted(int(match[1]) for name in os.listdir(self._folder) if (match := _VERSION.fullmatch(name)))
        return {v: any(n == RECORD or _SHARD.fullmatch(n) for n in self._names(v)) for v in found}

    def prune(self, keep: int, spared: Iterable[int] = ()) -> None:
        """Keep the newest `keep` complete versions, what is newer than all of them, and those spared."""
        versions = self.versions()
        complete = [v for v, is_complete in versions.items() if is_complete]
        kept = {*complete[max(len(complete) - keep, 0) :], *spared}
        for version in versions:
            if version not in kept and complete and version <= complete[-1]:
                self.discard(version)

    def discard(self, version: int) -> None:
        """Drop a version, complete or not."""
        for path in [p for p in self._mapped if p.startswith(f"{self._root}/{_folder_name(version)}/")]:
            del self._mapped[path]
        remove_folder(self._version_folder(version))

    def _version_folder(self, version: int) -> Path:
        return self._folder / _folder_name(version)

    def _bucket_path(self, version: int, stream_id: int, index: int) -> str:
        """As text: a relay asks for one several times per bucket, and a Path takes longer to make than a file to open."""
        return f"{self._root}/{_folder_name(version)}/s{int(stream_id)}.b{int(index)}"

    def _names(self, version: int) -> list[str]:
        try:
            return os.listdir(self._version_folder(version))
        except FileNotFoundError:
            return []

    def _write(self, folder: Path, name: str, record: DeltaRecord | ShardRecord) -> None:
        write_file(folder / name, [json.dumps(asdict(record)).encode()])


class DamagedBucket(WeightsError):
    """A bucket of a complete delta is gone or is not what was stored; `place` is (stream, index)."""

    def __init__(self, version: int, place: tuple[int, int], why: object) -> None:
        super().__init__(
            f"bucket {place[1]} of stream {place[0]} of version {version} is damaged", got=why, remedy="fetch it again, or a keyframe"
        )
        self.place = place


def read_bucket(store: DeltaStore, plan: BucketPlan, record: DeltaRecord, stream_id: int, index: int) -> tuple[BucketHeader, memoryview]:
    """A bucket of a complete delta: (header, whole message), checked again. Raises DamagedBucket."""
    place = (stream_id, index)
    try:
        message = store.bucket(record.version, stream_id, index)
        if message is None:
            raise DamagedBucket(record.version, place, "no such file")
        header, _ = wire.unpack(message)
        check_delta(plan, header, record.version, record.base)
    except DamagedBucket:
        raise
    except WeightsError as error:
        raise DamagedBucket(record.version, place, error) from error
    if (header.stream_id, header.index) != place:
        raise DamagedBucket(record.version, place, f"bucket {header.index} of stream {header.stream_id} under its name")
    return header, message


def delta_bytes(store: DeltaStore, plan: BucketPlan, version: int, base: int, streams: Sequence[int]) -> int:
    """Bytes of all messages of these streams. Raises WeightsError where one is gone or starts from another base."""
    total = 0
    for stream_id in streams:
        for index in range(plan.counts[stream_id]):
            message = store.bucket(version, stream_id, index)
            claims = None if message is None else wire.peek(message)
            if message is None or claims != (version, base):
                raise WeightsError(
                    f"bucket {index} of stream {stream_id} of version {version} starts from another version",
                    got=f"(version, base) {claims}",
                    expected=f"base {base}",
                )
            total += len(message)
    return total


def check_shard(plan: BucketPlan, shard: ShardRecord) -> None:
    """Raises WeightsError for a rank, a base or streams that cannot be."""
    sorted_streams(plan, shard.streams)
    if not 0 <= shard.rank < MAX_RANK or not wire.NO_BASE <= shard.base < shard.version:
        raise WeightsError("not a shard of a version", got=shard, expected=f"a rank from 0 to {MAX_RANK - 1}, a base before the version")


def _folder_name(version: int) -> str:
    if not isinstance(version, int) or not 0 <= version <= wire.MAX_VERSION:
        raise WeightsError("not a policy version", got=version, expected=f"0 to {wire.MAX_VERSION}")
    return f"v{version}"


def _make(folder: Path) -> bool:
    """Whether it was not there before."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        return False
    return True


def _read(path: Path) -> dict[str, Any] | None:
    content = read_file(path)
    if content is None:
        return None
    tree: dict[str, Any] = json.loads(content)
    return tree


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return
