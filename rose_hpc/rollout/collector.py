"""Collects one step's trajectories: drives the pure scheduler and the trajectories' state machines over real executors.

    collector = Collector(executors, scheduler, tokenizer, env_config, sampling, …)
    batch = await collector.collect(step, policy_version, seeds)

Every turn is one task: send, wait, step the environment. When a turn ends, the scheduler plans again. A lost turn (executor
gone, time-out, abort) goes back to the scheduler under a new request id with all earlier tokens kept; after MAX_TRIES its
trajectory fails, alone. The batch is complete when every trajectory has ended, each exactly once.

Decides nothing about routing (scheduler.py) nor about what is trained (sampling.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rose_hpc.config import EnvConfig, SamplingConfig
from rose_hpc.errors import RunFailed
from rose_hpc.messages import GenerateRequest, GenerateResult
from rose_hpc.rollout.client import AgentClient, ExecutorError
from rose_hpc.rollout.envs.base import Env, make_env
from rose_hpc.rollout.scheduler import ExecutorLeft, RolloutScheduler, TrajectoryEnded, TurnEnded, TurnReady
from rose_hpc.rollout.tokenizer import TurnTokenizer
from rose_hpc.rollout.trajectories import Trajectory

MAX_TRIES = 3  # of one turn, before its trajectory fails
FAILURES_BEFORE_LEAVING = 3  # lost turns in a row after which an executor is taken out


@dataclass(frozen=True)
class Executor:
    """An executor as the collector reaches it."""

    executor_id: str
    kind: str
    client: AgentClient


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


class Collector:
    """One per run; one `collect` at a time."""

    def __init__(
        self,
        executors: dict[str, Executor],
        scheduler: RolloutScheduler,
        tokenizer: TurnTokenizer,
        env_config: EnvConfig,
        sampling: SamplingConfig,
        max_model_len: int,
        request_deadline_s: float,
        on_executor_lost: Callable[[str, str], None],
    ) -> None:
        self._executors, self._scheduler, self.tokenizer = executors, scheduler, tokenizer
        self._sampling, self._max_model_len, self._deadline_s = sampling, max_model_len, request_deadline_s
        self._on_executor_lost = on_executor_lost
        self._env_config = env_config
        self._envs: list[Env] = []
        self._strikes: dict[str, int] = {}

    async def collect(self, step: int, seeds: Sequence[int]) -> RolloutBatch:
        """Sample seeds × group_size trajectories; seeds: one environment seed per group. Raises RunFailed: no executor is left."""
        step_run = _StepRun(self, step, seeds)
        try:
            return await step_run.finish()
        finally:
            step_run.cancel()

    async def close(self) -> None:
        for env in self._envs:
            await env.close()

    # ── used by _StepRun ──

    def env(self, index: int) -> Env:
        """The environment of the step's index-th trajectory, kept from step to step."""
        while len(self._envs) <= index:
            self._envs.append(make_env(self._env_config))
        return self._envs[index]

    def room_for_turn(self, trajectory: Trajectory) -> bool:
        return len(trajectory.token_ids) + self._sampling.max_new_tokens <= self._max_model_len

    def request(self, trajectory: Trajectory) -> GenerateRequest:
        return GenerateRequest(
            request_id=trajectory.next_request_id(),
            prompt_token_ids=list(trajectory.token_ids),
            max_new_tokens=self._sampling.max_new_tokens,
            temperature=self._sampling.temperature,
            stop_token_ids=[self.tokenizer.eos_token_id],
        )

    async def generate(self, executor: Executor, request: GenerateRequest) -> GenerateResult:
        result = await executor.client.generate(executor.executor_id, request, self._deadline_s)
        if result.finish_reason == "abort" or not result.token_ids:
            raise ExecutorError(f"{executor.executor_id} gave up {request.request_id}", got=result.finish_reason)
        self._strikes[executor.executor_id] = 0
        return result

    def strike(self, executor_id: str, reason: str) -> bool:
        """Count a lost turn; True when the executor has just been taken out."""
        self._strikes[executor_id] = self._strikes.get(executor_id, 0) + 1
        if self._strikes[executor_id] < FAILURES_BEFORE_LEAVING or self._executors.pop(executor_id, None) is None:
            return False
        self._on_executor_lost(executor_id, reason)
        return True

    @property
    def executors(self) -> dict[str, Executor]:
        return self._executors

    @property
    def scheduler(self) -> RolloutScheduler:
        return self._scheduler

    @property
    def group_size(self) -> int:
        return self._sampling.group_size


