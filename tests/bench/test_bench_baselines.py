from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_hpc.bench.baselines import Coo, CooEncoder, apply_coo, apply_zstd, zstd_of_xor
from rose_hpc.errors import WeightsError

MOST = 300


@settings(deadline=None)  # the first example compiles
@given(st.lists(st.integers(0, 0xFFFF), max_size=MOST), st.data())
def test_coo_brings_any_bits_over_and_the_old_image_forward(old_bits: list[int], data: st.DataObject) -> None:
    old = np.array(old_bits, np.uint16)
    new = np.array([data.draw(st.sampled_from([b, b, b, b ^ 0x8000, 0x7FC1])) for b in old_bits], np.uint16)
    there = old.copy()
    first = data.draw(st.sampled_from([0, 100]))
    changed = np.flatnonzero(old != new)
    coo = CooEncoder(MOST).encode(old, new, first)
    assert np.array_equal(old, new)
    assert np.array_equal(coo.positions, changed + first) and coo.nbytes == 6 * len(changed)
    apply_coo(coo, image := np.concatenate([np.zeros(first, np.uint16), there]))
    assert np.array_equal(image[first:], new)


def test_a_full_buffer_is_not_overrun() -> None:
    old, new = np.zeros(64, np.uint16), np.arange(1, 65, dtype=np.uint16)
    assert CooEncoder(64).encode(old, new).positions.tolist() == list(range(64))


def test_an_image_that_the_encoder_has_no_room_for_is_refused() -> None:
    with pytest.raises(WeightsError):
        CooEncoder(8).encode(np.zeros(9, np.uint16), np.zeros(9, np.uint16))


@pytest.mark.parametrize("positions", [[-1], [4], [0, 7]])
def test_positions_outside_of_the_image_are_refused(positions: list[int]) -> None:
    with pytest.raises(WeightsError):
        apply_coo(Coo(np.array(positions, np.int32), np.ones(len(positions), np.uint16)), np.zeros(4, np.uint16))


@pytest.mark.parametrize("level", [1, 3])
def test_zstd_of_the_xor_brings_the_image_over(level: int) -> None:
    rng = np.random.default_rng(0)
    old, new = rng.integers(0, 1 << 16, 10_000, np.uint16), rng.integers(0, 1 << 16, 10_000, np.uint16)
    new[:9_000] = old[:9_000]
    blob = zstd_of_xor(old, new, level)
    assert len(blob) < 3_000
    apply_zstd(blob, old)
    assert np.array_equal(old, new)
