"""Environments in worker processes: many episodes, few processes, and each fault costs its own episode only.

    PooledEnv ──Play──▶ its worker's backlog, else the common one ──▶ WorkerProcess, one call at a time ──▶ StepResult | EnvFault

A call holds its episode's whole recipe (seed and actions), so that any worker can take it: the one that played the episode last only
plays on; another plays it again first. What follows from that, and is asserted by the tests:
- a worker that hangs, dies or says rubbish ends the episode it was playing, is killed, and its other episodes go on in the next one;
- a call that takes long does not hold up the other episodes of its worker: after PATIENCE_S they go elsewhere;
- a worker keeps as many instances as there are episodes that it played last, and SPARE_INSTANCES: an episode that moved on leaves none;
- an episode that does not repeat itself ends with an EnvFault, never with wrong observations.

No worker that can make the environment is not the fault of an episode: the error (UsageError, RunFailed) goes to whoever asked.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from dataclasses import dataclass, field

from msgspec import structs

from rose_hpc.config import EnvConfig
from rose_hpc.errors import RunFailed
from rose_hpc.rollout.envs.base import EnvFault, StepResult, checked, outside_an_episode
from rose_hpc.rollout.envs.worker_messages import NOTHING_SEEN, Faulted, Play, saw
from rose_hpc.rollout.envs.worker_process import WorkerProcess

SPARE_INSTANCES = 4  # so that one which has moved on goes before one which only rests
PATIENCE_S = 1.0  # after that, whoever waits behind a call goes to another worker


@dataclass(eq=False)
class _Call:
    """number: in the order of asking."""

    number: int
    play: Play
    answer: asyncio.Future[StepResult]


@dataclass(eq=False)
class _Worker:
    """One worker and the calls that wait for it. held_up: its call takes longer than PATIENCE_S."""

    process: WorkerProcess
    backlog: deque[_Call] = field(default_factory=deque)
    held_up: bool = False
    task: asyncio.Task[None] | None = None


class EnvPool:
    """All workers of one environment. Starts them with the first call; `close` ends them."""

    def __init__(self, config: EnvConfig) -> None:
        self._workers = [_Worker(WorkerProcess(config)) for _ in range(config.workers)]
        self._common: deque[_Call] = deque()
        self._homes: dict[int, _Worker] = {}  # slot → who played its episode last
        self._at_home: Counter[_Worker] = Counter()  # slots by home
        self._numbers = itertools.count()
        self._asked = asyncio.Event()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Of the processes that there are."""
        return [pid for w in self._workers if (pid := w.process.pid) is not None]

    async def play(self, play: Play) -> StepResult:
        """What the last action of the recipe led to. Raises EnvFault: this episode is over; RoseError: there is no worker."""
        if self._closed:
            raise RunFailed("the environments are closed", got="a call", expected="none after close")
        call = _Call(next(self._numbers), play, asyncio.get_running_loop().create_future())
        home = self._homes.get(play.slot)
        (self._common if home is None or home.held_up else home.backlog).append(call)
        self._wake()
        return await call.answer

    def forget(self, slot: int) -> None:
        """The slot is no longer used."""
        if (home := self._homes.pop(slot, None)) is not None:
            self._at_home[home] -= 1

    def _move_in(self, slot: int, worker: _Worker) -> None:
        self.forget(slot)
        self._homes[slot] = worker
        self._at_home[worker] += 1

    async def close(self) -> None:
        """Kill the workers; whoever still waits gets RunFailed."""
        self._closed = True
        tasks = [w.task for w in self._workers if w.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for worker in self._workers:
            await worker.process.kill()
        for call in itertools.chain(self._common, *(w.backlog for w in self._workers)):
            _fail(call, RunFailed("the environments were closed", got="an unanswered call"))

    def _wake(self) -> None:
        self._asked.set()
        for worker in self._workers:
            if worker.task is None:
                worker.task = asyncio.create_task(self._serve(worker))

    async def _serve(self, worker: _Worker) -> None:
        """One worker's life: call after call."""
        while True:
            call = self._next(worker)
            if call is None:
                self._asked.clear()
                await self._asked.wait()
            elif not call.answer.done():  # else whoever asked has gone
                await self._answer(worker, call)

    def _next(self, worker: _Worker) -> _Call | None:
        """The oldest call that this worker may take."""
        queues = [queue for queue in (worker.backlog, self._common) if queue]
        return min(queues, key=lambda queue: queue[0].number).popleft() if queues else None

    async def _answer(self, worker: _Worker, call: _Call) -> None:
        self._move_in(call.play.slot, worker)
        play = structs.replace(call.play, instances=self._at_home[worker] + SPARE_INSTANCES)
        impatience = asyncio.get_running_loop().call_later(PATIENCE_S, self._hold_up, worker)
        try:
            answer = await worker.process.play(play)
            if isinstance(answer, Faulted):
                raise EnvFault(answer.reason)
            result = checked(StepResult(answer.observation, answer.reward, answer.done, answer.success))
        except asyncio.CancelledError:
            _fail(call, RunFailed("the environments were closed", got="a call in flight"))
            raise
        except Exception as error:  # whatever it is, it is for whoever asked: this worker's other calls must be answered
            _fail(call, error)
        else:
            if not call.answer.done():
                call.answer.set_result(result)
        finally:
            impatience.cancel()
            worker.held_up = False

    def _hold_up(self, worker: _Worker) -> None:
        """Let others take what waits for this worker."""
        worker.held_up = True
        self._common.extend(worker.backlog)
        worker.backlog.clear()
        self._asked.set()


def _fail(call: _Call, error: Exception) -> None:
    if not call.answer.done():
        call.answer.set_exception(error)


class PooledEnv:
    """`Env` whose episodes are played by a pool's workers. Holds the recipe of the episode that is played."""

    def __init__(self, pool: EnvPool, slot: int) -> None:
        self._pool, self._slot = pool, slot
        self._episodes = itertools.count()
        self._play: Play | None = None  # the recipe so far, and what was seen along it

    async def reset(self, seed: int) -> str:
        """See Env.reset."""
        self._play = None
        begin = Play(self._slot, next(self._episodes), seed, [], NOTHING_SEEN)
        result = await self._pool.play(begin)
        self._note(begin, result)
        return result.observation

    async def step(self, action: str) -> StepResult:
        """See Env.step."""
        if self._play is None:
            raise outside_an_episode("an environment")
        before, self._play = self._play, None
        play = Play(before.slot, before.episode, before.seed, [*before.actions, action], before.seen)
        result = await self._pool.play(play)
        if not result.done:
            self._note(play, result)
        return result

    async def close(self) -> None:
        """See Env.close. The workers end with the pool."""
        self._play = None
        self._pool.forget(self._slot)

    def _note(self, play: Play, result: StepResult) -> None:
        self._play = Play(play.slot, play.episode, play.seed, play.actions, saw(play.seen, result.observation))
