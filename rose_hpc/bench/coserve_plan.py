"""What `rose-hpc bench coserve` runs, and in which order: pieces of one trace, each under every mode, shuffled.

    trace ──scaled to the wanted load──▶ segments ──each──▶ alone A, alone B and every other mode once, in random order

Invariants (asserted by the tests)
- Every mode meets every segment as often as every other; `alone` twice, once for each of its halves.
- A segment holds the requests that arrive in its span, at their times from its beginning; none is lost.
- The same seed gives the same order.

Pure: it knows no engine and no clock.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rose_hpc.traffic.trace import Request


@dataclass(frozen=True, slots=True)
class Mode:
    """serving: under its trace. rollout: which engine has work; "" for none. confined: by the quota. long_prompts: of the rollouts."""

    name: str
    serving: bool = True
    rollout: str = ""
    confined: bool = False
    long_prompts: bool = False


GATED, PLAIN = "gated", "plain"
ALONE = Mode("alone")
MODES = (
    ALONE,
    Mode("static", rollout=PLAIN),
    Mode("quota_only", rollout=PLAIN, confined=True),
    Mode("gate_only", rollout=GATED),
    Mode("gate_only_long", rollout=GATED, long_prompts=True),
    Mode("full", rollout=GATED, confined=True),
    Mode("rollout_alone", serving=False, rollout=PLAIN),
    Mode("rollout_alone_long", serving=False, rollout=PLAIN, long_prompts=True),
)
ALONE_HALVES = 2


@dataclass(frozen=True, slots=True)
class Window:
    """One mode over one segment. half: of the alone windows, 0 or 1; 0 for the others."""

    mode: Mode
    segment: int
    half: int = 0


def windows(segments: int, seed: int) -> list[Window]:
    """All windows, segment by segment, shuffled inside of each."""
    order = random.Random(seed)
    found: list[Window] = []
    for segment in range(segments):
        group = [Window(mode, segment, half) for mode in MODES for half in range(ALONE_HALVES if mode is ALONE else 1)]
        order.shuffle(group)
        found += group
    return found


def fit_load(requests: Sequence[Request], seconds: float) -> list[Request]:
    """The same requests, their arrivals stretched or compressed to fill so many seconds from the first on."""
    if len(requests) < 2 or requests[-1].arrival_s <= requests[0].arrival_s:
        return [replace(r, arrival_s=0.0) for r in requests]
    first_s, factor = requests[0].arrival_s, seconds / (requests[-1].arrival_s - requests[0].arrival_s)
    return [replace(r, arrival_s=(r.arrival_s - first_s) * factor) for r in requests]


def cut(requests: Sequence[Request], segment_s: float, segments: int) -> list[list[Request]]:
    """Requests of each span of segment_s, times from its beginning; the last one also takes those at its very end."""
    found: list[list[Request]] = [[] for _ in range(segments)]
    for request in requests:
        index = min(int(request.arrival_s / segment_s), segments - 1)
        found[index].append(replace(request, arrival_s=request.arrival_s - index * segment_s))
    return found
