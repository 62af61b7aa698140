"""The turns of trajectories: drives their state machines over real executors until each has ended, exactly once.

    start(groups) ─▶ reset ─▶ turn, environment, turn, … ─▶ ended() gives each group once, when its last trajectory has ended

Groups may be started at any time, also while others run, while the trainer trains and while a version is delivered.

Every turn is one task: send, wait, step the environment. When a turn ends, the scheduler plans again; and every TICK_S, since what a
policy lets wait, and for what, changes with time. A lost turn (executor gone, time-out, abort, an answer that cannot be used) goes
back to the scheduler under a new request id with all earlier tokens kept; after MAX_TRIES its trajectory fails, alone. A turn that the
engine says it cannot run fails its trajectory at once, and so does a fault of its environment.
An executor is blamed for what it failed to do: not for a request that cannot be run, and not for an abort. A trajectory is not blamed
for turns that it lost with their executor: one whose lease is over leaves at the first answer that says so, with all its turns.

Decides nothing about routing (scheduler.py), about executors (fleet.py) or about what is trained (sampling.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rose_hpc.errors import RunFailed
from rose_hpc.messages import GenerateRequest, GenerateResult
from rose_hpc.rollout.answers import answer_fault
from rose_hpc.rollout.client import ExecutorError
from rose_hpc.rollout.envs.base import Env, EnvFault
from rose_hpc.rollout.fleet import Executor, Fleet
from rose_hpc.rollout.groups import Group, TurnRecord
from rose_hpc.rollout.scheduler import TrajectoryEnded, TurnEnded, TurnReady
from rose_hpc.rollout.trajectories import Trajectory

TICK_S = 1.0
MAX_TRIES = 3  # of one turn, before its trajectory fails


class TurnFormat(Protocol):
    """How a trajectory becomes a request and tokens become an action."""

    def first(self, observation: str) -> list[int]:
        """Tokens before the policy's first turn."""
        ...

    def later(self, trajectory: Trajectory, observation: str) -> list[int]:
        """Tokens between the turn that the trajectory ends with and the next."""
        ...

    def action(self, token_ids: Sequence[int]) -> str: ...

    def request(self, trajectory: Trajectory) -> GenerateRequest: ...

    def has_room(self, trajectory: Trajectory) -> bool: ...

    @property
    def deadline_s(self) -> float: ...

    @property
    def vocabulary(self) -> int:
        """Token ids that the policy has are below."""
        ...


@dataclass(frozen=True)
class _Seat:
    """Where a live trajectory is played: its group, and its environment."""

    group: Group
    trajectory: Trajectory
    env: Env


