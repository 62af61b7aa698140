"""Decides which executor samples each turn. Pure: no clock, no tasks, no clients; the controller and the simulator drive it.

    scheduler = RolloutScheduler()
    scheduler.observe(ExecutorJoined("engine-0", "dedicated", max_concurrency=64), now_s)
    scheduler.observe(VersionApplied("engine-0", 0), now_s)
    scheduler.observe(TurnReady("g0.0", prompt_tokens=80), now_s)
    for assignment in scheduler.plan(now_s):     # already counted as in flight
        ...                                      # send the turn; on its result observe(TurnEnded(...)), then plan again

A turn is routed in the paper's order (§ elastic rollout scheduler):

    1. "prefix"          the executor that holds the trajectory's prefix, if it has room
    2. "opportunistic"   else the least loaded opportunistic executor with room
    3. "dedicated"       else the least loaded dedicated executor with room
    4. it stays queued

Load is in-flight turns / max_concurrency; equal loads go to the smaller executor id, so that a plan follows from the events alone.
The queue is strictly first in, first out, except that turns displaced by an executor that left return to the front, in the order in
which they had been assigned. Turns whose trajectory already holds a prefix are NOT moved forward: that would starve fresh
trajectories, and the slowest one sets the length of a step. Every turn may go to any eligible executor, so a head that
cannot be placed blocks nobody who could be.

An executor is eligible while it is present and its policy version is at least the required one (0 until VersionRequired says
more, and an executor joins at −1: without weights nothing is sent). Turns in flight on an executor that becomes
ineligible go on there; they are not displaced. A prefix belongs to the version at which its turn was sent: engines drop or salt their
prefix cache when they apply new weights, so affinity ends there too.

Invariants, asserted by the tests:
- an executor never has more than max_concurrency turns in flight;
- a turn is assigned once, until it ends or its executor leaves;
- after plan() nothing is queued while an eligible executor has room;
- the executor that holds the prefix gets the turn whenever it is eligible and has room;
- an executor that is stale or gone receives nothing;
- a rejected event changes nothing.

Cost: O(log executors) per assignment or turn event, amortised; O(executors · log executors) per VersionRequired.

It deliberately does not cancel anything, retry by time, weigh costs or know request ids: `Trajectory.accepts` keeps late results away.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal, get_args

from rose_hpc.errors import RoseError

Kind = Literal["opportunistic", "dedicated"]
Reason = Literal["prefix", "opportunistic", "dedicated"]
KINDS: tuple[Kind, ...] = get_args(Kind)  # in the order of preference
NO_VERSION = -1  # an executor that has applied no policy version yet


class EventRejected(RoseError):
    """An event contradicts what the scheduler has observed so far; it has changed nothing."""


# ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ExecutorJoined:
    """An executor may be used once it has applied the required version. kind: "opportunistic" or "dedicated"."""

    executor_id: str
    kind: str
    max_concurrency: int


@dataclass(frozen=True, slots=True)
class VersionApplied:
    """The executor now samples with this policy version, and holds no prefix of an earlier one."""

    executor_id: str
    version: int


@dataclass(frozen=True, slots=True)
class VersionRequired:
    """From now on only executors at this version or later receive turns."""

    version: int


@dataclass(frozen=True, slots=True)
class ExecutorLeft:
    """The executor is gone, and its turns with it. It may join again under the same id, without weights or prefixes."""

    executor_id: str


@dataclass(frozen=True, slots=True)
class TurnReady:
    """The trajectory's next turn can be sampled. prompt_tokens: length of the whole sequence so far."""

    trajectory_id: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """The turn in flight is over, sampled or lost.

    holds_prefix: False when the turn was lost, so that its retry is not drawn back to the executor that lost it.
    """

    trajectory_id: str
    holds_prefix: bool = True


@dataclass(frozen=True, slots=True)
class TrajectoryEnded:
    """The trajectory is done or failed and is forgotten. A turn still queued or in flight is given up: its place is free at once."""

    trajectory_id: str


Event = ExecutorJoined | VersionApplied | VersionRequired | ExecutorLeft | TurnReady | TurnEnded | TrajectoryEnded


