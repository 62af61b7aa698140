"""How likely a turn is to be lost on an executor: preempted, aborted or gone with it. Pure.

    lost_per_s = (prior losses + losses) / (prior exposure + exposure)        exposure: seconds that turns spent in flight there

Counted in turns, not in departures: an executor that leaves with eight turns has lost eight, one that leaves idle has cost nothing.
The record outlives the executor's departure, for what comes back under the same id is most likely the same device.
"""

from __future__ import annotations

import math

from rose_hpc.rollout.scheduling.events import Kind

PRIOR: dict[Kind, tuple[float, float]] = {  # losses, and the turn-seconds in which they happened
    "dedicated": (0.01, 1000.0),  # once a day: hardware faults
    "opportunistic": (0.25, 150.0),  # every ten minutes: the operator's, or serving's, need
}
MEMORY_S = 20_000.0  # turn-seconds after which a loss has faded by e: twenty minutes of a device with 16 turns in flight


class LossRate:
    """One executor's."""

    __slots__ = ("_exposure_s", "_losses", "_prior_exposure_s", "_prior_losses", "per_s")

    def __init__(self, kind: Kind) -> None:
        self._prior_losses, self._prior_exposure_s = PRIOR[kind]
        self._losses = self._exposure_s = 0.0
        self.per_s = self._prior_losses / self._prior_exposure_s

    def spent(self, seconds: float, lost: bool) -> None:
        """An attempt ended after so long in flight."""
        keep = 1.0 - min(seconds / MEMORY_S, 1.0)
        self._losses = self._losses * keep + lost
        self._exposure_s = self._exposure_s * keep + max(seconds, 0.0)
        self.per_s = (self._prior_losses + self._losses) / (self._prior_exposure_s + self._exposure_s)

    def within(self, seconds: float) -> float:
        """Probability that a turn in flight for so long is lost."""
        return -math.expm1(-self.per_s * seconds)
