"""Order-independent digest of a policy's bits. Pure.

    digest = Σ over elements of mix(global index, bits)   mod 2^64

A sum adds up over ANY sharding, so trainer ranks digest their own slices and nobody needs the whole tensor; a receiver that
holds other slices, or all of them, gets the same total exactly when every bit is the same (but for chance, 2^-64).
mix is two rounds of the 64-bit finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): the first over the index, the second
over that and the bits, so that swapped elements and moved blocks change the sum.

It is not a signature: an attacker can forge it. Transports authenticate; the digest finds faults.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose_hpc.errors import LayoutError
from rose_hpc.weights.layout import ITEM_BYTES, ImageLayout, Run

MODULUS = 1 << 64
_CHUNK_ELEMENTS = 1 << 20  # temporaries of 8 MiB each stay in cache-friendly, bounded memory
_UNSIGNED: dict[int, np.dtype[Any]] = {4: np.dtype("<u4"), 2: np.dtype("<u2")}
_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def digest_elements(first_index: int, bits: NDArray[np.unsignedinteger]) -> int:
    """Digest of consecutive elements. first_index: global index of bits[0]; bits: uint16 or uint32 patterns [n]."""
    total = 0
    for start in range(0, len(bits), _CHUNK_ELEMENTS):
        part = bits[start : start + _CHUNK_ELEMENTS].astype(np.uint64)
        index = np.arange(first_index + start, first_index + start + len(part), dtype=np.uint64)
        total += int(_finalise(_finalise(index * _GAMMA + _GAMMA) ^ part).sum(dtype=np.uint64))
    return total % MODULUS


def digest_image(layout: ImageLayout, image: NDArray[np.uint8]) -> int:
    """Digest of a whole image, uint8 [image_bytes]. Raises LayoutError when the size is wrong."""
    if image.nbytes != layout.image_bytes:
        raise LayoutError("image of the wrong size", got=f"{image.nbytes} bytes", expected=f"{layout.image_bytes} bytes")
    return digest_elements(0, image.view(_UNSIGNED[layout.item_bytes]))


def digest_run(layout: ImageLayout, run: Run, content: NDArray[np.uint8]) -> int:
    """Digest of one run of the image. content: uint8 [run.nbytes]. Raises LayoutError when it cuts an element."""
    item = ITEM_BYTES[layout.dtype]
    if run.offset_bytes % item or run.nbytes % item or content.nbytes != run.nbytes:
        raise LayoutError("run does not hold whole elements", got=f"{run}, {content.nbytes} bytes", expected=f"multiples of {item} bytes")
    return digest_elements(run.offset_bytes // item, content.view(_UNSIGNED[item]))


def combine(parts: list[int]) -> int:
    """Digest of the union of disjoint slices."""
    return sum(parts) % MODULUS


def _finalise(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