class Turns:
    """Plays groups. Listens to the fleet from the first `start` on; `cancel` on every path.

    take_env, give_env: where environments come from and go back to.
    """

    def __init__(self, fleet: Fleet, form: TurnFormat, take_env: Callable[[], Env], give_env: Callable[[Env], None]) -> None:
        self._fleet, self._form, self._take_env, self._give_env = fleet, form, take_env, give_env
        self._seats: dict[str, _Seat] = {}  # of the live trajectories
        self._rewards: dict[str, float] = {}  # of those that the scheduler knows
        self._tasks: set[asyncio.Task[None]] = set()  # of trajectories; without the ticker, which says nothing about them
        self._ticker: asyncio.Task[None] | None = None
        self._over: asyncio.Queue[Group | Exception] = asyncio.Queue()
        self._failed = False

    def start(self, groups: Sequence[Group]) -> None:
        """Play every trajectory of these groups that has not ended."""
        self._fleet.listener = self
        if self._ticker is None:
            self._ticker = asyncio.create_task(self._tick())
            self._ticker.add_done_callback(self._report)
        for group in groups:
            if group.is_over:  # restored so
                self._over.put_nowait(group)
            for trajectory in [t for t in group.trajectories if t.is_live]:
                seat = self._seats[trajectory.trajectory_id] = _Seat(group, trajectory, self._take_env())
                self._spawn(self._open(seat))

    async def ended(self) -> Group:
        """The next group that is over, in the order in which they ended. Raises RunFailed: no executor can take a turn."""
        return self._checked(await self._over.get())

    def ended_already(self) -> list[Group]:
        """All groups that are over and were not given yet. Raises what `ended` raises."""
        found = []
        while not self._over.empty():
            found.append(self._checked(self._over.get_nowait()))
        return found

    def _checked(self, item: Group | Exception) -> Group:
        if isinstance(item, Exception):
            raise item
        return item

    def cancel(self) -> None:
        """Leave nothing behind: no task, and no trajectory in the scheduler."""
        if self._fleet.listener is self:
            self._fleet.listener = None
        for task in self._tasks:
            task.cancel()
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        for trajectory_id in self._rewards:
            self._fleet.scheduler.observe(TrajectoryEnded(trajectory_id), time.monotonic())
        self._rewards.clear()
        self._seats.clear()

    # ── the fleet's news ──

    def executor_ready(self) -> None:
        self._dispatch()

    def turns_displaced(self, trajectory_ids: list[str], reason: str) -> None:
        for trajectory_id in trajectory_ids:  # the scheduler has queued them again
            self._trajectory(trajectory_id).turn_lost(reason, blamed=False)
        self._dispatch()

    # ── turns ──

    def _trajectory(self, trajectory_id: str) -> Trajectory:
        return self._seats[trajectory_id].trajectory

    async def _open(self, seat: _Seat) -> None:
        """Begin the episode; the first turn is ready then."""
        trajectory = seat.trajectory
        try:
            observation = await seat.env.reset(seat.group.seed)
        except EnvFault as error:
            trajectory.fail(str(error))
            self._ended(trajectory)
            return
        trajectory.open(self._form.first(observation))
        self._rewards[trajectory.trajectory_id] = 0.0
        self._ready(trajectory)
        self._dispatch()

    def _ready(self, trajectory: Trajectory) -> None:
        self._fleet.scheduler.observe(TurnReady(trajectory.trajectory_id, len(trajectory.token_ids)), time.monotonic())

    def _dispatch(self) -> None:
        """Let the scheduler place what it can, one task per placed turn."""
        executors = self._fleet.executors
        for assignment in self._fleet.scheduler.plan(time.monotonic()):
            trajectory = self._trajectory(assignment.trajectory_id)
            request = self._form.request(trajectory)
            trajectory.start_turn(assignment.executor_id, request.request_id)  # at once: its executor may leave before the task runs
            self._spawn(self._turn(trajectory, executors[assignment.executor_id], request))
        self._check_stuck()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._dispatch()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._report(task)
        self._check_stuck()

    def _report(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error if isinstance(error, Exception) else RunFailed("a turn failed", got=repr(error)))

    def _fail(self, error: Exception) -> None:
        """Tell whoever asks for groups; once."""
        if not self._failed:
            self._failed = True
            self._over.put_nowait(error)

    def _check_stuck(self) -> None:
        """Nothing is in flight, yet trajectories wait: every executor has left or is behind the required version."""
        if not self._tasks and self._rewards:
            executors = f"executors {sorted(self._fleet.executors)}"
            self._fail(RunFailed("no executor can take a turn", got=executors, remedy="see logs/ in the run folder"))

    async def _turn(self, trajectory: Trajectory, executor: Executor, request: GenerateRequest) -> None:
        start_s = time.time()
        if not trajectory.accepts(request.request_id):
            return
        try:
            result = await executor.client.generate(executor.executor_id, request, self._form.deadline_s)
        except ExecutorError as error:
            if error.is_over:
                self._fleet.over(executor, error.reason)  # displaces this turn, too
            self._lost(trajectory, request.request_id, str(error), retry=not error.is_request_fault)
            if not error.is_request_fault and not error.is_over:
                self._fleet.turn_failed(executor, trajectory.trajectory_id, str(error))
        else:
            await self._answered(trajectory, executor, request, result, start_s)
        self._dispatch()

    async def _answered(
        self, trajectory: Trajectory, executor: Executor, request: GenerateRequest, result: GenerateResult, start_s: float
    ) -> None:
        if not trajectory.accepts(request.request_id):
            return  # too late: the turn was displaced and is being sampled elsewhere
        if result.finish_reason == "abort":
            self._lost(trajectory, request.request_id, f"aborted ({result.abort_reason})")
            return
        fault = answer_fault(request, result, self._form.vocabulary, self._fleet.newest_version)
        if fault is not None:
            self._lost(trajectory, request.request_id, fault)
            self._fleet.turn_failed(executor, trajectory.trajectory_id, fault)
            return
        trajectory.turn_sampled(result.token_ids, result.logprobs, result.policy_versions)
        ended = TurnEnded(trajectory.trajectory_id, sampled_tokens=len(result.token_ids), cached_tokens=result.cached_tokens)
        self._fleet.scheduler.observe(ended, time.monotonic())
        self._fleet.turn_ended(executor.executor_id)
        self._dispatch()  # its place is free now; the environment may take a while
        self._note(trajectory, executor, request, result, start_s)
        await self._act(trajectory, result.token_ids)

    def _note(self, trajectory: Trajectory, executor: Executor, request: GenerateRequest, result: GenerateResult, start_s: float) -> None:
        sizes = (len(request.prompt_token_ids), result.cached_tokens, len(result.token_ids), result.policy_versions[-1])
        record = TurnRecord(trajectory.index, trajectory.turns - 1, executor.executor_id, executor.kind, start_s, time.time(), *sizes)
        self._seats[trajectory.trajectory_id].group.turns.append(record)

    async def _act(self, trajectory: Trajectory, token_ids: Sequence[int]) -> None:
        """Apply what the policy said; the trajectory ends, or its next turn is ready."""
        trajectory_id = trajectory.trajectory_id
        try:
            outcome = await self._seats[trajectory_id].env.step(self._form.action(token_ids))
        except EnvFault as error:
            trajectory.fail(str(error))
            self._ended(trajectory)
            return
        self._rewards[trajectory_id] += outcome.reward
        if outcome.done:
            trajectory.finish(self._rewards[trajectory_id], outcome.success)
            self._ended(trajectory)
            return
        trajectory.observed(self._form.later(trajectory, outcome.observation))
        if self._form.has_room(trajectory):
            self._ready(trajectory)
        else:
            trajectory.fail("the context is full")
            self._ended(trajectory)

    def _lost(self, trajectory: Trajectory, request_id: str, reason: str, retry: bool = True) -> None:
        """The try of a turn failed. The trajectory may try again, up to MAX_TRIES, or fails."""
        if not trajectory.accepts(request_id):
            return
        trajectory.turn_lost(reason)
        self._fleet.scheduler.observe(TurnEnded(trajectory.trajectory_id, holds_prefix=False), time.monotonic())
        if retry and trajectory.faults < MAX_TRIES:
            self._ready(trajectory)
        else:
            trajectory.fail(reason)
            self._ended(trajectory)

    def _ended(self, trajectory: Trajectory) -> None:
        if self._rewards.pop(trajectory.trajectory_id, None) is not None:
            self._fleet.scheduler.observe(TrajectoryEnded(trajectory.trajectory_id), time.monotonic())
        seat = self._seats.pop(trajectory.trajectory_id)
        self._give_env(seat.env)
        seat.group.end_s[trajectory.index] = time.time()
        if seat.group.is_over:
            self._over.put_nowait(seat.group)
