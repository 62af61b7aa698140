"""Compiled loops of the journal: one block of absolute bits staged, scattered, summed. Nothing else.

Each is one pass over a few thousand lanes. The caller guarantees that every lane lies inside the image and that all arrays are
as long as `lanes`. `_fin` is the digest's finaliser (digest.py), so that staging yields the change of the digest for nothing.
"""

from __future__ import annotations

from numba import njit, uint16, uint64


@njit(cache=True, nogil=True, inline="always")
def _fin(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> uint64(27))) * uint64(0x94D049BB133111EB)
    return x ^ (x >> uint64(31))


@njit(cache=True, nogil=True)
def stage(image, lanes, values, absolute, out_lanes, out_bits):  # type: ignore[no-untyped-def]
    """out_lanes, out_bits: the block's lanes and absolute bits. Returns Σ fin over the old and over the new bits.

    The loads come first, in a loop of their own: short enough that the CPU has a dozen cache misses under way at once.
    """
    for i in range(len(lanes)):
        out_lanes[i] = lanes[i]
        out_bits[i] = image[lanes[i]]
    before, after = uint64(0), uint64(0)
    for i in range(len(lanes)):
        lane, old = lanes[i], out_bits[i]
        new = values[i] if absolute else uint16(old + values[i])
        out_bits[i] = new
        place = uint64(lane) << uint64(16)
        before += _fin(place | uint64(old))
        after += _fin(place | uint64(new))
    return before, after


@njit(cache=True, nogil=True)
def scatter(image, lanes, bits):  # type: ignore[no-untyped-def]
    """image[lanes] = bits."""
    for i in range(len(lanes)):
        image[lanes[i]] = bits[i]


@njit(cache=True, nogil=True)
def sum_bits(lanes, bits):  # type: ignore[no-untyped-def]
    """Σ fin over these bits at these lanes."""
    total = uint64(0)
    for i in range(len(lanes)):
        total += _fin((uint64(lanes[i]) << uint64(16)) | uint64(bits[i]))
    return total