# ── what comes out ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Assignment:
    """Send the trajectory's turn to this executor. reason: which rule chose it."""

    trajectory_id: str
    executor_id: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class ExecutorLoad:
    """One executor, as the scheduler sees it."""

    executor_id: str
    kind: Kind
    in_flight: int
    max_concurrency: int
    version: int
    eligible: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The scheduler at one moment.

    queued: turns that wait. queued_tokens: their prompts together. head_wait_s: since the first of them was ready, 0 when none waits.
    assigned, displaced: counts since the start. waited_s: summed over all assignments, from TurnReady to plan.
    """

    queued: int
    queued_tokens: int
    head_wait_s: float
    executors: tuple[ExecutorLoad, ...]
    assigned: dict[Reason, int]
    displaced: int
    waited_s: float


# ── state ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Executor:
    executor_id: str
    kind: Kind
    max_concurrency: int
    version: int = NO_VERSION
    in_flight: dict[str, None] = field(default_factory=dict)  # trajectory ids in the order of assignment

    @property
    def has_room(self) -> bool:
        return len(self.in_flight) < self.max_concurrency

    @property
    def load_frac(self) -> float:
        return len(self.in_flight) / self.max_concurrency


@dataclass(slots=True, eq=False)
class _Trajectory:
    """Queued when its id is in the queue, in flight when `executor` is set, else between turns."""

    prompt_tokens: int = 0
    ready_s: float = 0.0
    executor: _Executor | None = None
    sent_version: int = NO_VERSION  # of that executor, when the turn was assigned
    prefix: _Executor | None = None  # the object, not its id: an executor that rejoins is another one
    prefix_version: int = NO_VERSION


class _LeastLoaded:
    """Executor ids by load. A heap with lazy deletion: an entry counts only while it is its executor's latest."""

    SLACK = 8  # stale entries tolerated beyond one per executor before the heap is rebuilt

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._latest: dict[str, tuple[float, str]] = {}

    def put(self, executor_id: str, load_frac: float) -> None:
        entry = (load_frac, executor_id)
        self._latest[executor_id] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._latest) + self.SLACK:
            self._heap = sorted(self._latest.values())  # sorted is a heap; paid for by as many pushes

    def discard(self, executor_id: str) -> None:
        self._latest.pop(executor_id, None)

    def first(self) -> str | None:
        heap, latest = self._heap, self._latest
        while heap:
            if latest.get(heap[0][1]) is heap[0]:
                return heap[0][1]
            heapq.heappop(heap)
        return None


