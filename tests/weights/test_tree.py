"""The tree planner: one parent for every wanted stream, one crossing into each partition, the cheapest of the shapes."""

import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_hpc.errors import LayoutError
from rose_hpc.weights.tree import CostModel, LinkCost, Member, TreePlan, plan_trees, predicted_s

KB, MB, GB = 10**3, 10**6, 10**9
EQUAL = CostModel(LinkCost(1e-4, 1 * GB), LinkCost(1e-4, 1 * GB), MB)
THIN = CostModel(LinkCost(1e-4, 1 * GB), LinkCost(1e-2, 0.1 * GB), MB)
costs = st.sampled_from([EQUAL, THIN, CostModel(LinkCost(0.0, 2.5 * GB), LinkCost(0.05, 0.01 * GB), 64 * KB)])
few = settings(max_examples=30, deadline=None)


@st.composite
def worlds(draw, most_members=12):
    """Members in up to three partitions; every stream is held by someone, anyone may hold or want anything."""
    streams = draw(st.integers(1, 5))
    ids = range(10, 10 + streams)
    some = st.sets(st.sampled_from(ids)).map(sorted).map(tuple)
    members = [
        Member(f"m{k:02}", draw(st.sampled_from("ABC")), f"n{draw(st.integers(0, 3))}", draw(some) if k % 3 == 0 else (), draw(some))
        for k in range(draw(st.integers(1, most_members)))
    ]
    trainer = Member("trainer", draw(st.sampled_from("AT")), "t", tuple(ids), ())
    return [trainer, *members], {k: draw(st.sampled_from([0, 1, 10 * KB, 3 * MB, 2 * GB])) for k in ids}


def edges_of(plan):
    return [(parent, child, stream) for child, of in plan.parents.items() for stream, parent in of.items()]


@few
@given(worlds(), costs)
def test_every_wanted_stream_has_exactly_one_parent_and_nothing_else_has(world, cost):
    members, stream_bytes = world
    plan = plan_trees(members, stream_bytes, cost)
    wanted = {(m.name, s) for m in members for s in set(m.wants) - set(m.holds)}
    assert {(child, s) for _, child, s in edges_of(plan)} == wanted
    assert all(of for of in plan.parents.values())


@few
@given(worlds(), costs)
def test_following_parents_ends_at_a_holder(world, cost):
    members, stream_bytes = world
    plan, by_name = plan_trees(members, stream_bytes, cost), {m.name: m for m in members}
    for _, child, stream in edges_of(plan):
        at, steps = child, 0
        while stream not in by_name[at].holds:
            at, steps = plan.parents[at][stream], steps + 1
            assert steps <= len(members)


@few
@given(worlds(), costs)
def test_a_stream_crosses_into_a_partition_once_and_not_at_all_where_it_is_held(world, cost):
    members, stream_bytes = world
    by_name = {m.name: m for m in members}
    crossings = Counter(
        (by_name[child].partition, stream)
        for parent, child, stream in edges_of(plan_trees(members, stream_bytes, cost))
        if by_name[parent].partition != by_name[child].partition
    )
    held_in = {(m.partition, s) for m in members for s in m.holds}
    lacking = {(m.partition, s) for m in members for s in set(m.wants) - set(m.holds)}
    assert crossings == Counter(lacking - held_in)


@few
@given(worlds(), costs, st.randoms(use_true_random=False))
def test_the_plan_does_not_depend_on_the_order_of_members_or_streams(world, cost, random):
    members, stream_bytes = world
    plan = plan_trees(members, stream_bytes, cost)
    other = plan_trees(random.sample(members, len(members)), dict(random.sample(list(stream_bytes.items()), len(stream_bytes))), cost)
    assert other == plan and other.fingerprint == plan.fingerprint


@few
@given(worlds(), worlds(), costs)
def test_the_fingerprint_changes_exactly_when_the_plan_does(one, other, cost):
    a, b = plan_trees(*one, cost), plan_trees(*other, cost)
    assert (a == b) == (a.fingerprint == b.fingerprint)


