"""Lossless coding of one stream's changes, bucket by bucket. The payload is documented byte by byte in docs/wire_format.md.

    encode   pieces ─▶ scan (image updated in place) ─▶ positions, differences ─▶ codebook ─▶ blocks ─▶ message
    apply    message ─▶ codebook, block index ─▶ per block: decode, add to the image

A difference is new − old of the bit patterns mod 2^16, never of floats: −0.0 and NaN payloads survive.

Invariants (asserted by the tests)
- decode(encode(old, new)) applied to old is new, for any bits, runs, chopping of the pieces, bucket size and number of threads.
- Σ digest_change of all buckets = digest(new) − digest(old); `apply` returns the same numbers.
- A bucket is never larger than dense, but for the header.
- Whatever a payload holds: WeightsError or a decoding; nothing outside of the bucket's lanes is written.

Threads share the scan of a piece and code finished buckets while the scan goes on; they share the blocks of a bucket in `apply`.
With threads=1 there is no pool. What it does not do: compare plan,
version and base with what the receiver wants, or survive being killed in the middle (arena.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose_hpc.errors import WeightsError
from rose_hpc.weights import kernels, wire
from rose_hpc.weights.codec_parts import Changes, Lanes, Scratch, StreamMap, Workers
from rose_hpc.weights.digest import MODULUS
from rose_hpc.weights.routing import Stream
from rose_hpc.weights.wire import LANE_BYTES, BucketHeader, Kind

_KEPT_ROOM = 1 << 22  # what a version with very many changes took is given back
_DENSE_BELOW = 2  # with more than every other lane changed, a bucket goes dense without an attempt at coding it
_PART_LANES = 1 << 18  # less is not worth a thread
_PART_BLOCKS = 8
_PROLOGUE_BYTES = 4  # bytes of the codebook u16, reserved u16


@dataclass(frozen=True)
class Encoded:
    """One bucket's message. digest_change: what it adds to the image's digest, mod 2^64; changes: lanes that differ."""

    message: bytes
    digest_change: int
    changes: int
    index: int


class StreamEncoder:
    """Turns the new values of one stream into bucket messages. Keeps its scratch memory; one version at a time.

    plan_id: `wire.plan_id` of the routing plan. Raises LayoutError when runs or bucket_bytes cut a lane.
    codec_torch.py overrides the methods under "where the lanes are", and nothing else.
    """

    def __init__(self, stream: Stream, plan_id: int, bucket_bytes: int, threads: int = 1) -> None:
        self._map = StreamMap(stream, bucket_bytes)
        self._plan_id = plan_id
        self._workers = Workers(threads)
        self._spare: list[Changes] = []

    def encode_delta(self, image: Any, pieces: Iterable[Any], version: int, base: int) -> Iterator[Encoded]:
        """Messages of every bucket, in order; `image` (uint16, image coordinates) is brought to the new values in place.

        pieces: the new values (uint16) in stream space, in order, chopped anyhow; a piece may be reused once the next is asked for.
        Raises WeightsError when the pieces are not exactly the stream, LayoutError when the image cannot hold it.
        """
        self._check_image(image, writable=True)
        coding: deque[Future[Encoded]] = deque()
        changes, at = self._take(0), 0
        for piece in pieces:
            rest = self._as_lanes(piece)
            if at + len(rest) > self._map.lanes:
                raise WeightsError("the pieces go on behind the stream", got=f"{at + len(rest)} lanes", expected=f"{self._map.lanes} lanes")
            while len(rest):
                index = at // self._map.bucket_lanes
                first, lanes = self._map.bucket(index)
                part, rest = rest[: first + lanes - at], rest[first + lanes - at :]
                self._scan(image, part, at, index, changes)
                at += len(part)
                if at == first + lanes:
                    coding.append(self._workers.submit(partial(self._finish, image, changes, version, base, index)))
                    while len(coding) >= self._workers.threads:
                        yield coding.popleft().result()
                    changes = self._take(index + 1)
        while coding:
            yield coding.popleft().result()
        self._keep(changes)
        if at != self._map.lanes:
            raise WeightsError("the pieces end before the stream", got=f"{at} lanes", expected=f"{self._map.lanes} lanes")

    def encode_dense(self, image: Any, version: int) -> Iterator[Encoded]:
        """Keyframe: every bucket dense, of what the image holds; digest_change is the digest of the bucket's lanes."""
        self._check_image(image, writable=False)
        coding: deque[Future[Encoded]] = deque()
        for index in range(self._map.buckets):
            coding.append(self._workers.submit(partial(self._dense, image, version, wire.NO_BASE, index)))
            while len(coding) >= self._workers.threads:
                yield coding.popleft().result()
        while coding:
            yield coding.popleft().result()

    def dense_bucket(self, image: Any, version: int, index: int) -> Encoded:
        """One keyframe bucket. Raises WeightsError when the stream has no such bucket."""
        self._check_image(image, writable=False)
        return self._dense(image, version, wire.NO_BASE, index)

    # --- where the lanes are: numpy arrays here ---

    def _check_image(self, image: Any, writable: bool) -> None:
        self._map.check_image(image, writable)

    def _as_lanes(self, piece: Any) -> Any:
        """A piece as the scan takes it. Raises WeightsError when it does not hold lanes."""
        if piece.dtype != np.uint16 or piece.ndim != 1:
            raise WeightsError("a piece of a stream is no array of lanes", got=f"{piece.dtype}, shape {piece.shape}", expected="uint16 [n]")
        return kernels.read_only(piece)

    def _scan(self, image: Any, part: Any, at: int, index: int, changes: Changes) -> None:
        """Note in `changes` where stream lanes at .. at + len(part) of a bucket differ, and update the image."""
        first = index * self._map.bucket_lanes
        if self._workers.threads == 1 or part.size < 2 * _PART_LANES:
            self._scan_part(image, part, at, first, changes)
            return

        def scan(low: int, high: int) -> Changes:
            found = self._take(index)
            self._scan_part(image, part[low:high], at + low, first, found)
            return found

        for found in self._workers.spread(scan, part.size, _PART_LANES):
            changes.extend(found)
            self._keep(found)

    def _gather(self, image: Any, index: int) -> tuple[Lanes, int]:
        """(every lane of a bucket, their digest)."""
        first, lanes = self._map.bucket(index)
        out = np.empty(lanes, np.uint16)
        return out, int(kernels.gather_dense(kernels.read_only(image), self._map.stream_start, self._map.image_start, first, out))

    # --- the rest ---

    def _scan_part(self, image: Lanes, part: Lanes, at: int, first: int, changes: Changes) -> None:
        runs = (self._map.stream_start, self._map.image_start)
        while part.size and not changes.dense:
            changes.reserve(kernels.SCAN_ROOM)
            done, changes.count, digest = kernels.scan_changes(
                image, part, *runs, at, first, changes.positions, changes.differences, changes.histogram, changes.count
            )
            changes.digest = (changes.digest + int(digest)) % MODULUS
            part, at = part[done:], at + done
        if part.size:
            digest, changed = kernels.scatter_dense(part, image, *runs, at, True)
            changes.digest, changes.count = (changes.digest + int(digest)) % MODULUS, changes.count + int(changed)

    def _take(self, index: int) -> Changes:
        """Empty scratch memory for a bucket, or for a part of one."""
        try:
            changes = self._spare.pop()  # threads take, too: asking first would not be safe
        except IndexError:
            changes = Changes(0)
        changes.reset(self._map.lanes_of(index) // _DENSE_BELOW)
        return changes

    def _keep(self, changes: Changes) -> None:
        if changes.positions.size <= _KEPT_ROOM:
            self._spare.append(changes)

    def _finish(self, image: Any, changes: Changes, version: int, base: int, index: int) -> Encoded:
        parts = None if changes.dense else _code(changes, self._map.bucket(index)[1] * LANE_BYTES)
        if parts is None:
            message = self._dense(image, version, base, index).message
        else:
            message = self._pack(Kind.DELTA, version, base, index, changes.count, parts)
        self._keep(changes)
        return Encoded(message, changes.digest, changes.count, index)

    def _dense(self, image: Any, version: int, base: int, index: int) -> Encoded:
        lanes, digest = self._gather(image, index)
        message = self._pack(Kind.DENSE, version, base, index, lanes.size, [lanes.view(np.uint8).data])
        return Encoded(message, digest, lanes.size, index)

    def _pack(self, kind: Kind, version: int, base: int, index: int, changes: int, payload: Sequence[bytes | memoryview]) -> bytes:
        first, lanes = self._map.bucket(index)
        header = BucketHeader(kind, version, base, self._map.stream_id, index, first, lanes, changes, 0, self._plan_id)
        return wire.pack(header, *payload)


def _code(changes: Changes, dense_bytes: int) -> list[bytes | memoryview] | None:
    """Payload of a DELTA bucket, in parts; None when it would not be smaller than dense."""
    if changes.count == 0:
        return []
    positions, differences = changes.filled
    scratch = changes.scratch = Scratch() if changes.scratch is None else changes.scratch
    tree, value_bits = _codebook(changes.histogram, scratch)
    changes.coded = True
    if (value_bits + changes.count) // 8 + len(tree) >= dense_bytes:  # a position takes a bit at least
        return None
    blocks = -(-changes.count // kernels.BLOCK_CHANGES)
    table, gaps, values = scratch.streams(blocks)
    gap_bytes, value_bytes = kernels.encode_blocks(positions, differences, scratch.codes, table, gaps, values)
    prologue = len(tree).to_bytes(2, "little") + bytes(2)
    parts: list[bytes | memoryview] = [
        prologue,
        tree.data,
        table.data,
        gaps[:gap_bytes].data,
        values[:value_bytes].data,
        bytes(kernels.PAYLOAD_PADDING),
    ]
    return parts if sum(map(len, parts)) < dense_bytes else None


def _codebook(histogram: NDArray[np.int32], scratch: Scratch) -> tuple[NDArray[np.uint8], int]:
    """(the codebook, bits of all differences coded); their codes are in scratch.codes. The histogram is zero after."""
    distinct = kernels.take_counts(histogram, scratch.symbols, scratch.counts)
    symbols, counts = scratch.symbols[:distinct], scratch.counts[:distinct]
    leaves = np.ascontiguousarray(scratch.leaves[:, : kernels.choose_leaves(symbols, counts, scratch.split, scratch.leaves)])
    order = np.argsort(leaves[2], kind="stable")
    tree_bytes, bits = kernels.assign_codes(symbols, counts, scratch.split, leaves, order, scratch.codes, scratch.tree)
    return scratch.tree[:tree_bytes], int(bits)


@dataclass(frozen=True)
class _Coded:
    """A DELTA payload taken apart, but not yet decoded."""

    payload: NDArray[np.uint8]
    changes: int
    first_lane: int
    table: NDArray[np.uint32]
    index_bits: int
    index: tuple[NDArray[np.int64], ...]

    @property
    def blocks(self) -> int:
        return len(self.index[3])


class StreamDecoder:
    """Applies one stream's bucket messages to an image. Raises LayoutError when runs or bucket_bytes cut a lane."""

    def __init__(self, stream: Stream, bucket_bytes: int, threads: int = 1) -> None:
        self._map = StreamMap(stream, bucket_bytes)
        self._workers = Workers(threads)

    def apply(
        self, message: bytes | memoryview, image: Any, digest: bool = True, header: BucketHeader | None = None, in_order: bool = False
    ) -> int:
        """Decode and scatter in place; returns the change of the image's digest mod 2^64 (0 when digest is False).

        header: of a message that was checked already; it is not checked twice. in_order: by one thread, lane after lane.
        Not atomic: an error found in a late block leaves earlier blocks applied. Raises WeightsError (the message),
        LayoutError (the image).
        """
        self._map.check_image(image, writable=True)
        header, payload = self._open(message, header)
        if header.kind == Kind.DENSE:
            return self._apply_dense(header, _as_lanes(payload), image, digest)
        if header.changes == 0:
            return 0
        coded = _take_apart(header, payload)

        def part(begin: int, end: int) -> int:
            status, change = kernels.apply_blocks(*self._arguments(coded, begin, end), image, digest)
            _check(status)
            return int(change)

        if in_order:
            return part(0, coded.blocks)
        return sum(self._workers.spread(part, coded.blocks, _PART_BLOCKS)) % MODULUS

    def lanes(self, message: bytes | memoryview, header: BucketHeader | None = None) -> NDArray[np.int64]:
        """The image lanes that a bucket writes, int64, in the order of the stream: all of a DENSE one. header: as for `apply`."""
        header, payload = self._open(message, header)
        if header.kind == Kind.DENSE:
            return self._image_lanes(header.first_lane, header.lanes)
        return self._changes(header, payload)[0]

    def changes(self, message: bytes | memoryview) -> tuple[NDArray[np.int64], Lanes]:
        """All changed image lanes (int64, as the stream orders them) and differences of a DELTA bucket. WeightsError for a DENSE one."""
        header, payload = self._open(message)
        if header.kind == Kind.DENSE:
            raise WeightsError("a dense bucket has no differences", remedy="use lanes()")
        return self._changes(header, payload)

    def _changes(self, header: BucketHeader, payload: memoryview) -> tuple[NDArray[np.int64], Lanes]:
        if header.changes == 0:
            return np.empty(0, np.int64), np.empty(0, np.uint16)
        coded = _take_apart(header, payload)
        parts = self._workers.spread(lambda begin, end: self._decode(coded, begin, end), coded.blocks, _PART_BLOCKS)
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])

    def _open(self, message: bytes | memoryview, checked: BucketHeader | None = None) -> tuple[BucketHeader, memoryview]:
        if checked is None:
            header, payload = wire.unpack(message)
        else:
            header, payload = checked, memoryview(message)[wire.HEADER_BYTES :]
        self._map.check_header(header)
        return header, payload

    def _arguments(self, coded: _Coded, begin: int, end: int) -> tuple[Any, ...]:
        where = (self._map.stream_start, self._map.image_start)
        return coded.payload, coded.changes, coded.index, begin, end, coded.table, coded.index_bits, coded.first_lane, *where

    def _decode(self, coded: _Coded, begin: int, end: int) -> tuple[NDArray[np.int64], Lanes]:
        size = min(end * kernels.BLOCK_CHANGES, coded.changes) - begin * kernels.BLOCK_CHANGES
        lanes, values = np.empty(size, np.int64), np.empty(size, np.uint16)
        _check(kernels.decode_blocks(*self._arguments(coded, begin, end), lanes, values))
        return lanes, values

    def _apply_dense(self, header: BucketHeader, lanes: Lanes, image: Lanes, digest: bool) -> int:
        def part(low: int, high: int) -> int:
            first = header.first_lane + low
            change, _ = kernels.scatter_dense(lanes[low:high], image, self._map.stream_start, self._map.image_start, first, digest)
            return int(change)

        return sum(self._workers.spread(part, header.lanes, _PART_LANES)) % MODULUS

    def _image_lanes(self, first: int, size: int) -> NDArray[np.int64]:
        """Image lanes of consecutive stream lanes."""
        lanes = np.arange(first, first + size, dtype=np.int64)
        run = np.searchsorted(self._map.stream_start, lanes, "right") - 1
        return lanes + (self._map.image_start[run] - self._map.stream_start[run])


