"""The worker process: plays episodes of one environment, one call at a time, for the pool that owns it (pool.py).

    python -m rose_hpc.rollout.envs.worker         started by worker_process.py, with pipes as standard input and output

It holds one instance per slot, of as many slots as it is told, the most recently used ones, and continues its episode where the call
says that it stands; any other episode is played again from its recipe first, and must then say what it said before. What the
environment raises ends the episode, not the worker. What it prints goes to standard error: nothing but frames may reach the
controller. It ends when its input does, and dies with its controller; where memory runs out, the kernel ends it first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass

from rose_hpc.config import EnvConfig
from rose_hpc.errors import RoseError, UsageError
from rose_hpc.lifeline import die_with_parent, first_to_go
from rose_hpc.rollout.envs.base import Env, EnvFault, StepResult, checked, checked_observation
from rose_hpc.rollout.envs.registry import make_env
from rose_hpc.rollout.envs.worker_messages import (
    NOTHING_SEEN,
    Answer,
    Faulted,
    NotStarted,
    Play,
    Played,
    PlayedAgain,
    Started,
    WorkerSpec,
    frame,
    read_frame,
    saw,
)

NEVER = -1
MAX_REASON_CHARS = 500


@dataclass
class Instance:
    """An environment, and where its episode stands: actions played, and the digest of all that it said."""

    env: Env
    episode: int = NEVER
    played: int = 0
    seen: bytes = NOTHING_SEEN


class Stage:
    """All instances of one worker. make: what makes one. played_again: called after each action of a recipe."""

    def __init__(self, make: Callable[[], Env], played_again: Callable[[], None]) -> None:
        self._make, self._played_again = make, played_again
        self._instances: dict[int, Instance] = {}  # the least recently used one first

    async def play(self, play: Play) -> Answer:
        """What the last action led to. Never raises for what the environment did."""
        try:
            result = await self._play(play)
        except (Exception, SystemExit) as error:
            await self._drop(play.slot)
            return Faulted(_reason(error))
        return Played(result.observation, result.reward, result.done, result.success)

    async def close(self) -> None:
        """Close all instances."""
        for slot in list(self._instances):
            await self._drop(slot)

    async def _play(self, play: Play) -> StepResult:
        instance = self._instances.pop(play.slot, None)
        while self._instances and len(self._instances) >= play.instances:
            await self._drop(next(iter(self._instances)))
        if instance is None:
            instance = Instance(self._make())
        self._instances[play.slot] = instance
        if not play.actions:
            return await _begin(instance, play)
        if (instance.episode, instance.played, instance.seen) != (play.episode, len(play.actions) - 1, play.seen):
            await self._catch_up(instance, play)
        return await _act(instance, play.actions[-1])

    async def _catch_up(self, instance: Instance, play: Play) -> None:
        """Bring the instance to where the episode stands before its last action."""
        result = await _begin(instance, play)
        for action in play.actions[:-1]:
            self._played_again()
            if not result.done:
                result = await _act(instance, action)
        self._played_again()
        if result.done or instance.seen != play.seen:
            raise EnvFault(
                "an episode could not be taken up by another worker",
                got="other observations from the same seed and actions",
                expected="an environment that repeats itself",
            )

    async def _drop(self, slot: int) -> None:
        """Without the instance: the next episode gets a fresh one."""
        instance = self._instances.pop(slot, None)
        if instance is not None:
            with contextlib.suppress(Exception, SystemExit):
                await instance.env.close()


async def _begin(instance: Instance, play: Play) -> StepResult:
    instance.episode = NEVER
    observation = checked_observation(await instance.env.reset(play.seed))
    instance.episode, instance.played, instance.seen = play.episode, 0, saw(NOTHING_SEEN, observation)
    return StepResult(observation, 0.0, done=False, success=False)


async def _act(instance: Instance, action: str) -> StepResult:
    result = checked(await instance.env.step(action))
    instance.played += 1
    instance.seen = saw(instance.seen, result.observation)
    return result


def _reason(error: BaseException) -> str:
    text = str(error) if isinstance(error, EnvFault) else f"the environment raised {type(error).__name__}: {error}"
    return text.encode(errors="replace").decode()[:MAX_REASON_CHARS]


async def serve(reader: asyncio.StreamReader, write: Callable[[bytes], None]) -> None:
    """Greet, then answer until the input ends."""
    spec = await read_frame(reader, WorkerSpec)
    make = await _maker(EnvConfig.model_validate_json(spec.config))
    stage = Stage(make, lambda: write(frame(PlayedAgain())))
    write(frame(Started()))
    try:
        while True:
            write(frame(await stage.play(await read_frame(reader, Play))))
    except asyncio.IncompleteReadError:
        await stage.close()


async def _maker(config: EnvConfig) -> Callable[[], Env]:
    """What makes instances; one has been made, so that what is missing shows now."""
    await make_env(config).close()
    return lambda: make_env(config)


async def _main(in_fd: int, out_fd: int) -> int:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(in_fd, "rb"))

    def write(data: bytes) -> None:
        while data:
            data = data[os.write(out_fd, data) :]

    try:
        await serve(reader, write)
    except (Exception, SystemExit) as error:
        write(frame(NotStarted(str(error) if isinstance(error, RoseError) else _reason(error), isinstance(error, UsageError))))
        return 1
    return 0


def main() -> int:
    """Process entry."""
    die_with_parent(signal.SIGKILL)
    first_to_go()
    in_fd, out_fd = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return asyncio.run(_main(in_fd, out_fd))


if __name__ == "__main__":
    sys.exit(main())
