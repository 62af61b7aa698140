"""A trajectory: one episode of the policy in an environment, as a state machine that owns its tokens. Pure.

    created ──open──▶ waiting ──start_turn──▶ in_flight ──turn_sampled──▶ environment ──finish──▶ done
                      ▲     ▲                  │                           │
                      │     └────turn_lost─────┘                           │
                      └──────────────────────observed──────────────────────┘
    every live state ──fail──▶ failed

    trajectory = Trajectory("s3.g0.1", group=0, index=1)
    trajectory.open(first_observation_ids)
    request_id = trajectory.next_request_id()                # "s3.g0.1.0.0"
    trajectory.start_turn("engine-0", request_id)            # the prompt is trajectory.token_ids
    if trajectory.accepts(result.request_id):                # False for the late answer of a lost try
        trajectory.turn_sampled(result.token_ids, result.logprobs, result.policy_versions)
    trajectory.finish(reward=1.0, success=True)              # or observed(next_observation_ids)

Invariants, asserted by the tests:
- the four lists have the same length after every call;
- a lost turn takes nothing away and is retried under a request id that was never used before;
- a transition from the wrong state, or with unusable arguments, raises and changes nothing;
- every trajectory ends exactly once, done or failed, and then never changes.

It deliberately does not know executors, the scheduler, time or text, and it does not keep the partial tokens of a lost turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from rose_hpc.errors import RoseError

OBSERVED_VERSION = -1  # policy version of a token that no policy produced


class IllegalTransition(RoseError):
    """A trajectory was asked for a step that its state or the arguments do not allow; it is unchanged."""


class State(Enum):
    """Where a trajectory stands; the values are what metrics and logs show."""

    CREATED = "created"
    WAITING = "waiting"
    IN_FLIGHT = "in_flight"
    ENVIRONMENT = "environment"
    DONE = "done"
    FAILED = "failed"


LIVE = (State.CREATED, State.WAITING, State.IN_FLIGHT, State.ENVIRONMENT)


@dataclass(slots=True, eq=False)
class Trajectory:
    """The state machine of the module docstring. Read the fields freely; only the methods change them.

    trajectory_id: unique in the run. group, index: which prompt, and which sample of it.
    token_ids, loss_mask, rollout_logprobs, policy_versions: [tokens]. Observed tokens have 0, 0.0 and −1; sampled tokens have 1, the
    engine's natural log probability and the version whose weights produced them.
    turns: turns sampled. tries: lost tries of the turn that is next or in flight; faults: those of them that may be the turn's own fault.
    turns_lost: lost tries of all turns; lost_because: why the last one was. sampled_tokens: tokens with loss_mask 1.
    executor_id: who samples the turn in flight. prefix_executor: who sampled the last turn and so may hold the prefix; advice, since
    executors leave and drop their caches.
    reward, success: set when done. failure: why it failed.
    """

    trajectory_id: str
    group: int
    index: int
    state: State = field(default=State.CREATED, init=False)
    token_ids: list[int] = field(default_factory=list, init=False)
    loss_mask: list[int] = field(default_factory=list, init=False)
    rollout_logprobs: list[float] = field(default_factory=list, init=False)
    policy_versions: list[int] = field(default_factory=list, init=False)
    turns: int = field(default=0, init=False)
    tries: int = field(default=0, init=False)
    faults: int = field(default=0, init=False)
    turns_lost: int = field(default=0, init=False)
    sampled_tokens: int = field(default=0, init=False)
    executor_id: str | None = field(default=None, init=False)
    prefix_executor: str | None = field(default=None, init=False)
    reward: float | None = field(default=None, init=False)
    success: bool | None = field(default=None, init=False)
    failure: str | None = field(default=None, init=False)
    lost_because: str | None = field(default=None, init=False)
    _request_id: str | None = field(default=None, init=False)

    @property
    def is_live(self) -> bool:
        """Neither done nor failed."""
        return self.state in LIVE

    def next_request_id(self) -> str:
        """Id for the next try of the next turn; `start_turn` takes no other. Trajectory, turn and try, each 0-based."""
        return f"{self.trajectory_id}.{self.turns}.{self.tries}"

    def accepts(self, request_id: str) -> bool:
        """Whether a result of this request still counts: it is the try in flight, not one that was lost or has been answered."""
        return self.state is State.IN_FLIGHT and request_id == self._request_id

    def open(self, observation_ids: Sequence[int]) -> None:
        """created → waiting, with the tokens of the first observation."""
        self._require("open", State.CREATED)
        self._append_observation(observation_ids)
        self.state = State.WAITING

    def start_turn(self, executor_id: str, request_id: str) -> None:
        """waiting → in_flight. request_id: what `next_request_id` gave."""
        self._require("start_turn", State.WAITING)
        if request_id != self.next_request_id():
            raise self._illegal("a turn needs a fresh request id", got=request_id, expected=self.next_request_id())
        self.executor_id, self._request_id = executor_id, request_id
        self.state = State.IN_FLIGHT

    def turn_sampled(self, token_ids: Sequence[int], logprobs: Sequence[float], policy_versions: Sequence[int]) -> None:
        """in_flight → environment, with what the policy sampled: three sequences of one length, at least one token."""
        self._require("turn_sampled", State.IN_FLIGHT)
        self._check_sampled(token_ids, logprobs, policy_versions)
        self._extend(token_ids, 1, logprobs, policy_versions)
        self.turns += 1
        self.sampled_tokens += len(token_ids)
        self.prefix_executor, self.executor_id = self.executor_id, None
        self._request_id, self.tries, self.faults = None, 0, 0
        self.state = State.ENVIRONMENT

    def turn_lost(self, reason: str, blamed: bool = True) -> None:
        """in_flight → waiting: executor gone, time-out or abort. All earlier tokens stay; the next try has a new request id.

        blamed: the turn may be why; an executor that took it away when it left says nothing about it.
        """
        self._require("turn_lost", State.IN_FLIGHT)
        if self.prefix_executor == self.executor_id:
            self.prefix_executor = None  # it has just failed us; a retry there must not look cheap
        self.turns_lost += 1
        self.tries += 1
        self.faults += blamed
        self.executor_id = self._request_id = None
        self.lost_because = reason
        self.state = State.WAITING

    def observed(self, observation_ids: Sequence[int]) -> None:
        """environment → waiting, with the tokens of the next observation."""
        self._require("observed", State.ENVIRONMENT)
        self._append_observation(observation_ids)
        self.state = State.WAITING

    def finish(self, reward: float, success: bool) -> None:
        """environment → done. reward: of the whole episode."""
        self._require("finish", State.ENVIRONMENT)
        if not math.isfinite(reward):
            raise self._illegal("a reward is not a number", got=reward, expected="a finite float", remedy="fail the trajectory instead")
        self.reward, self.success = float(reward), success
        self.state = State.DONE

    def fail(self, reason: str) -> None:
        """Any live state → failed. Its tokens stay readable; training leaves them out."""
        self._require("fail", *LIVE)
        self.executor_id = self._request_id = None
        self.failure = reason
        self.state = State.FAILED

    def _append_observation(self, observation_ids: Sequence[int]) -> None:
        if len(observation_ids) == 0:
            raise self._illegal("an observation has no tokens", got=0, expected="at least one token id")
        n = len(observation_ids)
        self._extend(observation_ids, 0, [0.0] * n, [OBSERVED_VERSION] * n)

    def _extend(self, token_ids: Sequence[int], mask: int, logprobs: Sequence[float], policy_versions: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)
        self.loss_mask.extend([mask] * len(token_ids))
        self.rollout_logprobs.extend(logprobs)
        self.policy_versions.extend(policy_versions)

    def _check_sampled(self, token_ids: Sequence[int], logprobs: Sequence[float], policy_versions: Sequence[int]) -> None:
        lengths = [len(token_ids), len(logprobs), len(policy_versions)]
        if min(lengths) < 1 or min(lengths) != max(lengths):
            raise self._illegal("a turn's lists do not match", got=f"lengths {lengths}", expected="equal lengths, at least 1")
        if not all(map(math.isfinite, logprobs)):
            raise self._illegal("a sampled token has no probability", got=list(logprobs), expected="finite log probabilities")
        if min(policy_versions) < 0:
            raise self._illegal("a sampled token has no policy version", got=list(policy_versions), expected="versions >= 0")

    def _require(self, step: str, *allowed: State) -> None:
        if self.state not in allowed:
            states = " or ".join(state.value for state in allowed)
            raise self._illegal(f"{step} is not possible now", got=f"state {self.state.value}", expected=f"state {states}")

    def _illegal(self, what: str, *, got: object, expected: object, remedy: str | None = None) -> IllegalTransition:
        return IllegalTransition(f"trajectory {self.trajectory_id}: {what}", got=got, expected=expected, remedy=remedy)
