"""How much a trajectory still has to do, from its turns and tokens so far and from how others went on. Pure.

    remaining tokens = tokens of its next turn × turns to come
                       its own mean, leaning on   Σ of the survival of trajectories that had as many turns
                       the mean of all

Survival is empirical: of those that had k turns, how many went on. It is right while a batch runs, where the means of the
ended would be too short: the long ones have not ended. Where nobody has been yet, the prior is the rule of thumb for heavy tails: what has
lasted long will last about as long again (a Pareto tail: of those with k turns, TAIL_INDEX / (k + PRIOR_TURNS_OFFSET) end).
The same holds for the tokens of a turn in flight, in buckets of quarters of a power of two.
"""

from __future__ import annotations

import math
from itertools import accumulate

PRIOR_TURN_TOKENS = 128.0
PRIOR_TURN_TOKENS_TURNS = 0.5
OWN_PRIOR_TURNS = 1.0  # a trajectory's own mean of tokens per turn leans on the mean of all as on so many turns
TAIL_INDEX = 2.0
PRIOR_TURNS_OFFSET = 3.0
PRIOR_TRAJECTORIES = 2.0  # with k turns, for each k
MAX_TURNS = 64  # beyond, k counts as this many
MEMORY_FRAC = 0.5  # what the counts keep when they are halved
HALVE_AT = 8192  # outcomes: the policy learns, and its trajectories change
SURVEY_EVERY = 64  # outcomes between two computations of the table, once there are so many; before, at 1, 2, 4, …
PER_OCTAVE = 4
BUCKETS = 24 * PER_OCTAVE  # of a turn's tokens: [2^(b/4), 2^((b+1)/4))
PRIOR_LONGER_TURNS = 1.0  # as if so many turns had been twice as long as the one in flight
PRIOR_TAIL_MEANS = 4.0


class Tail:
    """Of one run's trajectories."""

    def __init__(self) -> None:
        self._went_on, self._ended = [0.0] * (MAX_TURNS + 1), [0.0] * (MAX_TURNS + 1)
        self._outcomes, self._survey_at = 0, 1
        self._turns, self._tokens = PRIOR_TURN_TOKENS_TURNS, PRIOR_TURN_TOKENS * PRIOR_TURN_TOKENS_TURNS
        self._bucket_turns, self._bucket_tokens = [0.0] * BUCKETS, [0.0] * BUCKETS
        self._longer: tuple[list[float], list[float]] | None = None  # [b]: turns and tokens in bucket b and above; None: to be summed
        self.turn_tokens = PRIOR_TURN_TOKENS  # mean of all
        self.turns_to_come: list[float] = []  # [k]: of a trajectory with k turns that goes on, its next one included
        self._survey()

    def next_turn_tokens(self, turns: int, sampled_tokens: int) -> float:
        """Tokens expected of the next turn of a trajectory with so many turns and tokens."""
        return (OWN_PRIOR_TURNS * self.turn_tokens + sampled_tokens) / (OWN_PRIOR_TURNS + turns)

    def remaining_tokens(self, turns: int, sampled_tokens: int) -> float:
        """Tokens expected of all turns to come of a trajectory that goes on."""
        return self.next_turn_tokens(turns, sampled_tokens) * self.turns_to_come[turns if turns < MAX_TURNS else MAX_TURNS]

    def rest_of_turn(self, done_tokens: float, expected_tokens: float) -> float:
        """Tokens expected of a turn in flight that has so many, and of which so many were expected at its start."""
        turns, tokens = self._longer_than(done_tokens)
        mean = (PRIOR_LONGER_TURNS * 2.0 * max(done_tokens, 1.0) + tokens) / (PRIOR_LONGER_TURNS + turns)
        return max(mean - done_tokens, expected_tokens - done_tokens, 1.0)

    def longer_frac(self, tokens: float, in_flight: int) -> float:
        """Fraction of all turns that have more tokens than so many, in whole buckets.

        in_flight: turns that have not ended. Each counts as longer, up to PRIOR_TAIL_MEANS mean lengths, and then as of a Pareto tail:
        those that have ended are the short ones, above all when a step has just begun.
        """
        unknown, scale = PRIOR_LONGER_TURNS + in_flight, PRIOR_TAIL_MEANS * self.turn_tokens
        longer = unknown * (1.0 if tokens <= scale else (scale / tokens) ** TAIL_INDEX)
        return (longer + self._longer_than(tokens)[0]) / (unknown + self._longer_than(0.0)[0])

    def _longer_than(self, tokens: float) -> tuple[float, float]:
        """How many turns were in higher buckets than this length, and their tokens together."""
        if self._longer is None:
            self._longer = _sums_from(self._bucket_turns), _sums_from(self._bucket_tokens)
        first = min(_bucket(tokens) + 1, BUCKETS)
        return self._longer[0][first], self._longer[1][first]

    def turn_ended(self, sampled_tokens: int) -> None:
        """A turn was sampled. Ignored where its length is not known (0)."""
        if sampled_tokens <= 0:
            return
        self._turns += 1.0
        self._tokens += sampled_tokens
        self.turn_tokens = self._tokens / self._turns
        bucket = _bucket(sampled_tokens)
        self._bucket_turns[bucket] += 1.0
        self._bucket_tokens[bucket] += sampled_tokens
        self._longer = None

    def went_on(self, turns: int) -> None:
        """A trajectory with so many turns has another one."""
        self._went_on[min(turns, MAX_TURNS)] += 1.0
        self._outcome()

    def ended(self, turns: int) -> None:
        """A trajectory ended after so many turns."""
        self._ended[min(turns, MAX_TURNS)] += 1.0
        self._outcome()

    def _outcome(self) -> None:
        self._outcomes += 1
        if self._outcomes >= self._survey_at:
            self._survey_at = self._outcomes + min(self._outcomes, SURVEY_EVERY)
            self._survey()
        if self._outcomes >= HALVE_AT:
            self._halve()

    def _survey(self) -> None:
        """turns_to_come[k] = 1 + P(goes on after k + 1) × turns_to_come[k + 1], from the end."""
        to_come = MAX_TURNS / (TAIL_INDEX - 1.0)
        table = [to_come]
        for k in range(MAX_TURNS, 0, -1):
            on, ended = self._went_on[k], self._ended[k]
            prior_end = PRIOR_TRAJECTORIES * TAIL_INDEX / (k + PRIOR_TURNS_OFFSET)
            to_come = 1.0 + (1.0 - (prior_end + ended) / (PRIOR_TRAJECTORIES + on + ended)) * to_come
            table.append(to_come)
        table.reverse()
        self.turns_to_come = table

    def _halve(self) -> None:
        for counts in (self._went_on, self._ended, self._bucket_turns, self._bucket_tokens):
            counts[:] = [count * MEMORY_FRAC for count in counts]
        self._longer = None
        self._turns *= MEMORY_FRAC
        self._tokens *= MEMORY_FRAC
        self._outcomes = self._survey_at = int(HALVE_AT * MEMORY_FRAC)


def _bucket(tokens: float) -> int:
    """Of a turn of so many tokens; −1: below the first."""
    return min(int(PER_OCTAVE * math.log2(tokens)), BUCKETS - 1) if tokens >= 1.0 else -1


def _sums_from(counts: list[float]) -> list[float]:
    """[b]: of counts[b:]; one more than there are counts."""
    return [0.0, *accumulate(reversed(counts))][::-1]
