"""The digest adds up over any sharding, follows changes, and notices every kind of difference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_hpc.errors import LayoutError
from rose_hpc.weights.digest import MODULUS, THREAD_LANES, combine, digest_image, digest_lanes, digest_runs, reference_digest
from rose_hpc.weights.layout import Run, build_layout

lane_arrays = st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=60).map(lambda x: np.array(x, np.uint16))


def test_the_digest_matches_a_plain_integer_computation():
    def fin(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % MODULUS
        return x ^ (x >> 31)

    bits = np.array([0, 1, 0x8000, 0x7FC1], np.uint16)  # +0, a subnormal, −0, a NaN with payload
    expected = sum(fin((i + 5) << 16 | int(b)) for i, b in enumerate(bits)) % MODULUS
    assert digest_lanes(5, bits) == reference_digest(5, bits) == expected


@settings(max_examples=50)
@given(st.integers(0, 2000), st.integers(0, 2**48 - 2001), st.integers(0, 2**32))
def test_the_kernel_is_the_reference(size, first, seed):
    bits = np.random.default_rng(seed).integers(0, 1 << 16, size, np.uint16)
    assert digest_lanes(first, bits) == reference_digest(first, bits)


@given(lane_arrays, st.lists(st.integers(0, 60), max_size=6), st.integers(0, 2**40))
def test_the_digest_adds_up_over_any_cutting(bits, cuts, first):
    edges = sorted({0, len(bits), *[min(c, len(bits)) for c in cuts]})
    parts = [digest_lanes(first + a, bits[a:b]) for a, b in itertools.pairwise(edges)]
    assert combine(parts) == digest_lanes(first, bits)


@given(lane_arrays, st.data())
def test_one_flipped_bit_changes_the_digest(bits, data):
    other = bits.copy()
    other[data.draw(st.integers(0, len(bits) - 1))] ^= np.uint16(1 << data.draw(st.integers(0, 15)))
    assert digest_lanes(0, other) != digest_lanes(0, bits)


@given(lane_arrays.filter(lambda b: len(set(b.tolist())) > 1))
def test_a_permutation_changes_the_digest(bits):
    moved = np.roll(bits, 1)
    assert (moved == bits).all() or digest_lanes(0, moved) != digest_lanes(0, bits)


@given(lane_arrays, st.data())
def test_a_change_of_lanes_changes_the_sum_by_their_own_terms(bits, data):
    lane = data.draw(st.integers(0, len(bits) - 1))
    other = bits.copy()
    other[lane] = data.draw(st.integers(0, 2**16 - 1))
    change = digest_lanes(lane, other[lane : lane + 1]) - digest_lanes(lane, bits[lane : lane + 1])
    assert combine([digest_lanes(0, bits), change]) == digest_lanes(0, other)


def test_threads_add_up_to_the_same():
    bits = np.random.default_rng(0).integers(0, 1 << 16, 3 * THREAD_LANES + 17, np.uint16)
    runs = [Run(0, 2 * THREAD_LANES), Run(2 * THREAD_LANES, 10), Run(3 * THREAD_LANES, bits.nbytes - 3 * THREAD_LANES)]
    assert digest_lanes(3, bits, threads=3) == digest_lanes(3, bits) == reference_digest(3, bits)
    assert digest_runs(bits, runs, threads=3) == digest_runs(bits, runs)


def test_runs_of_an_image_add_up():
    layout = build_layout([("a", (3, 5))], "bfloat16")
    image = np.random.default_rng(0).integers(0, 256, layout.image_bytes, np.uint8)
    lanes = image.view(np.uint16)
    assert combine([digest_runs(lanes, [Run(0, 10)]), digest_runs(lanes, [Run(10, 4), Run(14, 16)])]) == digest_image(layout, image)
    assert digest_runs(lanes, []) == 0


@pytest.mark.parametrize("run", [Run(1, 2), Run(0, 3), Run(28, 4), Run(-2, 2)])
def test_runs_that_cut_a_lane_or_leave_the_image_are_refused(run):
    with pytest.raises(LayoutError):
        digest_runs(np.zeros(15, np.uint16), [Run(0, 2), run])


def test_an_image_of_another_size_is_refused_and_float32_elements_are_two_lanes():
    layout = build_layout([("a", (4,))], "float32")
    image = np.arange(layout.image_bytes, dtype=np.uint8)
    assert digest_image(layout, image) == digest_lanes(0, image.view(np.uint16))
    with pytest.raises(LayoutError):
        digest_image(layout, image[:-2])