@few
@given(st.integers(1, 9), st.integers(1, 8), st.integers(1, 2))
def test_entries_of_equal_streams_are_spread_evenly_over_the_nodes(streams, nodes, per_node):
    relays = [Member(f"r{n}.{k}", "P", f"n{n}", (), tuple(range(streams))) for n in range(nodes) for k in range(per_node)]
    sources = [Member(f"t{s}", "T", f"t{s}", (s,), ()) for s in range(streams)]
    plan, by_name = plan_trees([*sources, *relays], dict.fromkeys(range(streams), MB), THIN), {r.name: r for r in relays}
    entries = Counter(child for parent, child, _ in edges_of(plan) if parent.startswith("t"))
    by_node = Counter({f"n{n}": 0 for n in range(nodes)})
    by_node.update(by_name[child].node for child in entries.elements())
    assert entries.total() == streams
    assert max(by_node.values()) - min(by_node.values()) <= 1
    assert max(entries.values()) <= -(-streams // (nodes * per_node)) + 1


# ── shapes ──


def fan_out(nbytes, relays, cost):
    """(largest out-degree, depth) inside a partition of so many relays that one source feeds."""
    members = [Member("t", "T", "t", (0,), ()), *(Member(f"r{k:02}", "P", f"n{k}", (), (0,)) for k in range(relays))]
    plan = plan_trees(members, {0: nbytes}, cost)
    degrees = Counter(parent for parent, _, _ in edges_of(plan) if parent != "t")
    depth = 0
    for relay in plan.parents:
        steps = 0
        while relay != "t":
            relay, steps = plan.parents[relay][0], steps + 1
        depth = max(depth, steps)
    return max(degrees.values(), default=0), depth


@pytest.mark.parametrize(
    ("nbytes", "relays", "cost", "shape"),
    [
        (100, 1, EQUAL, (0, 1)),
        (100, 8, EQUAL, (7, 2)),  # latency is all: a star
        (100, 64, EQUAL, (63, 2)),
        (100 * KB, 64, EQUAL, (4, 4)),  # in between: a 4-ary tree
        (10 * GB, 2, EQUAL, (1, 2)),
        (10 * GB, 8, EQUAL, (1, 8)),  # bandwidth is all: a chain
        (10 * GB, 64, EQUAL, (1, 64)),
        (10 * GB, 8, THIN, (2, 4)),  # the way in is ten times thinner than a relay's own link: a second copy costs nothing
        (10 * GB, 64, THIN, (2, 7)),
    ],
)
def test_small_payloads_go_by_a_star_and_large_ones_by_a_chain(nbytes, relays, cost, shape):
    assert fan_out(nbytes, relays, cost) == shape


@few
@given(st.integers(2, 64), st.sampled_from([1, 10 * KB, MB, 30 * MB, 10 * GB]), costs)
def test_the_plan_is_no_slower_than_a_chain_or_a_star(relays, nbytes, cost):
    names = [f"r{k:02}" for k in range(relays)]
    members = [Member("t", "P", "t", (0,), ()), *(Member(name, "P", name, (), (0,)) for name in names)]
    chain = TreePlan({name: {0: "t" if k == 0 else names[k - 1]} for k, name in enumerate(names)})
    star = TreePlan({name: {0: "t"} for name in names})
    chosen = predicted_s(plan_trees(members, {0: nbytes}, cost), members, {0: nbytes}, cost)
    assert chosen <= min(predicted_s(other, members, {0: nbytes}, cost) for other in (chain, star)) + 1e-12


def test_many_streams_with_spread_entries_go_by_stars_that_fill_every_link():
    """Each relay enters one stream and sends it to the others: no link carries more than the image, in two hops."""
    relays = [Member(f"r{k}", "P", f"n{k}", (), tuple(range(8))) for k in range(8)]
    sources = [Member(f"t{s}", "T", f"t{s}", (s,), ()) for s in range(8)]
    plan = plan_trees([*sources, *relays], dict.fromkeys(range(8), GB), EQUAL)
    assert set(Counter(parent for parent, _, _ in edges_of(plan)).values()) == {1, 7}


def test_a_late_joiner_is_fed_from_its_own_partition():
    members = [
        Member("t", "T", "t", (0,), ()),
        *(Member(f"r{k}", "P", f"n{k}", (0,), (0,)) for k in range(3)),
        Member("late", "P", "n9", (), (0,)),
    ]
    assert plan_trees(members, {0: MB}, EQUAL).parents == {"late": {0: "r0"}}


def test_holders_of_one_stream_share_its_children():
    members = [Member(f"t{k}", "T", f"t{k}", (0,), ()) for k in range(2)] + [Member(f"p{k}", f"P{k}", "n", (), (0,)) for k in range(2)]
    assert sorted(parent for parent, _, _ in edges_of(plan_trees(members, {0: 10 * GB}, EQUAL))) == ["t0", "t1"]


# ── the cost model ──


def test_predicted_times_are_those_of_the_documented_formulae():
    n, nbytes, rate, latency, chunk = 5, 40 * MB, EQUAL.inside.bytes_per_s, EQUAL.inside.latency_s, MB
    names = [f"r{k}" for k in range(n)]
    members = [Member("t", "P", "t", (0,), ()), *(Member(name, "P", name, (), (0,)) for name in names)]
    chain = TreePlan({name: {0: "t" if k == 0 else names[k - 1]} for k, name in enumerate(names)})
    assert predicted_s(chain, members, {0: nbytes}, EQUAL) == pytest.approx(n * (latency + chunk / rate) + (nbytes - chunk) / rate)
    star = TreePlan({name: {0: "t"} for name in names})
    assert predicted_s(star, members, {0: nbytes}, EQUAL) == pytest.approx(latency + n * nbytes / rate)
    assert predicted_s(TreePlan({}), members, {0: nbytes}, EQUAL) == 0.0


def test_a_thin_link_on_the_way_slows_what_is_behind_it_but_once():
    members = [Member("t", "T", "t", (0,), ()), Member("a", "P", "a", (), (0,)), Member("b", "P", "b", (), (0,))]
    plan = plan_trees(members, {0: 100 * MB}, THIN)
    across = THIN.between.latency_s + 100 * MB / THIN.between.bytes_per_s
    assert predicted_s(plan, members, {0: 100 * MB}, THIN) == pytest.approx(across + THIN.inside.latency_s + MB / THIN.inside.bytes_per_s)


# ── refusals ──


def test_a_wanted_stream_that_nobody_holds_is_an_error():
    with pytest.raises(LayoutError, match="nobody holds"):
        plan_trees([Member("a", "P", "n", (), (0,))], {0: 1}, EQUAL)


@pytest.mark.parametrize(
    ("members", "stream_bytes", "cost"),
    [
        ([Member("a", "P", "n", (0,), ()), Member("a", "P", "m", (), (0,))], {0: 1}, EQUAL),
        ([Member("a", "P", "n", (0,), (1,))], {0: 1}, EQUAL),
        ([], {0: -1}, EQUAL),
        ([], {0: 1}, CostModel(EQUAL.inside, EQUAL.between, 0)),
        ([], {0: 1}, CostModel(LinkCost(0.0, 0.0), EQUAL.between, 1)),
        ([], {0: 1}, CostModel(EQUAL.inside, LinkCost(-1.0, 1.0), 1)),
    ],
)
def test_worlds_that_make_no_sense_are_refused(members, stream_bytes, cost):
    with pytest.raises(LayoutError):
        plan_trees(members, stream_bytes, cost)


@pytest.mark.parametrize("parents", [{"x": {0: "t"}}, {"a": {0: "x"}}, {"a": {7: "t"}}, {"a": {0: "b"}, "b": {0: "a"}}, {"a": {0: "b"}}])
def test_predicting_a_plan_of_others_or_one_without_a_root_is_refused(parents):
    members = [Member("t", "P", "t", (0,), ()), Member("a", "P", "a", (), (0,)), Member("b", "P", "b", (), (0,))]
    with pytest.raises(LayoutError):
        predicted_s(TreePlan(parents), members, {0: MB}, EQUAL)


def test_nothing_to_do_is_an_empty_plan():
    assert plan_trees([], {}, EQUAL) == TreePlan({}) and plan_trees([Member("a", "P", "n", (0,), (0,))], {0: 5}, EQUAL).parents == {}


def test_sixty_four_relays_and_streams_are_planned_in_a_blink():
    relays = [Member(f"r{k:02}", f"P{k % 3}", f"n{k}", (), tuple(range(64))) for k in range(64)]
    sources = [Member(f"t{s:02}", "T", f"t{s}", (s,), ()) for s in range(64)]
    took = []
    for _ in range(3):
        start = time.process_time()
        plan = plan_trees([*sources, *relays], dict.fromkeys(range(64), 10 * MB), THIN)
        took.append(time.process_time() - start)
    assert len(edges_of(plan)) == 64 * 64
    assert min(took) < 0.1
