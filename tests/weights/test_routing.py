"""The routing plan tiles what is wanted, asks only owners, balances replicas."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_hpc.errors import LayoutError
from rose_hpc.weights.layout import Run, merge
from rose_hpc.weights.routing import plan_routes

ITEM = 4


@st.composite
def sharded_images(draw):
    """An image cut into runs, each owned by one to three of the sources."""
    cuts = sorted(draw(st.sets(st.integers(1, 99), max_size=8)))
    edges = [0, *cuts, 100]
    sources = draw(st.integers(1, 4))
    owned = {s: [] for s in range(sources)}
    for a, b in itertools.pairwise(edges):
        for s in draw(st.sets(st.integers(0, sources - 1), min_size=1, max_size=3)):
            owned[s].append(Run(a * ITEM, (b - a) * ITEM))
    start = draw(st.integers(0, 99))
    wanted = [Run(start * ITEM, draw(st.integers(1, 100 - start)) * ITEM)]
    return {s: merge(r) for s, r in owned.items()}, wanted, draw(st.integers(1, 30)) * ITEM


@given(sharded_images())
def test_segments_tile_the_wanted_bytes_and_come_from_owners(case):
    owned, wanted, bucket_bytes = case
    segments = plan_routes(owned, wanted, bucket_bytes)
    assert merge(s.run for s in segments) == merge(wanted)
    for segment in segments:
        assert segment.run.nbytes <= bucket_bytes and segment.run.offset_bytes % ITEM == 0 and segment.run.nbytes % ITEM == 0
        assert any(r.offset_bytes <= segment.run.offset_bytes and segment.run.end_bytes <= r.end_bytes for r in owned[segment.source])


@given(sharded_images())
def test_the_plan_does_not_depend_on_the_order_of_its_input(case):
    owned, wanted, bucket_bytes = case
    assert plan_routes(dict(reversed(owned.items())), wanted, bucket_bytes) == plan_routes(owned, wanted, bucket_bytes)


def test_replicas_share_the_work():
    owned = {s: [Run(0, 4000)] for s in range(4)}
    segments = plan_routes(owned, [Run(0, 4000)], 100)
    assert [sum(s.run.nbytes for s in segments if s.source == r) for r in range(4)] == [1000] * 4


def test_a_byte_that_nobody_owns_is_an_error():
    with pytest.raises(LayoutError, match="no source"):
        plan_routes({0: [Run(0, 8)], 1: [Run(12, 8)]}, [Run(0, 20)], 64)