class _StepRun:
    """The tasks of one collect()."""

    def __init__(self, collector: Collector, step: int, seeds: Sequence[int]) -> None:
        self._c, self._seeds = collector, seeds
        size = collector.group_size
        self._prefix = f"s{step}."
        self._index = {f"{self._prefix}{i}": i for i in range(len(seeds) * size)}
        self._batch = RolloutBatch([Trajectory(name, group=i // size, index=i % size) for name, i in self._index.items()])
        self._rewards = [0.0] * len(self._index)
        self._tasks: set[asyncio.Task[None]] = set()
        self._live = len(self._index)
        self._over = asyncio.get_running_loop().create_future()

    async def finish(self) -> RolloutBatch:
        start = time.monotonic()
        for trajectory in self._batch.trajectories:
            await self._open(trajectory)
        self._dispatch()
        await self._over
        self._batch.rollout_s = time.monotonic() - start
        return self._batch

    def cancel(self) -> None:
        """Leave nothing behind: no task, and no trajectory in the scheduler."""
        for task in self._tasks:
            task.cancel()
        for trajectory in self._batch.trajectories:
            if trajectory.is_live and trajectory.turns + len(trajectory.token_ids) > 0:
                self._c.scheduler.observe(TrajectoryEnded(trajectory.trajectory_id), time.monotonic())

    async def _open(self, trajectory: Trajectory) -> None:
        observation = await self._env(trajectory).reset(self._seeds[trajectory.group])
        trajectory.open(self._c.tokenizer.encode(observation))
        self._ready(trajectory)

    def _env(self, trajectory: Trajectory) -> Env:
        return self._c.env(self._index[trajectory.trajectory_id])

    def _ready(self, trajectory: Trajectory) -> None:
        self._c.scheduler.observe(TurnReady(trajectory.trajectory_id, len(trajectory.token_ids)), time.monotonic())

    def _dispatch(self) -> None:
        """Let the scheduler place what it can, one task per placed turn."""
        for assignment in self._c.scheduler.plan(time.monotonic()):
            trajectory = self._batch.trajectories[self._index[assignment.trajectory_id]]
            request = self._c.request(trajectory)
            trajectory.start_turn(assignment.executor_id, request.request_id)  # at once: its executor may leave before the task runs
            task = asyncio.create_task(self._turn(trajectory, self._c.executors[assignment.executor_id], request))
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
            left = sorted(self._c.executors)
            self._over.set_exception(
                RunFailed("no executor can take a turn", got=f"executors {left}", remedy="see the engines' logs in the run folder")
            )

    async def _turn(self, trajectory: Trajectory, executor: Executor, request: GenerateRequest) -> None:
        start_s = time.time()
        if not trajectory.accepts(request.request_id):
            return
        try:
            result = await self._c.generate(executor, request)
        except ExecutorError as error:
            self._lost(trajectory, executor, request.request_id, str(error))
        else:
            if trajectory.accepts(request.request_id):
                await self._sampled(trajectory, executor, request, result, start_s)
        self._dispatch()

    async def _sampled(
        self, trajectory: Trajectory, executor: Executor, request: GenerateRequest, result: GenerateResult, start_s: float
    ) -> None:
        trajectory.turn_sampled(result.token_ids, result.logprobs, result.policy_versions)
        self._c.scheduler.observe(TurnEnded(trajectory.trajectory_id), time.monotonic())
        self._dispatch()  # its place is free now; the environment may take a while
        index = self._index[trajectory.trajectory_id]
        sizes = (len(request.prompt_token_ids), result.cached_tokens, len(result.token_ids), result.policy_versions[-1])
        self._batch.turns.append(TurnRecord(index, trajectory.turns - 1, executor.executor_id, executor.kind, start_s, time.time(), *sizes))
        outcome = await self._env(trajectory).step(self._c.tokenizer.action(result.token_ids))
        self._rewards[index] += outcome.reward
        if outcome.done:
            trajectory.finish(self._rewards[index], outcome.success)
            self._ended(trajectory)
            return
        trajectory.observed(self._c.tokenizer.encode(outcome.observation))
        if self._c.room_for_turn(trajectory):
            self._ready(trajectory)
        else:
            trajectory.fail("the context is full")
            self._ended(trajectory)

    def _lost(self, trajectory: Trajectory, executor: Executor, request_id: str, reason: str) -> None:
        """The try of a turn failed. The trajectory may try again; an executor that keeps failing leaves."""
        if trajectory.accepts(request_id):
            trajectory.turn_lost(reason)
            self._c.scheduler.observe(TurnEnded(trajectory.trajectory_id, holds_prefix=False), time.monotonic())
            if trajectory.tries >= MAX_TRIES:
                trajectory.fail(reason)
                self._ended(trajectory)
            else:
                self._ready(trajectory)
        if self._c.strike(executor.executor_id, reason):
            for trajectory_id in self._c.scheduler.observe(ExecutorLeft(executor.executor_id), time.monotonic()):
                self._batch.trajectories[self._index[trajectory_id]].turn_lost(f"{executor.executor_id} left")

    def _ended(self, trajectory: Trajectory) -> None:
        self._c.scheduler.observe(TrajectoryEnded(trajectory.trajectory_id), time.monotonic())
        self._batch.end_s[self._index[trajectory.trajectory_id]] = time.time()
        self._live -= 1
        if self._live == 0 and not self._over.done():
            self._over.set_result(None)
