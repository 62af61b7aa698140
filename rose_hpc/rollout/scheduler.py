"""Decides which executor samples each turn. Pure: no clock, no tasks, no clients; the controller and the simulator drive it.

    scheduler = RolloutScheduler("expected")
    scheduler.observe(ExecutorJoined("engine-0", "dedicated", max_concurrency=64), now_s)
    scheduler.observe(VersionApplied("engine-0", 0), now_s)
    scheduler.observe(TurnReady("g0.0", prompt_tokens=80), now_s)
    for assignment in scheduler.plan(now_s):     # already counted as in flight
        ...                                      # send the turn; on its result observe(TurnEnded(...)), then plan again
    for proposal in scheduler.review(now_s):     # about once a second, where moves or hedges are on: Move, Hedge
        ...

Two policies route: `paper` in the paper's order, `expected` by expected completion times (scheduling/paper.py, scheduling/expected.py).
What turns and executors have shown is learned whichever routes (scheduling/learned.py), and feeds `review` and `forecast` too.

An executor is eligible while it is present, is not draining, and its policy version is at least the required one (0 until VersionRequired
says more, and an executor joins at −1: without weights nothing is sent). Turns in flight on an executor that becomes
ineligible go on there; they are not displaced. A prefix belongs to the version at which its turn was sent: engines drop or salt their
prefix cache when they apply new weights, so affinity ends there too.

A turn has one attempt in flight, or two once it is hedged. The first that is sampled ends the turn, and the place of the other is free at
once; a lost attempt ends only itself while another goes on.

Invariants, asserted by the tests:
- an executor never has more than max_concurrency attempts in flight, and at most one of a turn;
- a turn is assigned once, until it ends, or its last attempt or that attempt's executor is gone;
- after plan(), what is queued while an eligible executor has room waits for one that is full (`expected`), or does not exist (`paper`);
- an executor that is stale, draining or gone receives nothing;
- a rejected event changes nothing.

Cost: O(log (executors + queued)) per assignment or turn event, amortised; O(executors · log executors) per VersionRequired.

It deliberately does not cancel anything, retry by time or know request ids: attempts.py and `Trajectory.accepts` keep late results away.
"""

from __future__ import annotations

import math
from typing import get_args

from rose_hpc.errors import ConfigError
from rose_hpc.rollout.scheduling.events import (
    KINDS,
    POLICIES,
    Assignment,
    Event,
    EventRejected,
    ExecutorDraining,
    ExecutorJoined,
    ExecutorLeft,
    Forecast,
    Hedge,
    Move,
    PolicyName,
    Reason,
    Snapshot,
    TrajectoryEnded,
    TurnEnded,
    TurnReady,
    VersionApplied,
    VersionRequired,
)
from rose_hpc.rollout.scheduling.expected import ExpectedRouting
from rose_hpc.rollout.scheduling.forecast import forecast
from rose_hpc.rollout.scheduling.learned import Learned
from rose_hpc.rollout.scheduling.paper import PaperRouting
from rose_hpc.rollout.scheduling.records import AttemptRecord, ExecutorRecord, Routing, TrajectoryRecord, attempt_of
from rose_hpc.rollout.scheduling.roster import Roster, RosterEvent
from rose_hpc.rollout.scheduling.stragglers import Review

__all__ = [
    "KINDS",
    "Assignment",
    "EventRejected",
    "ExecutorDraining",
    "ExecutorJoined",
    "ExecutorLeft",
    "Hedge",
    "Move",
    "RolloutScheduler",
    "TrajectoryEnded",
    "TurnEnded",
    "TurnReady",
    "VersionApplied",
    "VersionRequired",
]

REVIEW_S = 0.5  # at most one review of the turns in flight in so much time


