"""When may a rollout step run beside a serving engine? The paper's two slacks (PAPER.md, "SLO-safe co-serving executor").

    prefill slack of a request = arrival + B_TTFT − now − T̂_prefill(prompt tokens that remain)
    decode slack of a request  = its last token + B_TPOT − now − T̂_decode(batch)
    slack                      = the least of all of them; infinite when nobody waits for a token

and how much of a rollout step fits into it: the largest token budget whose predicted time ends before it does.

Invariants (asserted by the tests)
- Slack falls as fast as time passes, and never rises when a request is added.
- A token budget is never predicted to take longer than it may, and never gets smaller with more time.
- T̂ is finite and never negative, whatever was measured.

All times are seconds of one monotonic clock, passed in. Queueing is left out, as in the paper: each waiting request is judged
as if it were the next. This module knows no engine, board or clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

MIN_SPREAD = 0.25  # variance of the batch below which a slope cannot be told from noise
EWMA_WEIGHT = 0.05  # of the newest step: a memory of some 20 steps
LEAST_CHUNK_TOKENS = 16  # of a longer prompt: less is not worth the step's fixed cost


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request whose first token is still owed. prompt_tokens: what remains to be prefilled."""

    arrival_s: float
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class ServingState:
    """What a serving engine owes.

    waiting: not scheduled yet. prefilling: scheduled, before their first token. last_token_s: of each request past its first token.
    batch: requests that the engine's next step runs; may exceed the entries, where only the tightest were kept.
    kv_frac: how much of its KV cache is in use, 0 to 1.
    """

    waiting: tuple[WaitingRequest, ...] = ()
    prefilling: tuple[WaitingRequest, ...] = ()
    last_token_s: tuple[float, ...] = ()
    batch: int = 0
    kv_frac: float = 0.0

    @property
    def busy(self) -> bool:
        """Somebody waits for a token."""
        return bool(self.waiting or self.prefilling or self.last_token_s)


@dataclass(frozen=True, slots=True)
class Budgets:
    """B_TTFT and B_TPOT: what the serving operator promises per request."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """T̂ as a line: a step costs decode_base_s + decode_request_s per decoding request + prefill_token_s per prompt token."""

    prefill_token_s: float
    decode_base_s: float
    decode_request_s: float

    def prefill_s(self, tokens: int) -> float:
        """T̂_prefill of one prompt."""
        return self.decode_base_s + self.prefill_token_s * tokens

    def decode_s(self, batch: int) -> float:
        """T̂_decode of one step."""
        return self.decode_base_s + self.decode_request_s * batch

    def step_s(self, prompt_tokens: int, batch: int) -> float:
        """T̂ of one step with both."""
        return self.decode_s(batch) + self.prefill_token_s * prompt_tokens


def slack_s(state: ServingState, budgets: Budgets, times: StepTimes, now_s: float) -> float:
    """Seconds that the engine can lose now before some request breaks its budget; infinite when it owes nothing."""
    latest_prefill_s = min((latest_start_s(r, times) for r in chain(state.waiting, state.prefilling)), default=math.inf)
    oldest_token_s = min(state.last_token_s, default=math.inf)
    prefill = latest_prefill_s + budgets.ttft_s - now_s
    decode = oldest_token_s + budgets.tpot_s - now_s - times.decode_s(state.batch)
    return min(prefill, decode)


def latest_start_s(request: WaitingRequest, times: StepTimes) -> float:
    """Orders requests by prefill slack: the slack is this plus a term that all requests share."""
    return request.arrival_s - times.prefill_s(request.prompt_tokens)


def fitting_tokens(needs: Iterable[int], limit_s: float, times: StepTimes) -> int:
    """Largest token budget of a step that is predicted to take less than limit_s; 0: none.

    needs: tokens that each request still has to compute, in the order in which the scheduler spends the budget; 1: it decodes.
    """
    left_s, tokens = limit_s - times.decode_base_s, 0
    if left_s <= 0:
        return 0
    for need in needs:
        token_s = times.decode_request_s if need == 1 else times.prefill_token_s
        if need * token_s >= left_s:
            chunk = 0 if need == 1 else math.ceil(left_s / token_s) - 1
            return tokens + (chunk if chunk >= LEAST_CHUNK_TOKENS else 0)
        tokens += need
        left_s -= need * token_s
    return tokens


class StepTimesFit:
    """StepTimes refined online from measured steps: exponentially weighted least squares of time over batch, for decode steps.

    A step with prompt tokens tells only about prefill_token_s: what is left after its predicted decode part, as a ratio of
    weighted sums, so that long prompts count for more than short noisy ones. Until the batch has varied, all of a decode step
    is base. The first steps replace `initial` at once: a mean over what was seen, then the exponential one.
    """

    def __init__(self, initial: StepTimes, weight: float = EWMA_WEIGHT) -> None:
        self.times = initial
        self._weight = weight
        self._decode_steps = 0
        self._mean_batch = self._mean_s = self._variance = self._covariance = 0.0
        self._prefill_tokens = self._prefill_s = 0.0

    @property
    def knows_decode(self) -> bool:
        """Whether a step that only decodes has been seen."""
        return self._decode_steps > 0

    @property
    def knows_prefill(self) -> bool:
        """Whether a step with prompt tokens has been seen."""
        return self._prefill_tokens > 0

    def scale(self, decode: float, prefill: float) -> None:
        """What was measured so far was this many times as long as it should have been."""
        self._mean_s, self._covariance = self._mean_s * decode, self._covariance * decode
        self._prefill_s *= prefill
        times = self.times
        self.times = StepTimes(times.prefill_token_s * prefill, times.decode_base_s * decode, times.decode_request_s * decode)

    def observe(self, prompt_tokens: int, batch: int, step_s: float) -> None:
        """One step ran `batch` decoding requests and prompt_tokens of prefill in step_s."""
        if prompt_tokens:
            self._observe_prefill(prompt_tokens, step_s - (self.times.decode_s(batch) if self._decode_steps else 0.0))
        elif batch:
            self._observe_decode(float(batch), step_s)

    def _observe_prefill(self, tokens: int, prefill_s: float) -> None:
        keep = 1 - self._weight
        self._prefill_tokens = keep * self._prefill_tokens + tokens
        self._prefill_s = keep * self._prefill_s + max(0.0, prefill_s)
        self.times = StepTimes(self._prefill_s / self._prefill_tokens, self.times.decode_base_s, self.times.decode_request_s)

    def _observe_decode(self, batch: float, step_s: float) -> None:
        """West's update of weighted moments (Comm. ACM 22, 1979), which cannot turn a variance negative."""
        self._decode_steps += 1
        weight = max(self._weight, 1 / self._decode_steps)
        off_batch, off_s = batch - self._mean_batch, step_s - self._mean_s
        self._mean_batch += weight * off_batch
        self._mean_s += weight * off_s
        self._variance = (1 - weight) * (self._variance + weight * off_batch * off_batch)
        self._covariance = (1 - weight) * (self._covariance + weight * off_batch * off_s)
        slope = max(0.0, self._covariance / self._variance) if self._variance > MIN_SPREAD else 0.0
        slope = min(slope, self._mean_s / self._mean_batch)  # a line through the mean that stays above zero
        base = max(0.0, self._mean_s - slope * self._mean_batch)
        self.times = StepTimes(self.times.prefill_token_s, base, slope)
