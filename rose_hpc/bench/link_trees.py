"""Who passes which rank's stream on to whom, for the baselines: the engine's own trees, or none. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rose_hpc.weights.relay_spec import TREE_COST
from rose_hpc.weights.tree import Member, plan_trees

RANKS = 4  # trainer ranks, a stream each
SOURCE = -1  # parent of a receiver that is fed by the rank itself

Parents = Sequence[Sequence[int]]  # [stream][receiver] → receiver or SOURCE


def straight(receivers: int) -> Parents:
    """Every receiver fed by the ranks."""
    return [[SOURCE] * receivers for _ in range(RANKS)]


def tree(receivers: int, stream_bytes: Mapping[int, int]) -> Parents:
    """The engine's own trees for these sizes, ranks 0 … 3 holding streams 0 … 3."""
    streams = tuple(range(RANKS))
    names = [f"relay-{i + 1}" for i in range(receivers)]
    members = [Member("relay-0", "near", "near", streams, ())]
    members += [Member(name, "far", name, (), streams) for name in names]
    parents = plan_trees(members, stream_bytes, TREE_COST).parents
    place = {name: i for i, name in enumerate(names)} | {"relay-0": SOURCE}
    return [[place[parents[name][stream]] for name in names] for stream in streams]
