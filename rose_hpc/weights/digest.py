"""Order-independent digest of a policy's bits. Pure.

    digest = Σ over lanes of fin(lane_index << 16 | lane_bits)   mod 2^64

A LANE is one uint16 of the image (lane index = byte offset / 2). A sum adds up over ANY sharding, so trainer ranks digest their
own slices and nobody needs the whole tensor; it changes by fin(new) − fin(old) per changed lane, so what a delta does to it costs
the delta's changes, not the image. fin is the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), a bijection of 64-bit
words: one changed lane always changes the sum. Lane indices stay below 2^48.

`reference_digest` is the definition, in numpy; the others do the same in compiled kernels, which are imported when first needed:
who only adds digests up does not load numba.
It is not a signature: an attacker can forge it. Transports authenticate; the digest finds faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from rose_hpc.errors import LayoutError
from rose_hpc.weights.layout import ImageLayout, Run, Runs

MODULUS = 1 << 64
LANE_BYTES = 2
THREAD_LANES = 1 << 18  # less is not worth a thread
_CHUNK_LANES = 1 << 18  # temporaries of 2 MiB each stay in cache


def reference_digest(first_lane: int, lanes: NDArray[np.uint16]) -> int:
    """The definition. first_lane: image lane of lanes[0]; lanes: uint16 bit patterns [n]."""
    total = 0
    for start in range(0, len(lanes), _CHUNK_LANES):
        part = lanes[start : start + _CHUNK_LANES].astype(np.uint64)
        index = np.arange(first_lane + start, first_lane + start + len(part), dtype=np.uint64)
        total += int(_finalise(index << np.uint64(16) | part).sum(dtype=np.uint64))
    return total % MODULUS


def digest_lanes(first_lane: int, lanes: NDArray[np.uint16], threads: int = 1) -> int:
    """Digest of consecutive lanes. first_lane: image lane of lanes[0]; lanes: uint16 bit patterns [n]."""
    from rose_hpc.weights import kernels

    lanes = kernels.read_only(lanes)
    return _in_parts(lambda low, high: int(kernels.digest_span(lanes[low:high], first_lane + low)), len(lanes), threads)


def digest_runs(image: NDArray[np.uint16], runs: Sequence[Run], threads: int = 1) -> int:
    """Digest of some runs of an image, uint16 [image lanes]. Raises LayoutError when a run cuts a lane or leaves the image."""
    from rose_hpc.weights import kernels

    held = Runs.of(runs)
    bad = np.flatnonzero((held.offsets < 0) | (held.sizes < 0) | (held.ends > image.nbytes) | ((held.offsets | held.sizes) % LANE_BYTES))
    if bad.size:
        raise LayoutError("run does not hold whole lanes of the image", got=held[int(bad[0])], expected=f"inside {image.nbytes} bytes")
    image = kernels.read_only(image)

    def part(low: int, high: int) -> int:
        span = held if (low, high) == (0, held.nbytes // LANE_BYTES) else held.span(low * LANE_BYTES, high * LANE_BYTES)
        return int(kernels.digest_runs(image, span.offsets // LANE_BYTES, span.sizes // LANE_BYTES))

    return _in_parts(part, held.nbytes // LANE_BYTES, threads)


def digest_image(layout: ImageLayout, image: NDArray[np.uint8], threads: int = 1) -> int:
    """Digest of a whole image, uint8 [image_bytes]. Raises LayoutError when the size is wrong."""
    if image.nbytes != layout.image_bytes:
        raise LayoutError("image of the wrong size", got=f"{image.nbytes} bytes", expected=f"{layout.image_bytes} bytes")
    return digest_lanes(0, image.view("<u2"), threads)


def combine(parts: Iterable[int]) -> int:
    """Digest of the union of disjoint slices, or of an image and its changes."""
    return sum(parts) % MODULUS


def _in_parts(part: Callable[[int, int], int], lanes: int, threads: int) -> int:
    """Σ part(low, high) over about `threads` cuts of the lanes."""
    step = max(-(-lanes // max(threads, 1)), THREAD_LANES)
    if step >= lanes:
        return part(0, lanes)
    with ThreadPoolExecutor(threads) as pool:
        return combine(pool.map(lambda low: part(low, min(low + step, lanes)), range(0, lanes, step)))


def _finalise(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