class RolloutScheduler:
    """The state machine of the module docstring: `observe` events, `plan` assignments.

    now_s: seconds on any clock that does not go back; used only for the waits in `snapshot`.
    """

    def __init__(self) -> None:
        self.required_version = 0
        self._executors: dict[str, _Executor] = {}
        self._trajectories: dict[str, _Trajectory] = {}
        self._queue: OrderedDict[str, _Trajectory] = OrderedDict()
        self._open: dict[Kind, _LeastLoaded] = {kind: _LeastLoaded() for kind in KINDS}  # eligible and with room
        self._assigned: dict[Reason, int] = dict.fromkeys(get_args(Reason), 0)
        self._displaced = 0
        self._waited_s = 0.0

    def observe(self, event: Event, now_s: float) -> list[str]:
        """Take note of an event. Returns the trajectory ids whose turns it displaced (ExecutorLeft only): they are queued again.

        Raises EventRejected: unknown, doubled or out of order.
        """
        match event:
            case TurnReady():
                self._turn_ready(event, now_s)
            case TurnEnded():
                self._turn_ended(event)
            case TrajectoryEnded():
                self._trajectory_ended(event)
            case VersionApplied():
                self._version_applied(event)
            case VersionRequired():
                self._version_required(event)
            case ExecutorJoined():
                self._executor_joined(event)
            case ExecutorLeft():
                return self._executor_left(event)
            case _:
                raise EventRejected("the scheduler does not know this event", got=event, expected="one of scheduler.Event")
        return []

    def plan(self, now_s: float) -> list[Assignment]:
        """Assign queued turns, first in, first out, until none is left or no eligible executor has room."""
        assignments = []
        while self._queue:
            trajectory_id, trajectory = next(iter(self._queue.items()))
            choice = self._route(trajectory)
            if choice is None:
                break
            executor, reason = choice
            self._dispatch(trajectory_id, trajectory, executor)
            self._assigned[reason] += 1
            self._waited_s += now_s - trajectory.ready_s
            assignments.append(Assignment(trajectory_id, executor.executor_id, reason))
        return assignments

    def snapshot(self, now_s: float) -> Snapshot:
        """Queue, loads and counters. Costs O(queued + executors): for metrics, not for every decision."""
        head = next(iter(self._queue.values()), None)
        return Snapshot(
            queued=len(self._queue),
            queued_tokens=sum(t.prompt_tokens for t in self._queue.values()),
            head_wait_s=now_s - head.ready_s if head is not None else 0.0,
            executors=tuple(self._load_of(e) for e in self._executors.values()),
            assigned=dict(self._assigned),
            displaced=self._displaced,
            waited_s=self._waited_s,
        )

    # ── routing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _route(self, trajectory: _Trajectory) -> tuple[_Executor, Reason] | None:
        holder = trajectory.prefix
        if holder is not None and holder.version == trajectory.prefix_version and self._is_eligible(holder) and holder.has_room:
            return holder, "prefix"
        for kind in KINDS:
            executor_id = self._open[kind].first()
            if executor_id is not None:
                return self._executors[executor_id], kind
        return None

    def _is_eligible(self, executor: _Executor) -> bool:
        return executor.version >= self.required_version and self._executors.get(executor.executor_id) is executor

    def _dispatch(self, trajectory_id: str, trajectory: _Trajectory, executor: _Executor) -> None:
        del self._queue[trajectory_id]
        trajectory.executor, trajectory.sent_version = executor, executor.version
        executor.in_flight[trajectory_id] = None
        self._refresh(executor)

    def _land(self, trajectory_id: str, executor: _Executor) -> None:
        del executor.in_flight[trajectory_id]
        self._trajectories[trajectory_id].executor = None
        self._refresh(executor)

    def _refresh(self, executor: _Executor) -> None:
        """Called after every change of an executor's load or eligibility."""
        pool = self._open[executor.kind]
        if self._is_eligible(executor) and executor.has_room:
            pool.put(executor.executor_id, executor.load_frac)
        else:
            pool.discard(executor.executor_id)

    def _load_of(self, e: _Executor) -> ExecutorLoad:
        return ExecutorLoad(e.executor_id, e.kind, len(e.in_flight), e.max_concurrency, e.version, self._is_eligible(e))

    # ── events of executors ──────────────────────────────────────────────────────────────────────────────────────────

    def _executor_joined(self, event: ExecutorJoined) -> None:
        if event.executor_id in self._executors:
            raise EventRejected("an executor joined twice", got=event, expected="ExecutorLeft before it joins again")
        kind = next((k for k in KINDS if k == event.kind), None)
        if kind is None or event.max_concurrency < 1:
            raise EventRejected("an executor cannot be used", got=event, expected=f"kind in {KINDS}, max_concurrency >= 1")
        self._executors[event.executor_id] = _Executor(event.executor_id, kind, event.max_concurrency)

    def _version_applied(self, event: VersionApplied) -> None:
        executor = self._executor(event.executor_id, event)
        if event.version < executor.version:
            raise EventRejected("an executor's policy version went back", got=event, expected=f"version >= {executor.version}")
        executor.version = event.version
        self._refresh(executor)

    def _version_required(self, event: VersionRequired) -> None:
        if event.version < self.required_version:
            raise EventRejected("the required policy version went back", got=event, expected=f"version >= {self.required_version}")
        self.required_version = event.version
        for executor in self._executors.values():
            self._refresh(executor)

    def _executor_left(self, event: ExecutorLeft) -> list[str]:
        executor = self._executor(event.executor_id, event)
        del self._executors[event.executor_id]
        self._refresh(executor)
        displaced = list(executor.in_flight)
        for trajectory_id in reversed(displaced):  # each goes before all others, so the first one goes last
            trajectory = self._trajectories[trajectory_id]
            trajectory.executor = None
            self._queue[trajectory_id] = trajectory
            self._queue.move_to_end(trajectory_id, last=False)
        self._displaced += len(displaced)
        return displaced

    def _executor(self, executor_id: str, event: Event) -> _Executor:
        executor = self._executors.get(executor_id)
        if executor is None:
            raise EventRejected("no such executor", got=event, expected=f"one of the {len(self._executors)} that have joined and not left")
        return executor

    # ── events of trajectories ───────────────────────────────────────────────────────────────────────────────────────

    def _turn_ready(self, event: TurnReady, now_s: float) -> None:
        if event.prompt_tokens < 1:
            raise EventRejected("a turn without a prompt", got=event, expected="prompt_tokens >= 1")
        trajectory = self._trajectories.get(event.trajectory_id)
        if trajectory is None:
            trajectory = self._trajectories[event.trajectory_id] = _Trajectory()
        elif trajectory.executor is not None or event.trajectory_id in self._queue:
            raise EventRejected("a turn became ready twice", got=event, expected="TurnEnded before the next TurnReady of a trajectory")
        trajectory.prompt_tokens, trajectory.ready_s = event.prompt_tokens, now_s
        self._queue[event.trajectory_id] = trajectory

    def _turn_ended(self, event: TurnEnded) -> None:
        trajectory = self._trajectory(event.trajectory_id, event)
        executor = trajectory.executor
        if executor is None:
            raise EventRejected(
                "a turn ended that was not in flight", got=event, expected="the trajectory of an assignment that has not ended"
            )
        self._land(event.trajectory_id, executor)
        if event.holds_prefix:
            trajectory.prefix, trajectory.prefix_version = executor, trajectory.sent_version
        elif trajectory.prefix is executor:
            trajectory.prefix = None

    def _trajectory_ended(self, event: TrajectoryEnded) -> None:
        trajectory = self._trajectory(event.trajectory_id, event)
        if trajectory.executor is not None:
            self._land(event.trajectory_id, trajectory.executor)
        self._queue.pop(event.trajectory_id, None)
        del self._trajectories[event.trajectory_id]

    def _trajectory(self, trajectory_id: str, event: Event) -> _Trajectory:
        trajectory = self._trajectories.get(trajectory_id)
        if trajectory is None:
            raise EventRejected("no such trajectory", got=event, expected="one that has had a TurnReady and has not ended")
        return trajectory