def _as_lanes(payload: memoryview) -> Lanes:
    lanes: Lanes = kernels.read_only(np.frombuffer(payload, np.uint16))
    return lanes


def _take_apart(header: BucketHeader, payload: memoryview) -> _Coded:
    """Codebook and block index. Raises WeightsError when they do not fit the payload."""
    content = kernels.read_only(np.frombuffer(payload, np.uint8))
    tree_end = _PROLOGUE_BYTES + int.from_bytes(payload[:2], "little")
    if content.size < tree_end or any(payload[2:_PROLOGUE_BYTES]):
        _check(kernels.BAD_CODEBOOK)
    table = np.empty(1 << kernels.MAX_CODE_BITS, np.uint32)
    index_bits = kernels.read_codebook(content[_PROLOGUE_BYTES:tree_end], table)
    _check(index_bits)
    blocks = -(-header.changes // kernels.BLOCK_CHANGES)
    if tree_end + blocks * kernels.BLOCK_RECORD_BYTES > content.size:  # before memory is taken for them
        _check(kernels.BAD_TABLE)
    index = tuple(np.empty(blocks + extra, np.int64) for extra in (1, 1, 1, 0))
    _check(kernels.index_blocks(content, tree_end, header.lanes, *index))
    return _Coded(content, header.changes, header.first_lane, table, int(index_bits), index)


def _check(status: int) -> None:
    if status < 0:
        raise WeightsError("a bucket's payload cannot be decoded", got=kernels.STATUS_TEXT[int(status)], remedy="ask for a keyframe")
