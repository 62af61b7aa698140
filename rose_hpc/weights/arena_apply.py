"""One delta into the image, in place, block by block behind the journal; and the same from where a killed apply stopped.

    for every stream, bucket, block:     stage ─▶ complete ─▶ scatter
    for every dense bucket:              complete ─▶ copy                  the stored message holds its absolute bits already

Invariants
- Every message of the delta is checked in full before the first block is scattered.
- An interrupted apply goes on behind the journal's mark in force: nothing else decides where.
- Bits outside the delta's lanes are never written.

It holds no lock and writes no state: arena.py does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rose_hpc.errors import WeightsError
from rose_hpc.weights.arena_journal import BLOCK_LANES, JournalWriter, Lanes, Mark
from rose_hpc.weights.bucket_plan import BucketPlan
from rose_hpc.weights.codec import Block, StreamDecoder
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


class Decoders:
    """Stream decoders of one plan, made when they are first needed."""

    def __init__(self, plan: BucketPlan, threads: int) -> None:
        self.plan, self._threads = plan, threads
        self._made: dict[int, StreamDecoder] = {}

    def __getitem__(self, stream_id: int) -> StreamDecoder:
        if stream_id not in self._made:
            self._made[stream_id] = StreamDecoder(self.plan.stream(stream_id), self.plan.bucket_bytes, self._threads)
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
        """From the journal's mark in force. Raises WeightsError as `run` does, and when the journal's block was damaged."""
        mark = writer.mark
        if not writer.is_whole():
            raise WeightsError("the journal of an interrupted apply is damaged", got=mark)
        if mark.dense:
            mark = self._copy(image, mark, next(b for b in self._buckets if b.at == (mark.stream, mark.bucket)))
        else:
            writer.scatter(image)
        return self._run(image, writer, mark, collect=False)

    def _run(self, image: Lanes, writer: JournalWriter, mark: Mark, collect: bool) -> Applied:
        """The buckets, and of the first one the lanes, that are behind the mark."""
        kept: list[list[Undo]] = [[] for _ in self._record.streams] if collect else []
        for bucket in self._buckets:
            reached = (mark.stream, mark.bucket)
            if bucket.at < reached or (bucket.at == reached and mark.dense):
                continue
            undo = kept[bucket.at[0]] if collect else None
            if bucket.header.kind == Kind.DENSE:
                mark = self._write_dense(image, writer, mark, bucket, undo)
            else:
                mark = self._write_delta(image, writer, mark, bucket, undo)
        return Applied(mark.digest, mark.changes, [_joined(parts) for parts in kept])

    def _write_delta(self, image: Lanes, writer: JournalWriter, mark: Mark, bucket: _Bucket, undo: list[Undo] | None) -> Mark:
        behind = mark.done if bucket.at == (mark.stream, mark.bucket) else 0
        for done, block in self._blocks(bucket, behind):
            if undo is not None:
                undo.append((block.lanes.copy(), image[block.lanes]))
            before, after = writer.stage(image, block.lanes, block.values, block.absolute)
            lanes = len(block.lanes)
            digest = (mark.digest + after - before) % MODULUS
            mark = Mark(mark.version, mark.base, *bucket.at, done, mark.changes + lanes, digest, lanes, after)
            writer.complete(mark)
            writer.scatter(image)
        return mark

    def _write_dense(self, image: Lanes, writer: JournalWriter, mark: Mark, bucket: _Bucket, undo: list[Undo] | None) -> Mark:
        """The stored message is the journal's block: it has absolute bits already. Its old bits leave the digest before they go."""
        if undo is not None:
            undo.extend((block.lanes.copy(), image[block.lanes]) for _, block in self._blocks(bucket, 0))
        lanes = bucket.header.lanes
        digest = (mark.digest - digest_runs(image, self._runs(bucket))) % MODULUS
        mark = Mark(mark.version, mark.base, *bucket.at, lanes, mark.changes + lanes, digest, dense=True)
        writer.complete(mark)
        return self._copy(image, mark, bucket)

    def _copy(self, image: Lanes, mark: Mark, bucket: _Bucket) -> Mark:
        """Its new bits enter the digest when they are there: the next mark has them."""
        self._decoders[bucket.header.stream_id].apply(bucket.message, image, digest=False)
        return mark._replace(digest=(mark.digest + digest_runs(image, self._runs(bucket))) % MODULUS)

    def _runs(self, bucket: _Bucket) -> Runs:
        """What a bucket covers of the image."""
        first = bucket.header.first_lane * LANE_BYTES
        return self._decoders.plan.stream(bucket.header.stream_id).runs.span(first, first + bucket.header.lanes * LANE_BYTES)

    def _blocks(self, bucket: _Bucket, behind: int) -> Iterator[tuple[int, Block]]:
        """(lanes of the bucket that are done with this block, block) without the first `behind` lanes; each fits a journal's slot."""
        start = 0
        for block in self._decoders[bucket.header.stream_id].blocks(bucket.message):
            for stop, part in _parts(block, max(behind - start, 0)):
                yield start + stop, part
            start += len(block.lanes)


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
            if header.kind == Kind.DELTA:
                yield decoders[stream_id].changes(message)[0]
            else:
                yield from (block.lanes.copy() for block in decoders[stream_id].blocks(message))


def _parts(block: Block, skipped: int) -> Iterator[tuple[int, Block]]:
    """The block without its first lanes, in pieces of at most BLOCK_LANES: (lanes of the block up to the piece's end, piece)."""
    for start in range(skipped, len(block.lanes), BLOCK_LANES):
        stop = min(start + BLOCK_LANES, len(block.lanes))
        yield stop, Block(block.lanes[start:stop], block.values[start:stop], block.absolute)


def _joined(parts: list[Undo]) -> Undo:
    if not parts:
        return np.empty(0, np.int64), np.empty(0, np.uint16)
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
