"""Environments that misbehave on command, for the workers of test_pool.py, which import this module by name.

The action says how: one of those in `act`, or in RUBBISH. Any other is taken as a good one; "end" ends the episode.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rose_hpc.config import EnvConfig
from rose_hpc.rollout.envs.base import MAX_OBSERVATION_CHARS, StepResult


class Counting:
    """Repeats itself: says the seed, how many actions there were, and its process. Does what the action says."""

    def __init__(self, config: EnvConfig) -> None:
        self._options, self._told = config.options, ""

    async def reset(self, seed: int) -> str:
        self._seed, self._count = seed, 0
        if seed == self._options.get("hang_at_seed"):
            time.sleep(3600)
        return f"seed {seed}"

    async def step(self, action: str) -> StepResult:
        self._count += 1
        self._note(action)
        if action in RUBBISH:
            return RUBBISH[action]()
        await act(action)
        return StepResult(f"seed {self._seed}, {self._count} actions", 0.5, done=action == "end", success=False)

    async def close(self) -> None:
        pass

    def _note(self, action: str) -> None:
        """So that a test sees what was played where."""
        if "log" in self._options:
            with Path(self._options["log"]).open("a") as log:
                log.write(f"{os.getpid()} {self._seed} {action}\n")


class Forgetful(Counting):
    """Does not repeat itself: it says which process it is."""

    async def step(self, action: str) -> StepResult:
        result = await super().step(action)
        return StepResult(f"process {os.getpid()}", result.reward, result.done, result.success)


class WithChild(Counting):
    """Starts a process of its own, whose pid it says."""

    async def reset(self, seed: int) -> str:
        await super().reset(seed)
        return str(subprocess.Popen(["sleep", "3600"]).pid)


async def act(action: str) -> None:
    """The misbehaviour of that name, if any."""
    match action:
        case "hang":
            time.sleep(3600)
        case "wait":
            await asyncio.Event().wait()
        case "ignore":
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            time.sleep(3600)
        case "slow":
            time.sleep(3)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "crash":
            os._exit(3)
        case "raise":
            raise RuntimeError("the moon is full")
        case "exit":
            sys.exit("enough")
        case "print":
            print("to standard output", flush=True)
            os.write(1, b"\x00\xff and past Python")


RUBBISH: dict[str, Any] = {
    "number": lambda: StepResult(17, 0.0, done=False, success=False),  # type: ignore[arg-type]
    "bytes": lambda: StepResult(b"text", 0.0, done=False, success=False),  # type: ignore[arg-type]
    "nan": lambda: StepResult("fine", math.nan, done=False, success=False),
    "infinite": lambda: StepResult("fine", math.inf, done=False, success=False),
    "word reward": lambda: StepResult("fine", "1", done=False, success=False),  # type: ignore[arg-type]
    "blank": lambda: StepResult(" \n", 0.0, done=False, success=False),
    "huge": lambda: StepResult("x" * (MAX_OBSERVATION_CHARS + 1), 0.0, done=False, success=False),
    "surrogate": lambda: StepResult("\ud800", 0.0, done=False, success=False),
    "contradict": lambda: StepResult("fine", 1.0, done=False, success=True),
    "maybe": lambda: StepResult("fine", 1.0, done=None, success=False),  # type: ignore[arg-type]
    "none": lambda: None,
    "tuple": lambda: ("fine", 0.0, False, False),
}


def unmakeable(config: EnvConfig) -> Counting:
    raise ValueError("there is no data")


def endless(config: EnvConfig) -> Counting:
    time.sleep(3600)
    raise AssertionError
