"""Tree planner: who pulls which stream from whom. Pure and deterministic; no clock, no network.

A member of a partition is a relay. A stream enters a partition once, at its ENTRY relay (or is there already, at a holder),
and fans out inside along a pipelined tree: a relay passes a chunk on while it receives the next.

Invariants (asserted by the tests)
- Every wanted stream of every member that does not hold it has exactly one parent; following parents ends at a holder.
- Each stream crosses into a partition at most once, and not at all where a holder is inside.
- Entry relays of different streams are spread over the partition's nodes, by bytes, so that every network card works.
- The fan-out inside a partition (1 = chain, 2, 4, 8 = k-ary, ALL = flat star) is the one of FANOUTS with the least predicted time,
  the flattest of equals; so is the fan-out over the partitions, which is settled first.
- The plan depends on the members, not on their order.

Cost. Links are full duplex, each relay has one inside its partition and one towards the others. `rate` and `latency` are of the
link's kind, chunk = min(chunk_bytes, the stream's bytes), k = children of the relay in this stream, out(u) and in(v) = bytes of ALL
streams that u sends and v receives over this kind of link. For the edge u → v of stream s, with 0 at a holder:

    fill(v)   = fill(u) + latency + k · chunk / rate                                       the first chunk has arrived
    steady(v) = max(steady(u), (out(u) − k · chunk) / rate, (in(v) − chunk) / rate)        the rest, at the pace of the slowest link so far
    done(v)   = fill(v) + steady(v)

    one stream of B bytes to n relays:   chain   n · (latency + chunk/rate) + (B − chunk)/rate
                                         k-ary   ≈ log_k n · (latency + k · chunk/rate) + k · (B − chunk)/rate
                                         star    latency + n · B/rate

(Links cost latency + bytes/rate: Hockney, Parallel Computing 20, 1994; a relay's out-degree divides its bandwidth.)
The plan is not the best of all trees, only of these shapes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from rose_hpc.errors import LayoutError

ALL = 1 << 30  # fan-out of a flat star
FANOUTS = (ALL, 8, 4, 2, 1)  # flattest first: of equals it has the fewest relays that others depend on


@dataclass(frozen=True)
class Member:
    """One relay. holds, wants: stream ids; a stream that is both is simply held."""

    name: str
    partition: str
    node: str
    holds: tuple[int, ...]
    wants: tuple[int, ...]


@dataclass(frozen=True)
class LinkCost:
    """One direction of a relay's link. latency_s: from pull to first byte; bytes_per_s: what it carries in all."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class CostModel:
    """inside: links within a partition; between: from partition to partition; chunk_bytes: what a relay receives before it passes it on."""

    inside: LinkCost
    between: LinkCost
    chunk_bytes: int


