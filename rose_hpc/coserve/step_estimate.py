"""How long a rollout step takes: a line over its prompt tokens and decoding requests, learnt from wall time, doubted while it holds.

    no step yet ──▶ 0 s, or the profile's ──first step──▶ the line through it ──step──▶ the fit of slack.py, where a step counts
                                          │                                            as at most OUTLIER times its prediction
                                        held ──▶ halves every half-life, so that the gate probes it again
                                                 probe as short as predicted: the halved line stays, half-life as at first
                                                 probe longer: the line from before the hold, half-life doubled

A step's wall time contains what the kernel took from it for serving, so that one step can look a hundred times as long as it is.
A gate that believed it for good would never run the step that corrects it. The cost of decoding and that of a prompt token are
doubted apart: prompts may be kept waiting while decoding goes on.

Invariants (asserted by the tests)
- One slow step among others like it moves their prediction by at most 1 + WEIGHT × (OUTLIER − 1).
- Held for long enough, any prediction fits any slack. Steps that are slow indeed are probed ever more rarely, until the half-life
  has grown to LONGEST_HALF_LIFE_S.

Pure: it knows no clock.
"""

from __future__ import annotations

from rose_hpc.coserve.slack import StepTimes, StepTimesFit

WEIGHT = 0.2  # of the newest step in the fit
OUTLIER = 4.0  # a lasting change is followed all the same: 1.6-fold a step
PROBE = 0.9  # a step let through on less of its prediction than this is a probe: nearer to 1 it is ordinary jitter
LEAST_S = 0.001  # a prediction below this is clock noise, and caps nothing
HALF_LIFE_S = 5.0  # a step of 1 s is tried in a slack of 0.1 s after 20 s
LONGEST_HALF_LIFE_S = 320.0


class StepEstimate:
    """One engine's steps. profile: measured beforehand; the first steps of each kind take its place."""

    def __init__(self, profile: StepTimes | None = None) -> None:
        self._fit = StepTimesFit(StepTimes(0.0, 0.0, 0.0) if profile is None else profile, WEIGHT)
        self._decode, self._prefill = Doubt(), Doubt()
        self._is_profiled = profile is not None

    @property
    def knows_prefill(self) -> bool:
        """Whether the cost of a prompt token is known at all."""
        return self._is_profiled or self._fit.knows_prefill

    @property
    def times(self) -> StepTimes:
        """The line as it is believed now."""
        times, decode = self._fit.times, self._decode.left
        return StepTimes(times.prefill_token_s * self._prefill.left, times.decode_base_s * decode, times.decode_request_s * decode)

    def held(self, for_s: float, prompts_only: bool) -> None:
        """The prediction has kept a step from running for so long; prompts_only: only its prompts, while decoding went on."""
        self._prefill.held(for_s)
        if not prompts_only:
            self._decode.held(for_s)

    def ran(self, prompt_tokens: int, batch: int, took_s: float) -> None:
        """A step with so many prompt tokens and decoding requests has run."""
        believed_s, doubts = self.times.step_s(prompt_tokens, batch), (self._decode, self._prefill)[: 2 if prompt_tokens else 1]
        if believed_s < PROBE * self._fit.times.step_s(prompt_tokens, batch):
            self._settle(doubts, took_s <= believed_s)
        predicted_s = self._fit.times.step_s(prompt_tokens, batch)
        if self._fit.knows_prefill if prompt_tokens else self._fit.knows_decode:
            took_s = min(took_s, OUTLIER * max(predicted_s, LEAST_S))
        self._fit.observe(prompt_tokens, batch, took_s)
        for doubt in doubts:
            doubt.left = 1.0

    def _settle(self, doubts: tuple[Doubt, ...], was_right: bool) -> None:
        """A probe has shown whether the doubts were right."""
        if was_right:
            self._fit.scale(self._decode.left, self._prefill.left if self._prefill in doubts else 1.0)
        for doubt in doubts:
            doubt.settle(was_right)


class Doubt:
    """How much of a prediction is still believed, after the time for which it has held steps back since the last one."""

    def __init__(self) -> None:
        self.left = 1.0
        self._half_life_s = HALF_LIFE_S

    def held(self, for_s: float) -> None:
        """The prediction has held for so long."""
        self.left *= 0.5 ** (for_s / self._half_life_s)

    def settle(self, was_right: bool) -> None:
        """A step took no longer than what was left of its prediction, or it did. A doubt that had not grown learns nothing."""
        if self.left < PROBE:
            self._half_life_s = HALF_LIFE_S if was_right else min(2 * self._half_life_s, LONGEST_HALF_LIFE_S)
