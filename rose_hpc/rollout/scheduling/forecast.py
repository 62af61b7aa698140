"""What a run still has to sample and how fast its executors are, for the elasticity policy (../elasticity.py). Pure."""

from __future__ import annotations

from collections.abc import Collection

from rose_hpc.rollout.scheduling.events import KINDS, Forecast, Kind
from rose_hpc.rollout.scheduling.learned import Learned
from rose_hpc.rollout.scheduling.records import ExecutorRecord, TrajectoryRecord

PLACES = 16  # of an executor of a kind that nobody has seen: the paper's trajectories per device


def forecast(trajectories: Collection[TrajectoryRecord], executors: Collection[ExecutorRecord], learned: Learned) -> Forecast:
    """A turn in flight counts whole: on average half of it is done, and half of what follows it was not foreseen."""
    learned.refresh()
    remaining = [learned.tail.remaining_tokens(t.turns, t.sampled_tokens) for t in trajectories]
    places: dict[Kind, int] = {kind: sum(e.max_concurrency for e in executors if e.kind == kind) for kind in KINDS}
    alone: Kind = "dedicated" if places["dedicated"] else "opportunistic"
    return Forecast(
        live=len(trajectories),
        remaining_tokens=sum(remaining),
        longest_s=max(remaining, default=0.0) * learned.kinds[alone].s_per_token * learned.prefill_factor,
        places=places,
        place_tokens_per_s={kind: _place_tokens_per_s(kind, executors, learned) for kind in KINDS},
    )


def _place_tokens_per_s(kind: Kind, executors: Collection[ExecutorRecord], learned: Learned) -> float:
    """Of a mean executor of this kind."""
    speed, own = learned.kinds[kind], [e.max_concurrency for e in executors if e.kind == kind]
    places = sum(own) / len(own) if own else PLACES
    return 1.0 / (speed.s_per_token * learned.prefill_factor * (1.0 + speed.shape.crowding * (places - 1.0)))
