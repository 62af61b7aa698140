"""The least bytes that any lossless coder of one update can reach on average when nothing but the density and the frequencies of the values
is known. Pure.

    bits per lane = H(p) + p · Hv
    H(p) = −p·log2 p − (1 − p)·log2(1 − p)                  p: the fraction that changed
    Hv   = −Σ f·log2 f                                      f: how often each value of (new − old) mod 2^16 occurs among the changed

It is the bound for independent positions and is used for clustered ones too, where a coder may well stay below it.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from rose_hpc.errors import WeightsError


def binary_entropy_bits(p: float) -> float:
    """H(p) in bits, 0 at p = 0 and 1. Raises WeightsError outside of 0..1."""
    if not 0 <= p <= 1:
        raise WeightsError("not a probability", got=p, expected="0 to 1")
    return 0.0 if p in (0, 1) else -p * math.log2(p) - (1 - p) * math.log2(1 - p)


def frequency_entropy_bits(counts: NDArray[np.int64]) -> float:
    """Entropy in bits per draw of values that occurred so often; zeros count nothing."""
    present = counts[counts > 0]
    if not len(present):
        return 0.0
    f = present / present.sum()
    return float(-(f * np.log2(f)).sum())


def delta_entropy_bits(deltas: NDArray[np.uint16]) -> float:
    """Hv of the changes at hand: entropy in bits per change of their differences mod 2^16."""
    return frequency_entropy_bits(np.bincount(deltas, minlength=1 << 16))


def bound_bytes(lanes: int, deltas: NDArray[np.uint16]) -> float:
    """Bytes of the bound for an update of `lanes` lanes of which len(deltas) changed, by these differences."""
    p = len(deltas) / lanes
    return lanes * (binary_entropy_bits(p) + p * delta_entropy_bits(deltas)) / 8