@dataclass(frozen=True)
class TreePlan:
    """parents: child's name → stream id → parent's name. A member that needs nothing is not in it."""

    parents: Mapping[str, Mapping[int, str]]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the sorted (child, stream, parent), hexadecimal."""
        rows = sorted((child, stream, parent) for child, of in self.parents.items() for stream, parent in of.items())
        return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def plan_trees(members: Sequence[Member], stream_bytes: Mapping[int, int], cost: CostModel) -> TreePlan:
    """The tree of every stream.

    stream_bytes: expected bytes on the wire of each stream. Raises LayoutError: nobody holds a wanted stream, a stream of unknown
    size, a name given twice, or a cost that is not positive.
    """
    return _plan(tuple(members), tuple(sorted(stream_bytes.items())), cost)


def rounded(nbytes: int) -> int:
    """Up to two significant bits. Versions of about the same size then get the same trees: nobody plans or connects anew."""
    step = 1 << max(nbytes.bit_length() - 2, 0)
    return -(-nbytes // step) * step


@lru_cache(maxsize=16)
def _plan(members: tuple[Member, ...], stream_bytes: tuple[tuple[int, int], ...], cost: CostModel) -> TreePlan:
    world = _World(members, dict(stream_bytes), cost)
    entries = world.entries()
    at_entries = [_between(world, entries, fanout) for fanout in FANOUTS]
    clock, edges = min(((_Clock.start(world).after(e), e) for e in at_entries), key=lambda option: option[0].last_s)
    for partition in world.partitions:
        options = [_inside(world, partition, entries, fanout) for fanout in FANOUTS]
        edges = edges + min(options, key=lambda option: clock.after(option).last_s)
    return TreePlan(world.named(edges))


def predicted_s(plan: TreePlan, members: Sequence[Member], stream_bytes: Mapping[int, int], cost: CostModel) -> float:
    """Seconds until the last member has all it wants, by the cost model above; 0 where there is nothing to do.

    Raises LayoutError when the plan names a member or a stream that does not exist, or its parents never reach a holder.
    """
    world = _World(members, stream_bytes, cost)
    edges = [world.edge(child, stream, parent) for child, of in sorted(plan.parents.items()) for stream, parent in sorted(of.items())]
    return _Clock.start(world).after(edges).last_s


Edge = tuple[int, int, int]  # parent, child (places of members), place of the stream


class _World:
    """The members in the order of their names, streams in the order of their ids; everything else is by place."""

    def __init__(self, members: Sequence[Member], stream_bytes: Mapping[int, int], cost: CostModel) -> None:
        self.members = sorted(members, key=lambda m: m.name)
        self.ids, self.cost = sorted(stream_bytes), cost
        self._check(stream_bytes)
        self.place = {m.name: k for k, m in enumerate(self.members)}
        self.stream_place = {stream: k for k, stream in enumerate(self.ids)}
        self.bytes = np.array([stream_bytes[s] for s in self.ids], np.int64)
        self.partitions = sorted({m.partition for m in self.members})
        self.holders: list[list[int]] = [[] for _ in self.ids]
        self.wanting: list[dict[str, list[int]]] = [{} for _ in self.ids]  # stream → partition → members that lack it
        for k, member in enumerate(self.members):
            held = set(member.holds)
            for stream in sorted(held & self.stream_place.keys()):
                self.holders[self.stream_place[stream]].append(k)
            for stream in sorted(set(member.wants) - held):
                self.wanting[self.stream_place[stream]].setdefault(member.partition, []).append(k)
        self._check_held()

    def _check(self, stream_bytes: Mapping[int, int]) -> None:
        if len({m.name for m in self.members}) != len(self.members):
            raise LayoutError("two relays have one name", got=[m.name for m in self.members][:8])
        if unknown := sorted({s for m in self.members for s in m.wants} - stream_bytes.keys()):
            raise LayoutError("streams of unknown size are wanted", got=unknown[:8], expected=f"some of {self.ids[:8]}")
        links = (self.cost.inside, self.cost.between)
        if self.cost.chunk_bytes <= 0 or any(link.latency_s < 0 or link.bytes_per_s <= 0 for link in links):
            raise LayoutError("a cost model needs positive rates and chunks", got=self.cost)
        if any(n < 0 for n in stream_bytes.values()):
            raise LayoutError("a stream has a negative size", got=min(stream_bytes.values()), expected="bytes on the wire")

    def _check_held(self) -> None:
        orphans = [self.ids[s] for s in range(len(self.ids)) if self.wanting[s] and not self.holders[s]]
        if orphans:
            raise LayoutError("nobody holds a wanted stream", got=orphans[:8], remedy="publish a keyframe")

    def roots(self, stream: int, partition: str) -> list[int]:
        """Holders of the stream inside the partition."""
        return [k for k in self.holders[stream] if self.members[k].partition == partition]

    def entries(self) -> dict[tuple[int, str], int]:
        """(stream, partition) → the member where it enters: largest streams first, each to the node, then member, with the least so far."""
        load: dict[object, int] = {}
        entries = {}
        for stream in sorted(range(len(self.ids)), key=lambda s: (-int(self.bytes[s]), s)):
            for partition, lacking in self.wanting[stream].items():
                if not self.roots(stream, partition):
                    keys = {k: (partition, self.members[k].node) for k in lacking}
                    chosen = min(lacking, key=lambda k: (load.get(keys[k], 0), load.get(k, 0), k))
                    entries[stream, partition] = chosen
                    for key in (chosen, keys[chosen]):
                        load[key] = load.get(key, 0) + max(1, int(self.bytes[stream]))
        return entries

    def edge(self, child: str, stream: int, parent: str) -> Edge:
        try:
            return self.place[parent], self.place[child], self.stream_place[stream]
        except KeyError as error:
            raise LayoutError("the plan speaks of others", got=f"{error.args[0]!r}", expected="the members and streams given") from error

    def named(self, edges: Iterable[Edge]) -> dict[str, dict[int, str]]:
        parents: dict[str, dict[int, str]] = {}
        for parent, child, stream in sorted(edges, key=lambda e: (e[1], e[2])):
            parents.setdefault(self.members[child].name, {})[self.ids[stream]] = self.members[parent].name
        return parents


def _between(world: _World, entries: Mapping[tuple[int, str], int], fanout: int) -> list[Edge]:
    """From holders over the partitions that have none: each stream starts at the holder with the least to send so far."""
    sending = dict.fromkeys(range(len(world.members)), 0)
    edges: list[Edge] = []
    for stream in range(len(world.ids)):
        lacking = [entries[stream, p] for p in sorted(world.wanting[stream]) if (stream, p) in entries]
        roots = sorted(world.holders[stream], key=lambda k: (sending[k], k))[: len(lacking)]
        tree = _tree(roots, _rotated(lacking, stream), fanout)
        edges += [(parent, child, stream) for parent, child in tree]
        for parent, _ in tree:
            sending[parent] += int(world.bytes[stream])
    return edges


def _inside(world: _World, partition: str, entries: Mapping[tuple[int, str], int], fanout: int) -> list[Edge]:
    """From the entry (or the holders) of each stream over the partition's other members."""
    edges: list[Edge] = []
    for stream in range(len(world.ids)):
        lacking = world.wanting[stream].get(partition, [])
        if not lacking:
            continue
        entry = entries.get((stream, partition))
        roots = _rotated(world.roots(stream, partition), stream) if entry is None else [entry]
        start = stream if entry is None else lacking.index(entry)
        others = [k for k in _rotated(lacking, start) if k != entry]
        edges += [(parent, child, stream) for parent, child in _tree(roots, others, fanout)]
    return edges


