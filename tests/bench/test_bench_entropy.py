from __future__ import annotations

import math

import numpy as np
import pytest

from rose_hpc.bench.entropy import binary_entropy_bits, bound_bytes, delta_entropy_bits, frequency_entropy_bits
from rose_hpc.errors import WeightsError


@pytest.mark.parametrize(("p", "bits"), [(0, 0.0), (1, 0.0), (0.5, 1.0), (0.25, 0.25 * 2 + 0.75 * math.log2(4 / 3)), (0.003, 0.029464)])
def test_entropy_of_a_position(p: float, bits: float) -> None:
    assert binary_entropy_bits(p) == pytest.approx(bits, rel=1e-4)


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
def test_what_is_no_probability_is_refused(p: float) -> None:
    with pytest.raises(WeightsError):
        binary_entropy_bits(p)


@pytest.mark.parametrize(("counts", "bits"), [([], 0.0), ([7], 0.0), ([5, 0, 5], 1.0), ([2, 1, 1], 1.5)])
def test_entropy_of_frequencies(counts: list[int], bits: float) -> None:
    assert frequency_entropy_bits(np.array(counts, np.int64)) == bits


def test_deltas_are_counted_as_bit_patterns() -> None:
    assert delta_entropy_bits(np.array([1, 0xFFFF, 1, 0xFFFF], np.uint16)) == 1.0


def test_the_bound_of_an_update_by_hand() -> None:
    # a quarter of 1024 lanes changes, by two values equally often: H(1/4) = 0.811278 bits for the position, 1 bit per change
    deltas = np.array([1, 0xFFFF] * 128, np.uint16)
    assert bound_bytes(1024, deltas) == pytest.approx((1024 * 0.8112781 + 256) / 8, rel=1e-6)


def test_nothing_changed_needs_nothing() -> None:
    assert bound_bytes(1000, np.zeros(0, np.uint16)) == 0
