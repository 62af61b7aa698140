"""How long a rollout step of one kind takes: learnt from wall time, and forgotten while nothing can be learnt.

    no step yet ──▶ 0 s ──first step──▶ its time ──step──▶ weighted mean, a step counting as at most OUTLIER times the mean
                                          │
                                        held ──▶ halves every half-life, so that the gate probes it again
                                                 probe as short as predicted: the halved value stays, half-life as at first
                                                 probe longer: the mean from before the hold, half-life doubled

A step's wall time contains what the kernel took from it for serving, so that one step can look a hundred times as long as it is.
A gate that believed it for good would never run the step that corrects it.

Invariants (asserted by the tests)
- One slow step among others moves the prediction by at most 1 + WEIGHT × (OUTLIER − 1).
- Held for long enough, any prediction fits any slack. Steps that are slow indeed are probed ever more rarely, until the half-life
  has grown to LONGEST_HALF_LIFE_S.

Pure: it knows no clock.
"""

from __future__ import annotations

WEIGHT = 0.2  # of the newest step in the mean
OUTLIER = 4.0  # a lasting change is followed all the same: 1.6-fold a step
PROBE = 0.9  # a step let through on less of the mean than this is a probe: nearer to 1 it is ordinary jitter
LEAST_S = 0.001  # a mean below this is clock noise, and caps nothing
HALF_LIFE_S = 5.0  # a step of 1 s is tried in a slack of 0.1 s after 20 s
LONGEST_HALF_LIFE_S = 320.0


class StepEstimate:
    """One kind of step."""

    def __init__(self) -> None:
        self._mean_s: float | None = None
        self._left = 1.0  # of the mean, after the time held since the last step
        self._half_life_s = HALF_LIFE_S

    @property
    def step_s(self) -> float:
        """Predicted seconds."""
        return 0.0 if self._mean_s is None else self._mean_s * self._left

    def held(self, for_s: float) -> None:
        """The prediction has kept a step from running for so long."""
        self._left *= 0.5 ** (for_s / self._half_life_s)

    def ran(self, took_s: float) -> None:
        """A step has run."""
        if self._mean_s is None:
            self._mean_s = took_s
        else:
            mean_s = self._after_probe(self._mean_s, took_s) if self._left < PROBE else self._mean_s
            self._mean_s = mean_s + WEIGHT * (min(took_s, OUTLIER * max(mean_s, LEAST_S)) - mean_s)
        self._left = 1.0

    def _after_probe(self, mean_s: float, took_s: float) -> float:
        """The mean to go on from."""
        if took_s <= mean_s * self._left:
            self._half_life_s = HALF_LIFE_S
            return mean_s * self._left
        self._half_life_s = min(2 * self._half_life_s, LONGEST_HALF_LIFE_S)
        return mean_s