def _rotated(items: Sequence[int], by: int) -> list[int]:
    """Begin elsewhere for each stream, so that the relays with children are others."""
    at = by % len(items) if items else 0
    return [*items[at:], *items[:at]]


def _tree(roots: Sequence[int], others: Sequence[int], fanout: int) -> list[tuple[int, int]]:
    """(parent, child): `others` hung below the roots level by level, at most `fanout` each; a star shares them out evenly."""
    line = [*roots, *others]
    if fanout == ALL:
        return [(roots[k % len(roots)], child) for k, child in enumerate(others)]
    return [(line[k // fanout], child) for k, child in enumerate(others)]


class _Clock:
    """fill, steady: seconds [members, streams], NaN-free; known: which are settled; last_s: when all that is known is done."""

    def __init__(self, world: _World, fill: NDArray[np.float64], steady: NDArray[np.float64], known: NDArray[np.bool_]) -> None:
        self._world, self._fill, self._steady, self._known = world, fill, steady, known
        self.last_s = float((fill + steady)[known].max(initial=0.0))

    @classmethod
    def start(cls, world: _World) -> _Clock:
        """Holders have their streams at 0."""
        shape = (len(world.members), len(world.ids))
        known = np.zeros(shape, bool)
        for stream, holders in enumerate(world.holders):
            known[holders, stream] = True
        return cls(world, np.zeros(shape), np.zeros(shape), known)

    def after(self, edges: Sequence[Edge]) -> _Clock:
        """With these edges as well. All edges of one link (of a relay, of one kind) must be given together: they share it."""
        if not edges:
            return self
        parent, child, stream = np.array(edges, np.int64).T
        wait, pace = self._costs(parent, child, stream)
        fill, steady, known = self._fill.copy(), self._steady.copy(), self._known.copy()
        left = np.arange(len(edges))
        while left.size:
            ready = left[known[parent[left], stream[left]]]
            if not ready.size:
                raise LayoutError("the plan's parents never reach a holder", got=f"{left.size} pulls without one")
            at, source = (child[ready], stream[ready]), (parent[ready], stream[ready])
            fill[at] = fill[source] + wait[ready]
            steady[at] = np.maximum(steady[source], pace[ready])
            left = left[~known[parent[left], stream[left]]]
            known[at] = True
        return _Clock(self._world, fill, steady, known)

    def _costs(
        self, parent: NDArray[np.int64], child: NDArray[np.int64], stream: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Per edge: seconds until its first chunk is through, and for the rest. Sums are of integers: equal on every machine."""
        world, count = self._world, len(self._world.members)
        _, partition = np.unique([m.partition for m in world.members], return_inverse=True)
        across = (partition[parent] != partition[child]).astype(np.int64)
        latency = np.array([world.cost.inside.latency_s, world.cost.between.latency_s])[across]
        rate = np.array([world.cost.inside.bytes_per_s, world.cost.between.bytes_per_s])[across]
        load, chunk = world.bytes[stream], np.minimum(world.bytes[stream], world.cost.chunk_bytes)
        out, into, children = np.zeros((2, count), np.int64), np.zeros((2, count), np.int64), np.zeros((2, count, len(world.ids)), np.int64)
        np.add.at(out, (across, parent), load)
        np.add.at(into, (across, child), load)
        np.add.at(children, (across, parent, stream), 1)
        first = children[across, parent, stream] * chunk
        return latency + first / rate, np.maximum(out[across, parent] - first, into[across, child] - chunk) / rate
