"""The routing plan: every wanted byte in one stream, from who holds it; replicas share the work; a peer's plan is not trusted."""

import contextlib
import hashlib
import itertools
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_hpc.errors import LayoutError
from rose_hpc.weights.layout import Run, Runs, merge
from rose_hpc.weights.routing import CUT_BYTES, RoutingPlan, Stream, from_bytes, plan_streams, to_bytes, wanted_streams

ITEM, CELLS = 2, 30
IMAGE = CELLS * ITEM
few = settings(max_examples=30, deadline=None)


@st.composite
def cells(draw):
    """Some of the image's elements, as merged runs."""
    inside = draw(st.integers(0, (1 << CELLS) - 1))
    return merge(Run(k * ITEM, ITEM) for k in range(CELLS) if inside >> k & 1)


@st.composite
def worlds(draw):
    """Sources that hold every element between them, replicas included, and demands."""
    sources = draw(st.lists(st.integers(0, 90), min_size=1, max_size=4, unique=True))
    owned = {s: draw(cells()) for s in sources}
    first = draw(st.sampled_from(sources))
    owned[first] = merge(Run(k * ITEM, ITEM) for k in bytes_of(owned[first], ITEM) | set(range(CELLS)) - covered(owned, ITEM))
    return owned, draw(st.lists(cells(), min_size=1, max_size=3))


