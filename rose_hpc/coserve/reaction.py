"""How fast a gate closes: per closing, the time until the device was free, and the rollout steps that began although they should not.

    serving gets busy ──▶ the gate's first look at that: refused (a closing) ──▶ the last step in flight ends: reaction time
                    │ LATE_S │
                    └────────┴─ a step that starts from here on is late: it was admitted on an older board

Where that first look still admits a step, as it fits into the slack, there is nothing to close. A closing that finds the device
free has no reaction to measure, and does not count.

Pure: times are arguments, seconds of one monotonic clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

LATE_S = 0.002  # between the board's showing a request and the first step start that counts as late
LATE_STEPS = 3  # a closing with more of them counts as one with so many
EDGES_S = tuple(0.0005 * 2 ** (k / 2) for k in range(24))  # of the histogram of reaction times: 0.5 ms to 1.4 s
REMEMBERED_STEPS = 8  # more than are ever in flight


class Reactions:
    """Histograms over the closings. late_steps[n]: with n late steps; times[k]: with a reaction of at most EDGES_S[k], last: longer."""

    def __init__(self) -> None:
        self.late_steps = [0] * (LATE_STEPS + 1)
        self.times = [0] * (len(EDGES_S) + 1)
        self.sum_s = self.max_s = 0.0
        self._starts: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._in_flight = 0
        self._last_end_s = float("-inf")
        self._seen_s: float | None = None  # the busy period that was looked at last
        self._open_s: float | None = None  # the one whose last step still runs

    @property
    def closings(self) -> int:
        """Closings counted so far."""
        return sum(self.late_steps)

    def started(self, now_s: float) -> None:
        """A step starts."""
        self._starts.append(now_s)
        self._in_flight += 1

    def finished(self, now_s: float) -> None:
        """The oldest step in flight is over."""
        self._in_flight -= 1
        self._last_end_s = now_s
        self._measure()

    def looked(self, since_s: float, admitted: bool) -> None:
        """The board shows a busy period that began at since_s, and a step was admitted beside it or not."""
        if since_s == self._seen_s:
            return
        self._seen_s = since_s
        if not admitted and (self._in_flight or self._last_end_s > since_s):
            late = sum(start_s > since_s + LATE_S for start_s in self._starts)
            self.late_steps[min(late, LATE_STEPS)] += 1
            self._open_s = since_s
            self._measure()

    def _measure(self) -> None:
        if self._in_flight or self._open_s is None:
            return
        reaction_s, self._open_s = self._last_end_s - self._open_s, None
        self.times[bisect_left(EDGES_S, reaction_s)] += 1
        self.sum_s += reaction_s
        self.max_s = max(self.max_s, reaction_s)


def quantile(counts: Sequence[int], fraction: float) -> int:
    """Index of the bucket that holds this fraction's quantile: the first up to which at least so much lies; 0 of no counts."""
    needed, seen = fraction * sum(counts), 0
    for index, count in enumerate(counts):
        seen += count
        if seen >= needed:
            return index
    return len(counts) - 1
