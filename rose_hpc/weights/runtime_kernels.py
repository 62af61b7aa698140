"""Compiled loops over one runtime parameter's memory: digest of its copies, exchange of changed elements. Nothing else.

bits: uint16 [lanes], the parameter's own memory. An element is `width` lanes (2 for float32); its image lanes are
element × width onwards. Sums are per slot (placement.Sharing), mod 2^64, of the digest's terms (digest.py). The caller guarantees that
positions and boxes lie inside. runtime_memory.DeviceMemory does the same on other devices.
"""

from __future__ import annotations

from numba import njit, uint64


@njit(cache=True, nogil=True, inline="always")
def _fin(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> uint64(27))) * uint64(0x94D049BB133111EB)
    return x ^ (x >> uint64(31))


@njit(cache=True, nogil=True)
def _digest_row(bits, at, lane, lanes):  # type: ignore[no-untyped-def]
    """Of `lanes` neighbours in the parameter that are neighbours in the image."""
    total = uint64(0)
    for k in range(lanes):
        total += _fin((uint64(lane + k) << uint64(16)) | uint64(bits[at + k]))
    return total


@njit(cache=True, nogil=True)
def digest_boxes(bits, width, firsts, to_starts, sizes, to_strides, from_strides, slots, sums):  # type: ignore[no-untyped-def]
    """sums[slots[b]] += digest of box b. firsts, to_starts, slots [n]; sizes, to_strides, from_strides [n, 4]: see BoxTable."""
    for b in range(len(firsts)):
        n0, n1, n2, n3 = sizes[b, 0], sizes[b, 1], sizes[b, 2], sizes[b, 3]
        whole_rows = n3 == 1 or (to_strides[b, 3] == 1 and from_strides[b, 3] == 1)
        total = uint64(0)
        for i0 in range(n0):
            for i1 in range(n1):
                for i2 in range(n2):
                    at = to_starts[b] + i0 * to_strides[b, 0] + i1 * to_strides[b, 1] + i2 * to_strides[b, 2]
                    element = firsts[b] + i0 * from_strides[b, 0] + i1 * from_strides[b, 1] + i2 * from_strides[b, 2]
                    if whole_rows:
                        total += _digest_row(bits, at * width, element * width, n3 * width)
                    else:
                        for i3 in range(n3):
                            p, e = at + i3 * to_strides[b, 3], element + i3 * from_strides[b, 3]
                            total += _digest_row(bits, p * width, e * width, width)
        sums[slots[b]] += total


@njit(cache=True, nogil=True)
def digest_elements(bits, width, positions, elements, slots, sums):  # type: ignore[no-untyped-def]
    """sums[slots[i]] += digest of the element at positions[i], which is the image's elements[i]; as memory holds it now."""
    for i in range(len(positions)):
        sums[slots[i]] += _digest_row(bits, positions[i] * width, elements[i] * width, width)


@njit(cache=True, nogil=True)
def digest_values(values, width, elements, slots, sums):  # type: ignore[no-untyped-def]
    """The same of values [n × width] that are in no parameter yet."""
    for i in range(len(elements)):
        sums[slots[i]] += _digest_row(values, i * width, elements[i] * width, width)


@njit(cache=True, nogil=True)
def scatter(bits, width, positions, values):  # type: ignore[no-untyped-def]
    """The element at positions[i] becomes values[i × width …]."""
    for i in range(len(positions)):
        for k in range(width):
            bits[positions[i] * width + k] = values[i * width + k]


@njit(cache=True, nogil=True)
def gather(image, width, elements, values):  # type: ignore[no-untyped-def]
    """values[i × width …] becomes the image's element elements[i]."""
    for i in range(len(elements)):
        for k in range(width):
            values[i * width + k] = image[elements[i] * width + k]
