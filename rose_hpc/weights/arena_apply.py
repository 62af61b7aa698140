"""One delta into the image, in place, bucket by bucket behind the journal; and the same from where a killed apply stopped.

    for every stream, bucket:     begin (the journal's mark) ─▶ add the differences, or copy the bits of a dense one

Invariants
- Every message of the delta is checked in full before the first change is added.
- Changes are added in the order of their lanes, by one thread: a killed apply leaves a prefix of them.
- An interrupted apply goes on at the journal's mark in force and the image's digest: nothing else decides where.
- Bits outside the delta's lanes are never written.

It holds no lock and writes no state: arena.py does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rose_hpc.errors import WeightsError
from rose_hpc.weights import kernels
from rose_hpc.weights.arena_journal import JournalWriter, Mark
from rose_hpc.weights.bucket_plan import BucketPlan
from rose_hpc.weights.codec import StreamDecoder
from rose_hpc.weights.codec_parts import Lanes
from rose_hpc.weights.delta_store import DamagedBucket, DeltaRecord, DeltaStore, read_bucket
from rose_hpc.weights.digest import MODULUS, digest_runs
from rose_hpc.weights.layout import Runs
from rose_hpc.weights.wire import LANE_BYTES, BucketHeader, Kind

Undo = tuple[NDArray[np.int64], NDArray[np.uint16]]


@dataclass(frozen=True)
class Applied:
    """What an apply did. digest: of the image now, as the changes add up; changes: lanes written; 0 where it was applied already.

    undo: one entry per stream, if asked for: image lanes (int64, increasing) and the bits that were there (uint16).
    """

    digest: int
    changes: int
    undo: list[Undo] = field(default_factory=list)


@dataclass(frozen=True)
class _Bucket:
    """at: (place of its stream in the record, index)."""

    at: tuple[int, int]
    header: BucketHeader
    message: memoryview

    @property
    def is_dense(self) -> bool:
        return self.header.kind == Kind.DENSE


class Decoders:
    """Stream decoders of one plan, made when they are first needed. threads: for whole buckets of a keyframe, and for digests."""

    def __init__(self, plan: BucketPlan, threads: int) -> None:
        self.plan, self.threads = plan, threads
        self._made: dict[int, StreamDecoder] = {}

    def __getitem__(self, stream_id: int) -> StreamDecoder:
        if stream_id not in self._made:
            self._made[stream_id] = StreamDecoder(self.plan.stream(stream_id), self.plan.bucket_bytes, self.threads)
        return self._made[stream_id]


class DeltaApply:
    """One delta, read and checked in full. Raises DamagedBucket where a bucket is gone or is not what was stored."""

    def __init__(self, store: DeltaStore, decoders: Decoders, record: DeltaRecord) -> None:
        self._record, self._decoders = record, decoders
        self._buckets = [
            _Bucket((place, index), *read_bucket(store, decoders.plan, record, stream_id, index))
            for place, stream_id in enumerate(record.streams)
            for index in range(decoders.plan.counts[stream_id])
        ]

    def run(self, image: Lanes, writer: JournalWriter, digest: int, collect: bool = False) -> Applied:
        """From the beginning. digest: of the image before.

        Raises WeightsError on a payload that cannot be decoded: then the image is neither version.
        """
        return self._run(image, writer, Mark(self._record.version, self._record.base, digest=digest), collect)

    def go_on(self, image: Lanes, writer: JournalWriter) -> Applied:
        """From the journal's mark in force. Raises WeightsError as `run` does, and when the image is no state of this apply."""
        mark = writer.mark
        bucket = next(b for b in self._buckets if b.at == (mark.stream, mark.bucket))
        digest = self._copy(image, mark.digest, bucket) if mark.dense else self._add_rest(image, mark.digest, bucket)
        behind = mark._replace(changes=mark.changes + bucket.header.changes, digest=digest, dense=False)
        return self._run(image, writer, behind, collect=False, after=bucket.at)

    def _run(self, image: Lanes, writer: JournalWriter, mark: Mark, collect: bool, after: tuple[int, int] = (-1, -1)) -> Applied:
        """The buckets behind `after`. mark: what the image is before them."""
        kept: list[list[Undo]] = [[] for _ in self._record.streams] if collect else []
        for bucket in self._buckets:
            if bucket.at <= after:
                continue
            if collect:
                lanes = self._decoders[bucket.header.stream_id].lanes(bucket.message, bucket.header)
                kept[bucket.at[0]].append((lanes, image[lanes]))
            digest = mark.digest
            if bucket.is_dense:
                digest = (digest - digest_runs(image, self._runs(bucket), self._decoders.threads)) % MODULUS
            mark = mark._replace(stream=bucket.at[0], bucket=bucket.at[1], digest=digest, dense=bucket.is_dense)
            writer.begin(mark)
            digest = self._copy(image, digest, bucket) if bucket.is_dense else self._add(image, digest, bucket)
            mark = mark._replace(changes=mark.changes + bucket.header.changes, digest=digest)
        return Applied(mark.digest, mark.changes, [_joined(parts) for parts in kept])

    def _add(self, image: Lanes, digest: int, bucket: _Bucket) -> int:
        """Add a bucket's differences. Returns the digest after."""
        decoder = self._decoders[bucket.header.stream_id]
        return (digest + decoder.apply(bucket.message, image, header=bucket.header, in_order=True)) % MODULUS

    def _add_rest(self, image: Lanes, digest: int, bucket: _Bucket) -> int:
        """The same where a prefix of them may be in the image already, which its digest tells."""
        lanes, differences = self._decoders[bucket.header.stream_id].changes(bucket.message)
        found = digest_runs(image, self._decoders.plan.runs(self._record.streams), self._decoders.threads)
        applied = kernels.count_applied(kernels.read_only(image), lanes, differences, np.uint64((found - digest) % MODULUS))
        if applied < 0:
            raise WeightsError("the image of an interrupted apply was changed by somebody else", got=f"digest {found:016x}")
        change = kernels.add_changes(image, lanes[applied:], differences[applied:])
        return (found + int(change)) % MODULUS

    def _copy(self, image: Lanes, digest: int, bucket: _Bucket) -> int:
        """Write a dense bucket's bits, once or again. digest: without them; returns it with them."""
        self._decoders[bucket.header.stream_id].apply(bucket.message, image, digest=False, header=bucket.header)
        return (digest + digest_runs(image, self._runs(bucket), self._decoders.threads)) % MODULUS

    def _runs(self, bucket: _Bucket) -> Runs:
        """What a bucket covers of the image."""
        first = bucket.header.first_lane * LANE_BYTES
        return self._decoders.plan.stream(bucket.header.stream_id).runs.span(first, first + bucket.header.lanes * LANE_BYTES)


def changed_lanes(store: DeltaStore, decoders: Decoders, from_version: int, to_version: int) -> NDArray[np.int64] | None:
    """Image lanes that the deltas from one version to another write, int64, increasing; None where the chain is not all there."""
    parts: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    version = to_version
    while version != from_version:
        record = store.delta(version) if version > from_version else None
        if record is None:
            return None
        try:
            parts.extend(_written(store, decoders, record))
        except DamagedBucket:
            return None
        version = record.base
    lanes = np.sort(np.concatenate(parts), kind="stable")  # timsort: the parts are sorted runs
    unique: NDArray[np.int64] = lanes[np.concatenate(([True], lanes[1:] != lanes[:-1]))[: len(lanes)]]
    return unique


def _written(store: DeltaStore, decoders: Decoders, record: DeltaRecord) -> Iterator[NDArray[np.int64]]:
    """The lanes that each bucket writes."""
    for stream_id in record.streams:
        for index in range(decoders.plan.counts[stream_id]):
            header, message = read_bucket(store, decoders.plan, record, stream_id, index)
            yield decoders[stream_id].lanes(message, header)


def _joined(parts: list[Undo]) -> Undo:
    if not parts:
        return np.empty(0, np.int64), np.empty(0, np.uint16)
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
