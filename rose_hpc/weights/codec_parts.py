"""What the encoder and the decoder of codec.py stand on: where a stream's lanes lie, the threads, the scan's scratch memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rose_hpc.errors import LayoutError, WeightsError
from rose_hpc.weights import kernels, wire
from rose_hpc.weights.digest import MODULUS
from rose_hpc.weights.routing import Stream
from rose_hpc.weights.wire import LANE_BYTES, BucketHeader

Lanes = NDArray[np.uint16]
T = TypeVar("T")

_FIRST_ROOM = 1 << 16  # changes; grows by doubling


class StreamMap:
    """Where the lanes of one stream lie: the arrays that the kernels take.

    stream_start: int64[runs + 1], image_start: int64[runs], in lanes. Raises LayoutError when a run cuts a lane or bucket_bytes is
    no multiple of a lane.
    """

    def __init__(self, stream: Stream, bucket_bytes: int) -> None:
        if bucket_bytes <= 0 or bucket_bytes % LANE_BYTES or bucket_bytes > wire.MAX_BUCKET_BYTES:
            raise LayoutError("bucket_bytes cannot be used", got=bucket_bytes, expected=f"an even number up to {wire.MAX_BUCKET_BYTES}")
        if ((stream.runs.offsets | stream.runs.sizes) % LANE_BYTES).any():
            raise LayoutError(f"a run of stream {stream.stream_id} cuts a lane", expected=f"multiples of {LANE_BYTES} bytes")
        self.stream_id = stream.stream_id
        self.image_start = np.ascontiguousarray(stream.runs.offsets // LANE_BYTES)
        self.stream_start = np.concatenate(([0], np.cumsum(stream.runs.sizes // LANE_BYTES))).astype(np.int64)
        self.image_start.flags.writeable = self.stream_start.flags.writeable = False
        self.lanes = int(self.stream_start[-1])
        self.bucket_lanes = bucket_bytes // LANE_BYTES
        self.buckets = -(-self.lanes // self.bucket_lanes)
        self.image_end = int(stream.runs.ends.max(initial=0)) // LANE_BYTES

    def bucket(self, index: int) -> tuple[int, int]:
        """(first stream lane, lanes) of a bucket. Raises WeightsError when there is no such bucket."""
        if not 0 <= index < self.buckets:
            raise WeightsError(f"stream {self.stream_id} has no such bucket", got=index, expected=f"0 to {self.buckets - 1}")
        first = index * self.bucket_lanes
        return first, min(self.bucket_lanes, self.lanes - first)

    def lanes_of(self, index: int) -> int:
        """Lanes of a bucket; 0 behind the last one."""
        return max(0, min(self.bucket_lanes, self.lanes - index * self.bucket_lanes))

    def check_image(self, image: Lanes, writable: bool) -> None:
        """Raises LayoutError when the kernels could not work on this image."""
        if image.dtype != np.uint16 or image.ndim != 1 or not image.flags.c_contiguous or not image.flags.aligned:
            raise LayoutError(
                "an image is a contiguous array of lanes", got=f"{image.dtype}, shape {image.shape}", expected="uint16 [lanes]"
            )
        if image.size < self.image_end or (writable and not image.flags.writeable):
            raise LayoutError(
                "an image that does not hold the stream, or is read-only", got=f"{image.size} lanes", expected=f"{self.image_end} at least"
            )

    def check_header(self, header: BucketHeader) -> None:
        """Raises WeightsError when a message is not of this stream and bucket size."""
        expected = (self.stream_id, *self.bucket(header.index))
        if (header.stream_id, header.first_lane, header.lanes) != expected:
            got = f"stream {header.stream_id}, lanes from {header.first_lane}: {header.lanes}"
            raise WeightsError("a bucket of another stream or bucket size", got=got, expected=f"stream, first lane, lanes = {expected}")


class Workers:
    """A thread pool that is made when it is needed; in a forked child, whose threads are gone, anew. threads=1: calls at once."""

    def __init__(self, threads: int) -> None:
        self.threads = max(threads, 1)
        self._pool: tuple[int, ThreadPoolExecutor] | None = None

    def submit(self, call: Callable[[], T]) -> Future[T]:
        if self.threads == 1:
            done: Future[T] = Future()
            done.set_result(call())
            return done
        if self._pool is None or self._pool[0] != os.getpid():
            self._pool = (os.getpid(), ThreadPoolExecutor(self.threads, thread_name_prefix="codec"))
        return self._pool[1].submit(call)

    def spread(self, call: Callable[[int, int], T], count: int, least: int) -> list[T]:
        """[call(low, high), …] over about `threads` cuts of range(count), none much shorter than `least`; in order."""
        step = max(-(-count // self.threads), least)
        if step >= count:
            return [call(0, count)]
        futures = [self.submit(lambda low=low: call(low, min(low + step, count))) for low in range(0, count, step)]  # type: ignore[misc]
        return [f.result() for f in futures]


class Scratch:
    """Memory of the coding, kept from bucket to bucket: fresh memory costs as much as what is done with it."""

    def __init__(self) -> None:
        self.symbols, self.counts = np.empty((2, 65536), np.int32)
        self.split = np.empty(131072, np.uint8)
        self.leaves = np.empty((3, kernels.MAX_LEAVES), np.int64)
        self.codes = np.empty(65536, np.uint32)
        self.tree = np.empty(kernels.CODEBOOK_BYTES, np.uint8)
        self._streams = [np.empty(0, np.uint8)] * 3

    def streams(self, blocks: int) -> list[NDArray[np.uint8]]:
        """Room for the block table, the gap streams and the value streams of so many blocks."""
        sizes = [blocks * n for n in (kernels.BLOCK_RECORD_BYTES, kernels.GAP_BLOCK_BYTES, kernels.VALUE_BLOCK_BYTES)]
        if self._streams[0].size < sizes[0]:
            self._streams = [np.empty(2 * n, np.uint8) for n in sizes]
        return [room[:n] for room, n in zip(self._streams, sizes, strict=True)]


@dataclass
class Changes:
    """What the scan of a bucket has found so far. positions: uint32, in the bucket; differences: uint16; `count` are filled;
    histogram: int32[65536], of the differences.

    Once there are more than `most`, the bucket goes dense and only `count` and `digest` are kept on.
    """

    most: int
    positions: NDArray[np.uint32] = field(default_factory=lambda: np.empty(_FIRST_ROOM, np.uint32))
    differences: Lanes = field(default_factory=lambda: np.empty(_FIRST_ROOM, np.uint16))
    histogram: NDArray[np.int32] = field(default_factory=lambda: np.zeros(65536, np.int32))
    count: int = 0
    digest: int = 0
    coded: bool = False  # and the histogram, therefore, taken and left at zero
    scratch: Scratch | None = None

    def reset(self, most: int) -> None:
        """Forget everything."""
        if self.count and not self.coded:
            self.histogram[:] = 0
        self.count = self.digest = 0
        self.coded, self.most = False, most

    @property
    def dense(self) -> bool:
        return self.count > self.most

    def reserve(self, more: int) -> None:
        """Room for `more` changes."""
        if self.count + more > self.positions.size:
            room = max(2 * self.positions.size, self.count + more)
            for name in ("positions", "differences"):
                wider = np.empty(room, getattr(self, name).dtype)
                wider[: self.count] = getattr(self, name)[: self.count]
                setattr(self, name, wider)

    def extend(self, other: Changes) -> None:
        """Append what was found behind the own part of the bucket."""
        if self.count + other.count <= self.most:
            self.reserve(other.count)
            self.positions[self.count : self.count + other.count] = other.positions[: other.count]
            self.differences[self.count : self.count + other.count] = other.differences[: other.count]
            kernels.count_differences(other.filled[1], self.histogram)
        self.count += other.count
        self.digest = (self.digest + other.digest) % MODULUS

    @property
    def filled(self) -> tuple[NDArray[np.uint32], Lanes]:
        return kernels.read_only(self.positions[: self.count]), kernels.read_only(self.differences[: self.count])