class RolloutScheduler:
    """The state machine of the module docstring: `observe` events, `plan` assignments.

    policy: who routes. moves, hedges: what `review` may propose; the driver must know what to do with it.
    now_s: seconds on any clock that does not go back.
    """

    def __init__(self, policy: PolicyName = "paper", *, moves: bool = False, hedges: bool = False) -> None:
        if policy not in POLICIES:
            raise ConfigError("unknown routing policy", got=policy, expected=f"one of {POLICIES}")
        self.policy, self._moves, self._hedges = policy, moves, hedges
        self._learned = Learned()
        self._roster = Roster(self._learned)
        self._trajectories: dict[str, TrajectoryRecord] = {}
        executors = self._roster.executors
        self._routing: Routing = PaperRouting(executors) if policy == "paper" else ExpectedRouting(executors, self._learned)
        self._queued = 0
        self._review_s = -math.inf
        self._assigned: dict[Reason, int] = dict.fromkeys(get_args(Reason), 0)
        self._displaced = self._moved = self._hedged = 0
        self._waited_s = 0.0

    def observe(self, event: Event, now_s: float) -> list[str]:
        """Take note of an event. Returns the trajectory ids whose turns it displaced (ExecutorLeft only): they are queued again.

        Raises EventRejected: unknown, doubled or out of order.
        """
        match event:
            case TurnReady():
                self._turn_ready(event, now_s)
            case TurnEnded():
                self._turn_ended(event, now_s)
            case TrajectoryEnded():
                self._trajectory_ended(event, now_s)
            case VersionApplied() | VersionRequired() | ExecutorJoined() | ExecutorDraining() | ExecutorLeft():
                return self._executors_changed(event, now_s)
            case _:
                raise EventRejected("the scheduler does not know this event", got=event, expected="one of scheduler.Event")
        return []

    def plan(self, now_s: float) -> list[Assignment]:
        """Assign queued turns, as the policy has it, until it would rather let the rest wait."""
        assignments = []
        while self._queued and (choice := self._routing.next(now_s)) is not None:
            trajectory, executor = choice
            self._leave_queue(trajectory)
            attempt = self._send(trajectory, executor, now_s)
            reason: Reason = "prefix" if attempt.cached_tokens > 0 else executor.kind
            self._assigned[reason] += 1
            self._waited_s += now_s - trajectory.ready_s
            assignments.append(Assignment(trajectory.trajectory_id, executor.executor_id, reason))
        return assignments

    def review(self, now_s: float) -> list[Move | Hedge]:
        """Turns in flight that should be moved or hedged. Nothing while turns wait, or within REVIEW_S of the last review.

        Not driven by the controller yet.
        """
        if not (self._moves or self._hedges) or self._queued or now_s < self._review_s:
            return []
        self._review_s = now_s + REVIEW_S
        proposals = []
        for attempt, executor, proposal in list(
            Review(self._roster.executors.values(), self._learned, now_s).proposals(self._moves, self._hedges)
        ):
            if isinstance(proposal, Hedge):
                self._send(attempt.trajectory, executor, now_s)
                self._hedged += 1
            else:
                attempt.moving = True
                attempt.trajectory.moves += 1
                self._moved += 1
            proposals.append(proposal)
        return proposals

    def snapshot(self, now_s: float) -> Snapshot:
        """Queue, loads and counters. Costs O(queued + executors): for metrics, not for every decision."""
        queued = list(self._routing.queued())
        return Snapshot(
            queued=len(queued),
            queued_tokens=sum(t.prompt_tokens for t in queued),
            head_wait_s=now_s - min((t.ready_s for t in queued), default=now_s),
            executors=tuple(e.shown() for e in self._roster.executors.values()),
            assigned=dict(self._assigned),
            displaced=self._displaced,
            waited_s=self._waited_s,
            moved=self._moved,
            hedged=self._hedged,
        )

    def forecast(self) -> Forecast:
        """What is left to do. Costs O(trajectories + executors): about once a second, for the elasticity policy.

        Not driven by the controller yet.
        """
        return forecast(self._trajectories.values(), self._roster.executors.values(), self._learned)

    def _executors_changed(self, event: RosterEvent, now_s: float) -> list[str]:
        changed = self._roster.take(event, now_s)
        for executor in changed:
            self._routing.executor_changed(executor)
        return self._displace(changed[0], now_s) if isinstance(event, ExecutorLeft) else []

    # ── attempts ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _leave_queue(self, trajectory: TrajectoryRecord) -> None:
        if trajectory.queued:
            trajectory.queued = False
            self._queued -= 1
            self._routing.drop(trajectory)

    def _send(self, trajectory: TrajectoryRecord, executor: ExecutorRecord, now_s: float) -> AttemptRecord:
        executor.turn_seconds, executor.changed_s = executor.turn_seconds_at(now_s), now_s
        holds = trajectory.holder is executor
        attempt = AttemptRecord(
            trajectory,
            executor,
            start_s=now_s,
            version=executor.version,
            turn_seconds=executor.turn_seconds,
            cached_tokens=trajectory.prefix_tokens if holds else 0,
        )
        self._learned.attempt_sent()
        trajectory.attempts.append(attempt)
        executor.in_flight[trajectory.trajectory_id] = attempt
        self._routing.executor_changed(executor)
        return attempt

    def _land(self, attempt: AttemptRecord, now_s: float) -> None:
        executor = attempt.executor
        executor.turn_seconds, executor.changed_s = executor.turn_seconds_at(now_s), now_s
        del executor.in_flight[attempt.trajectory.trajectory_id]
        attempt.trajectory.attempts.remove(attempt)
        self._routing.executor_changed(executor)

    def _displace(self, executor: ExecutorRecord, now_s: float) -> list[str]:
        """The executor is gone: what it had in flight is queued again, unless another attempt goes on."""
        displaced = []
        for attempt in list(executor.in_flight.values()):
            self._learned.attempt_lost(attempt, now_s)
            self._land(attempt, now_s)
            if not attempt.trajectory.attempts:
                attempt.trajectory.queued = True
                displaced.append(attempt.trajectory)
        self._queued += len(displaced)
        self._displaced += len(displaced)
        self._routing.put_back(displaced)
        return [trajectory.trajectory_id for trajectory in displaced]

    # ── events of trajectories ───────────────────────────────────────────────────────────────────────────────────────

    def _turn_ready(self, event: TurnReady, now_s: float) -> None:
        if event.prompt_tokens < 1:
            raise EventRejected("a turn without a prompt", got=event, expected="prompt_tokens >= 1")
        trajectory = self._trajectories.get(event.trajectory_id)
        if trajectory is None:
            trajectory = self._trajectories[event.trajectory_id] = TrajectoryRecord(event.trajectory_id)
        elif trajectory.queued or trajectory.attempts:
            raise EventRejected("a turn became ready twice", got=event, expected="TurnEnded before the next TurnReady of a trajectory")
        elif trajectory.undecided:
            self._learned.tail.went_on(trajectory.turns)
        trajectory.undecided = False
        trajectory.prompt_tokens, trajectory.ready_s, trajectory.queued = event.prompt_tokens, now_s, True
        self._queued += 1
        self._routing.push(trajectory)

    def _turn_ended(self, event: TurnEnded, now_s: float) -> None:
        trajectory = self._trajectory(event.trajectory_id, event)
        attempt = attempt_of(trajectory, event)
        executor = attempt.executor
        trajectory.sampled_tokens += event.sampled_tokens
        if event.holds_prefix:
            self._sampled(trajectory, attempt, event, now_s)
        else:
            if attempt.moving:
                self._learned.attempt_dropped(attempt, now_s)
            else:
                self._learned.attempt_lost(attempt, now_s)
            if trajectory.prefix is executor:
                trajectory.prefix = None
        self._land(attempt, now_s)

    def _sampled(self, trajectory: TrajectoryRecord, attempt: AttemptRecord, event: TurnEnded, now_s: float) -> None:
        """The turn is over, and other attempts of it are given up."""
        self._learned.attempt_sampled(attempt, event, now_s)
        for other in [a for a in trajectory.attempts if a is not attempt]:
            self._learned.attempt_dropped(other, now_s)
            self._land(other, now_s)
        trajectory.prefix, trajectory.prefix_version = attempt.executor, attempt.version
        trajectory.prefix_tokens = trajectory.prompt_tokens + event.sampled_tokens
        trajectory.turns += 1
        trajectory.moves, trajectory.undecided = 0, True

    def _trajectory_ended(self, event: TrajectoryEnded, now_s: float) -> None:
        trajectory = self._trajectory(event.trajectory_id, event)
        if trajectory.undecided:
            self._learned.tail.ended(trajectory.turns)
        for attempt in list(trajectory.attempts):
            self._learned.attempt_dropped(attempt, now_s)
            self._land(attempt, now_s)
        self._leave_queue(trajectory)
        self._routing.ended(trajectory)
        del self._trajectories[event.trajectory_id]

    def _trajectory(self, trajectory_id: str, event: Event) -> TrajectoryRecord:
        trajectory = self._trajectories.get(trajectory_id)
        if trajectory is None:
            raise EventRejected("no such trajectory", got=event, expected="one that has had a TurnReady and has not ended")
        return trajectory