def bytes_of(runs, unit=1):
    return {k for r in runs for k in range(r.offset_bytes // unit, r.end_bytes // unit)}


def covered(owned, unit=1):
    return set().union(*(bytes_of(runs, unit) for runs in owned.values()))


@few
@given(worlds())
def test_every_wanted_byte_is_in_one_stream_of_a_source_that_holds_it_and_no_other_byte_is_in_any(world):
    owned, demands = world
    plan = plan_streams(owned, demands, IMAGE)
    carried = [(k, s) for s in plan.streams for k in bytes_of(s.runs)]
    assert sorted(k for k, _ in carried) == sorted(set().union(*map(bytes_of, demands)))
    for stream in plan.streams:
        assert bytes_of(stream.runs) <= bytes_of(owned[stream.source])
        assert stream.nbytes == sum(r.nbytes for r in stream.runs) > 0 and list(stream.runs) == merge(stream.runs)


@few
@given(worlds())
def test_streams_are_the_classes_of_equal_source_and_demands_as_brute_force_finds_them(world):
    owned, demands = world
    plan = plan_streams(owned, demands, IMAGE)
    keys = set()
    for stream in plan.streams:
        wanted_by = {tuple(k in bytes_of(d) for d in demands) for k in bytes_of(stream.runs)}
        assert len(wanted_by) == 1
        keys.add((stream.source, *wanted_by))
    assert len(keys) == len(plan.streams)
    for k in range(0, IMAGE, ITEM):  # where only one source holds an element there is nothing to choose
        holders = [s for s in owned if k in bytes_of(owned[s])]
        if len(holders) == 1 and any(k in bytes_of(d) for d in demands):
            assert [s.source for s in plan.streams if k in bytes_of(s.runs)] == holders


@few
@given(worlds())
def test_streams_are_numbered_by_source_then_first_byte_and_cut_no_element(world):
    plan = plan_streams(*world, IMAGE)
    assert [s.stream_id for s in plan.streams] == list(range(len(plan.streams)))
    keys = [(s.source, s.runs[0].offset_bytes) for s in plan.streams]
    assert keys == sorted(keys)
    assert all(r.offset_bytes % ITEM == r.nbytes % ITEM == 0 for s in plan.streams for r in s.runs)


@few
@given(worlds(), st.randoms(use_true_random=False))
def test_the_plan_does_not_depend_on_the_order_of_sources_demands_or_runs(world, random):
    owned, demands = world
    plan = plan_streams(owned, demands, IMAGE)
    shuffled = random.sample(list(owned.items()), len(owned))
    other = plan_streams(
        {s: random.sample(r, len(r)) for s, r in shuffled}, [random.sample(d, len(d)) for d in random.sample(demands, len(demands))], IMAGE
    )
    assert other == plan and other.fingerprint == plan.fingerprint


@few
@given(worlds(), worlds())
def test_the_fingerprint_changes_exactly_when_the_plan_does(one, other):
    a, b = plan_streams(*one, IMAGE), plan_streams(*other, IMAGE)
    assert (a == b) == (a.fingerprint == b.fingerprint) == (to_bytes(a) == to_bytes(b))


@few
@given(worlds())
def test_a_plan_survives_the_way_to_a_peer(world):
    plan = plan_streams(*world, IMAGE)
    assert from_bytes(to_bytes(plan), IMAGE) == plan


@few
@given(st.integers(1, 9), st.integers(0, 3), st.integers(1, 400))
def test_sources_that_hold_the_same_send_the_same_but_for_a_few_bytes(replicas, apart, elements):
    owned = {s: [Run(k * 1000, elements * ITEM) for k in range(apart + 1)] for s in range(replicas)}
    plan = plan_streams(owned, [owned[0]], 10_000)
    sent = [sum(s.nbytes for s in plan.streams if s.source == r) for r in range(replicas)]
    assert max(sent) - min(sent) < 2 * CUT_BYTES
    assert sum(len(s.runs) for s in plan.streams) <= len(owned[0]) + replicas - 1  # in long pieces


@few
@given(worlds())
def test_no_replica_that_could_take_more_is_left_emptier_by_more_than_a_cut(world):
    """Bytes of the largest group of replicas are not given to a holder that is fuller than another holder of the same."""
    owned, _ = world
    plan = plan_streams(owned, [[Run(0, IMAGE)]], IMAGE)
    sent = {r: sum(s.nbytes for s in plan.streams if s.source == r) for r in owned}
    most = max(len({s for s in owned if k in bytes_of(owned[s])}) for k in range(IMAGE))
    last = {frozenset(s for s in owned if k in bytes_of(owned[s])) for k in range(IMAGE)}
    final = [holders for holders in last if len(holders) == most]
    if len(final) == 1 and most > 1:  # placed last: nothing comes after to undo the balance
        group = final[0]
        takers = [
            s.source for s in plan.streams if any(frozenset(o for o in owned if k in bytes_of(owned[o])) == group for k in bytes_of(s.runs))
        ]
        assert all(sent[t] <= min(sent[h] for h in group) + CUT_BYTES * (len(group) + 1) for t in takers)


def test_many_sources_are_told_apart():
    owned = {s: [Run(s * ITEM, ITEM), Run(1000, 130 * ITEM)] for s in range(130)}
    plan = plan_streams(owned, [[Run(0, 130 * ITEM)], [Run(1000, 130 * ITEM)]], 2000)
    alone = [s for s in plan.streams if s.runs[0].offset_bytes < 1000]
    assert [(s.source, bytes_of(s.runs)) for s in alone] == [(k, {2 * k, 2 * k + 1}) for k in range(130)]
    assert all(s.nbytes <= 2 * CUT_BYTES for s in plan.streams)


def test_a_byte_that_nobody_holds_is_an_error():
    with pytest.raises(LayoutError, match="no source"):
        plan_streams({0: [Run(0, 8)], 1: [Run(12, 8)]}, [[Run(0, 20)]], 20)
    assert plan_streams({0: [Run(0, 8)], 1: [Run(12, 8)]}, [[Run(0, 8)], [Run(12, 8)]], 20).streams[1].source == 1


@pytest.mark.parametrize("owned", [{0: [Run(0, 30)]}, {0: [Run(0, 8), Run(4, 8)]}, {0: [Run(-4, 24)]}])
def test_sources_that_claim_what_cannot_be_are_refused(owned):
    with pytest.raises(LayoutError):
        plan_streams(owned, [[Run(0, 20)]], 20)


def test_an_empty_policy_has_an_empty_plan():
    plan = plan_streams({0: [], 1: []}, [[]], 0)
    assert plan.streams == () and from_bytes(to_bytes(plan), 0) == plan and wanted_streams(plan, []) == ()


def test_buckets_cover_the_stream():
    stream = Stream(0, 0, (Run(0, 100), Run(200, 28)))
    assert [stream.buckets(b) for b in (128, 127, 64, 4)] == [1, 2, 2, 32]


@pytest.mark.parametrize("runs", [(Run(8, 4), Run(0, 4)), (Run(0, 8), Run(4, 8)), (Run(0, 0),), (Run(-4, 4),)])
def test_a_stream_out_of_order_is_refused(runs):
    with pytest.raises(LayoutError, match="not in order"):
        Stream(0, 0, runs)


def test_streams_are_numbered_by_their_place():
    with pytest.raises(LayoutError, match="place"):
        RoutingPlan((Stream(1, 0, (Run(0, 4),)),))


# ── asking ──


@few
@given(worlds())
def test_each_demand_is_the_union_of_whole_streams(world):
    owned, demands = world
    plan = plan_streams(owned, demands, IMAGE)
    for demand in demands:
        asked = wanted_streams(plan, demand)
        assert merge(r for k in asked for r in plan.streams[k].runs) == merge(demand)


def test_a_stream_wanted_in_part_or_a_byte_in_no_stream_is_an_error():
    plan = plan_streams({0: [Run(0, 20)]}, [[Run(0, 12)]], 20)
    with pytest.raises(LayoutError, match="in part"):
        wanted_streams(plan, [Run(0, 8)])
    with pytest.raises(LayoutError, match="all wanted"):
        wanted_streams(plan, [Run(0, 20)])


# ── from a peer ──


def raw(streams, magic=b"RSP1", count=None, tail=b""):
    """The bytes of (source, [(offset, size), …]) without any check."""
    runs = [r for _, rs in streams for r in rs]
    heads = b"".join(struct.pack("<qq", source, len(rs)) for source, rs in streams)
    body = b"".join(struct.pack(f"<{len(runs)}q", *(r[k] for r in runs)) for k in (0, 1))
    return struct.pack("<4sI", magic, len(streams) if count is None else count) + heads + body + tail


def test_the_canonical_bytes_are_as_documented():
    plan = plan_streams({3: [Run(0, 8)], 5: [Run(8, 4), Run(16, 4)]}, [[Run(0, 12), Run(16, 4)]], 20)
    assert to_bytes(plan) == raw([(3, [(0, 8)]), (5, [(8, 4), (16, 4)])])
    assert plan.fingerprint == hashlib.sha256(to_bytes(plan)).hexdigest()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"RSP1",
        raw([(0, [(0, 8)])], magic=b"RSP2"),
        raw([(0, [(0, 8)])], count=2),
        raw([(0, [(0, 8)])], count=1 << 31),
        raw([(0, [(0, 8)])], tail=b"x"),
        raw([(0, [(0, 8)])])[:-1],
        raw([(-1, [(0, 8)])]),
        raw([(1 << 40, [(0, 8)])]),
        raw([(0, [])]),
        raw([(0, [(0, 102)])]),
        raw([(0, [(-2, 8)])]),
        raw([(0, [(0, -8)])]),
        raw([(0, [(0, 0)])]),
        raw([(0, [(2, (1 << 63) - 2)])]),
        raw([(0, [((1 << 63) - 2, 8)])]),
        raw([(0, [(1, 4)])]),
        raw([(0, [(0, 3)])]),
        raw([(0, [(0, 8), (4, 8)])]),
        raw([(0, [(8, 8), (0, 8)])]),
        raw([(0, [(0, 8), (8, 8)])]),
        raw([(0, [(0, 8)]), (1, [(4, 8)])]),
        raw([(1, [(0, 8)]), (0, [(8, 8)])]),
        raw([(0, [(8, 8)]), (0, [(0, 8)])]),
    ],
)
def test_bytes_that_are_not_a_plan_are_refused(content):
    with pytest.raises(LayoutError):
        from_bytes(content, 100)


@few
@given(worlds(), st.data())
def test_a_plan_with_a_flipped_bit_is_another_plan_or_refused(world, data):
    plan = plan_streams(*world, IMAGE)
    content = bytearray(to_bytes(plan))
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(LayoutError):
        assert from_bytes(bytes(content), IMAGE).fingerprint != plan.fingerprint


def test_hundreds_of_thousands_of_runs_are_planned_without_a_loop_over_them():
    """A model that is sharded on its last dim over 8 ranks; as Python objects this would take minutes."""
    rows = 50_000
    owned = {s: Runs(np.arange(rows) * 8 * 16 + 16 * s, np.full(rows, 16)) for s in range(8)}
    plan = plan_streams(owned, [[Run(0, rows * 128)]], rows * 128)
    assert [len(s.runs) for s in plan.streams] == [rows] * 8
    assert from_bytes(to_bytes(plan), rows * 128) == plan
    assert wanted_streams(plan, [Run(0, rows * 128)]) == tuple(range(8))
    assert all(a.runs != b.runs for a, b in itertools.pairwise(plan.streams))
