"""The digest adds up over any sharding and notices every kind of difference."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_hpc.errors import LayoutError
from rose_hpc.weights.digest import MODULUS, combine, digest_elements, digest_image, digest_run
from rose_hpc.weights.layout import Run, build_layout

elements = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=60).map(lambda x: np.array(x, "<u4"))


@given(elements, st.lists(st.integers(0, 60), max_size=6), st.integers(0, 2**40))
def test_the_digest_adds_up_over_any_cutting(bits, cuts, first):
    edges = sorted({0, len(bits), *[min(c, len(bits)) for c in cuts]})
    parts = [digest_elements(first + a, bits[a:b]) for a, b in itertools.pairwise(edges)]
    assert combine(parts) == digest_elements(first, bits)


@given(elements, st.data())
def test_one_flipped_bit_changes_the_digest(bits, data):
    other = bits.copy()
    other[data.draw(st.integers(0, len(bits) - 1))] ^= np.uint32(1 << data.draw(st.integers(0, 31)))
    assert digest_elements(0, other) != digest_elements(0, bits)


@given(elements.filter(lambda b: len(set(b.tolist())) > 1))
def test_a_permutation_changes_the_digest(bits):
    moved = np.roll(bits, 1)
    assert (moved == bits).all() or digest_elements(0, moved) != digest_elements(0, bits)


def test_the_digest_matches_a_plain_integer_computation():
    def finalise(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % MODULUS
        return x ^ (x >> 31)

    bits = np.array([0, 1, 0x80000000, 0x7FC00001], "<u4")  # +0, a subnormal, −0, a NaN with payload
    gamma = 0x9E3779B97F4A7C15
    expected = sum(finalise(finalise(((i + 5) * gamma + gamma) % MODULUS) ^ int(b)) for i, b in enumerate(bits)) % MODULUS
    assert digest_elements(5, bits) == expected


@settings(max_examples=5)
@given(st.integers(0, 3))
def test_the_digest_is_the_same_across_its_inner_chunks(extra):
    bits = np.random.default_rng(extra).integers(0, 2**16, (1 << 20) + extra, dtype="<u2")
    assert digest_elements(0, bits) == combine([digest_elements(0, bits[:777]), digest_elements(777, bits[777:])])


def test_runs_of_an_image_add_up_and_cut_elements_are_refused():
    layout = build_layout([("a", (3, 5))], "bfloat16")
    image = np.random.default_rng(0).integers(0, 256, layout.image_bytes, dtype=np.uint8)
    parts = [digest_run(layout, r, image[r.offset_bytes : r.end_bytes]) for r in (Run(0, 10), Run(10, 20))]
    assert combine(parts) == digest_image(layout, image)
    with pytest.raises(LayoutError):
        digest_run(layout, Run(1, 2), image[1:3])
    with pytest.raises(LayoutError):
        digest_image(layout, image[:-2])
