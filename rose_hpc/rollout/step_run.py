"""The turns of one step: drives the trajectories' state machines over real executors until each has ended, exactly once.

Every turn is one task: send, wait, step the environment. When a turn ends, the scheduler plans again. A lost turn (executor
gone, time-out, abort, an answer that cannot be used) goes back to the scheduler under a new request id with all earlier
tokens kept; after MAX_TRIES its trajectory fails, alone. A turn that the engine says it cannot run fails its trajectory at once.
An executor is blamed for what it failed to do: not for a request that cannot be run, and not for an abort.

Decides nothing about routing (scheduler.py), about executors (fleet.py) or about what is trained (sampling.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rose_hpc.errors import RunFailed
from rose_hpc.messages import GenerateRequest, GenerateResult
from rose_hpc.rollout.answers import answer_fault
from rose_hpc.rollout.client import ExecutorError
from rose_hpc.rollout.envs.base import Env
from rose_hpc.rollout.fleet import Executor, Fleet
from rose_hpc.rollout.scheduler import TrajectoryEnded, TurnEnded, TurnReady
from rose_hpc.rollout.trajectories import State, Trajectory

MAX_TRIES = 3  # of one turn, before its trajectory fails


class TurnFormat(Protocol):
    """How a trajectory becomes a request and tokens become an action."""

    def encode(self, observation: str) -> list[int]: ...

    def action(self, token_ids: Sequence[int]) -> str: ...

    def request(self, trajectory: Trajectory) -> GenerateRequest: ...

    def has_room(self, trajectory: Trajectory) -> bool: ...

    @property
    def deadline_s(self) -> float: ...


@dataclass(frozen=True)
class TurnRecord:
    """One sampled turn, for the metrics. Times are Unix seconds."""

    trajectory: int
    turn: int
    executor: str
    kind: str
    start_s: float
    end_s: float
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    policy_version: int


@dataclass
class RolloutBatch:
    """All trajectories of one step, ended, and what happened to them. end_s: trajectory index → Unix seconds."""

    trajectories: list[Trajectory]
    turns: list[TurnRecord] = field(default_factory=list)
    end_s: dict[int, float] = field(default_factory=dict)
    rollout_s: float = 0.0

    def new_tokens(self, kind: str) -> int:
        """Tokens sampled by executors of this kind."""
        return sum(t.new_tokens for t in self.turns if t.kind == kind)


class StepRun:
    """One step. Listens to the fleet while it runs; `finish` once, `cancel` on every path."""

    def __init__(self, fleet: Fleet, form: TurnFormat, envs: Sequence[Env], step: int, seeds: Sequence[int], group_size: int) -> None:
        self._fleet, self._form, self._envs, self._seeds = fleet, form, envs, seeds
        self._index = {f"s{step}.{i}": i for i in range(len(seeds) * group_size)}
        self._batch = RolloutBatch([Trajectory(name, group=i // group_size, index=i % group_size) for name, i in self._index.items()])
        self._rewards = [0.0] * len(self._index)
        self._tasks: set[asyncio.Task[None]] = set()
        self._live = len(self._index)
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def finish(self) -> RolloutBatch:
        """Play every trajectory to its end. Raises RunFailed: no executor can take a turn."""
        start = time.monotonic()
        for trajectory in self._batch.trajectories:
            await self._open(trajectory)
        self._fleet.listener = self
        self._dispatch()
        await self._over
        self._batch.rollout_s = time.monotonic() - start
        return self._batch

    def cancel(self) -> None:
        """Leave nothing behind: no task, and no trajectory in the scheduler."""
        self._fleet.listener = None
        for task in self._tasks:
            task.cancel()
        for trajectory in self._batch.trajectories:
            if trajectory.is_live and trajectory.state is not State.CREATED:
                self._fleet.scheduler.observe(TrajectoryEnded(trajectory.trajectory_id), time.monotonic())

    # ── the fleet's news ──

    def executor_ready(self) -> None:
        self._dispatch()

    def turns_displaced(self, trajectory_ids: list[str], reason: str) -> None:
        for trajectory_id in trajectory_ids:  # the scheduler has queued them again
            self._trajectory(trajectory_id).turn_lost(reason)
        self._dispatch()

    # ── turns ──

    def _trajectory(self, trajectory_id: str) -> Trajectory:
        return self._batch.trajectories[self._index[trajectory_id]]

    def _env(self, trajectory: Trajectory) -> Env:
        return self._envs[self._index[trajectory.trajectory_id]]

    async def _open(self, trajectory: Trajectory) -> None:
        observation = await self._env(trajectory).reset(self._seeds[trajectory.group])
        trajectory.open(self._form.encode(observation))
        self._ready(trajectory)

    def _ready(self, trajectory: Trajectory) -> None:
        self._fleet.scheduler.observe(TurnReady(trajectory.trajectory_id, len(trajectory.token_ids)), time.monotonic())

    def _dispatch(self) -> None:
        """Let the scheduler place what it can, one task per placed turn."""
        executors = self._fleet.executors
        for assignment in self._fleet.scheduler.plan(time.monotonic()):
            trajectory = self._trajectory(assignment.trajectory_id)
            request = self._form.request(trajectory)
            trajectory.start_turn(assignment.executor_id, request.request_id)  # at once: its executor may leave before the task runs
            task = asyncio.create_task(self._turn(trajectory, executors[assignment.executor_id], request))
            self._tasks.add(task)
            task.add_done_callback(self._task_ended)
        self._check_stuck()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._over.done():
            self._over.set_exception(error)
        self._check_stuck()

    def _check_stuck(self) -> None:
        """Nothing is in flight, yet the step is not over: every executor has left or is behind the required version."""
        if not self._tasks and self._live and not self._over.done():
            self._over.set_exception(
                RunFailed(
                    "no executor can take a turn", got=f"executors {sorted(self._fleet.executors)}", remedy="see logs/ in the run folder"
                )
            )

    async def _turn(self, trajectory: Trajectory, executor: Executor, request: GenerateRequest) -> None:
        start_s = time.time()
        if not trajectory.accepts(request.request_id):
            return
        try:
            result = await executor.client.generate(executor.executor_id, request, self._form.deadline_s)
        except ExecutorError as error:
            self._lost(trajectory, request.request_id, str(error), retry=not error.is_request_fault)
            if not error.is_request_fault:
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
        if (fault := answer_fault(request, result)) is not None:
            self._lost(trajectory, request.request_id, fault)
            self._fleet.turn_failed(executor, trajectory.trajectory_id, fault)
            return
        trajectory.turn_sampled(result.token_ids, result.logprobs, result.policy_versions)
        self._fleet.scheduler.observe(TurnEnded(trajectory.trajectory_id), time.monotonic())
        self._fleet.turn_ended(executor.executor_id)
        self._dispatch()  # its place is free now; the environment may take a while
        self._note(trajectory, executor, request, result, start_s)
        await self._act(trajectory, result.token_ids)

    def _note(self, trajectory: Trajectory, executor: Executor, request: GenerateRequest, result: GenerateResult, start_s: float) -> None:
        index = self._index[trajectory.trajectory_id]
        sizes = (len(request.prompt_token_ids), result.cached_tokens, len(result.token_ids), result.policy_versions[-1])
        self._batch.turns.append(TurnRecord(index, trajectory.turns - 1, executor.executor_id, executor.kind, start_s, time.time(), *sizes))

    async def _act(self, trajectory: Trajectory, token_ids: Sequence[int]) -> None:
        """Apply what the policy said; the trajectory ends, or its next turn is ready."""
        outcome = await self._env(trajectory).step(self._form.action(token_ids))
        index = self._index[trajectory.trajectory_id]
        self._rewards[index] += outcome.reward
        if outcome.done:
            trajectory.finish(self._rewards[index], outcome.success)
            self._ended(trajectory)
            return
        trajectory.observed(self._form.encode(outcome.observation))
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
        if retry and trajectory.tries < MAX_TRIES:
            self._ready(trajectory)
        else:
            trajectory.fail(reason)
            self._ended(trajectory)

    def _ended(self, trajectory: Trajectory) -> None:
        self._fleet.scheduler.observe(TrajectoryEnded(trajectory.trajectory_id), time.monotonic())
        self._batch.end_s[self._index[trajectory.trajectory_id]] = time.time()
        self._live -= 1
        if self._live == 0 and not self._over.done():
            self._over.set_result(None)
