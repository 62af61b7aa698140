"""The controller's end of one worker process: started when first needed, killed when it no longer makes sense, started again.

    absent ──play──▶ starting ──Started──▶ ready ⇄ playing ──hang, death, rubbish──▶ absent        (EnvFault for that call)
                        └─NotStarted, deadline─▶ absent                                            (RoseError: no environment)

One call at a time. A worker leads a process group of its own, which is killed whole: it holds nothing that could be lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from typing import Any

from rose_hpc.config import EnvConfig
from rose_hpc.errors import ControlError, RunFailed, UsageError
from rose_hpc.lifeline import parent_variable
from rose_hpc.rollout.envs.base import EnvFault
from rose_hpc.rollout.envs.worker_messages import (
    Answer,
    AnswerOrProgress,
    Greeting,
    NotStarted,
    Play,
    PlayedAgain,
    WorkerSpec,
    frame,
    read_frame,
)

KILL_DEADLINE_S = 5.0  # a killed process may hang in the kernel; it is not waited for any longer
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # there are as many workers as cores are meant for them
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",  # what follows from the order in a set must be the same in every worker
}


class WorkerProcess:
    """The state machine of the module docstring. Used by one task at a time, which also kills it in the end."""

    def __init__(self, config: EnvConfig) -> None:
        self._config = config
        self._process: Process | None = None

    @property
    def pid(self) -> int | None:
        """None while there is no process."""
        return None if self._process is None else self._process.pid

    async def play(self, play: Play) -> Answer:
        """What the worker says. Raises EnvFault: it hung, died or said rubbish, and is gone; RoseError: no worker could be started."""
        if self._process is None or self._process.returncode is not None:  # it died between two calls: nobody's fault
            await self.kill()
            await self._start()
        question, deadline_s = frame(play), self._config.deadline_s
        try:
            answer: Answer | PlayedAgain = await self._ask(question, AnswerOrProgress, deadline_s)
            while isinstance(answer, PlayedAgain):
                answer = await self._ask(b"", AnswerOrProgress, deadline_s)
            return answer
        except TimeoutError:
            fault = EnvFault("an environment hung", got=f"no answer in {deadline_s:g} s", remedy="raise env.deadline_s if it is only slow")
        except (asyncio.IncompleteReadError, ConnectionError):
            fault = EnvFault("an environment's process ended", got=await self._status())
        except ControlError as error:
            fault = EnvFault("an environment's process said what is no answer", got=f"{error.what}: {error.got}")
        await self.kill()
        raise fault

    async def kill(self) -> None:
        """End the process and all that it started; harmless where there is none."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), KILL_DEADLINE_S)
        assert process.stdin is not None
        process.stdin.close()

    async def _start(self) -> None:
        """A process that can make the environment. Raises UsageError, RunFailed; there is no process then."""
        try:
            self._process = await self._spawn()
        except OSError as error:
            raise UsageError(
                "the workers' Python cannot be started", got=f"env.python = {self._config.python}: {error.strerror}"
            ) from error
        try:
            greeting = await self._greeting()
        except BaseException:
            await self.kill()
            raise
        if isinstance(greeting, NotStarted):
            await self.kill()
            raise (UsageError if greeting.usage else RunFailed)(f"the environment {self._config.name} cannot be made: {greeting.what}")

    async def _spawn(self) -> Process:
        return await asyncio.create_subprocess_exec(
            *(str(self._config.python or sys.executable), "-m", "rose_hpc.rollout.envs.worker"),
            stdin=PIPE,
            stdout=PIPE,
            process_group=0,
            env={**os.environ, **ENVIRONMENT, **parent_variable()},
        )

    async def _greeting(self) -> Greeting:
        try:
            spec = WorkerSpec(self._config.model_dump_json())
            greeting: Greeting = await self._ask(frame(spec), Greeting, self._config.start_deadline_s)
            return greeting
        except TimeoutError:
            what = f"nothing in {self._config.start_deadline_s:g} s"
        except (asyncio.IncompleteReadError, ConnectionError):
            what = await self._status()
        except ControlError as error:
            what = f"{error.what}: {error.got}"
        raise RunFailed("a worker for environments did not start", got=what, remedy="see what it printed, in the controller's log")

    async def _ask(self, question: bytes, kind: Any, deadline_s: float) -> Any:
        """A message of that kind, or of that union of kinds, in time. Raises TimeoutError, and as `read_frame` and writing do."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        async with asyncio.timeout(deadline_s):
            process.stdin.write(question)
            await process.stdin.drain()
            return await read_frame(process.stdout, kind)

    async def _status(self) -> str:
        """How the process ended, in words."""
        assert self._process is not None
        try:
            status = await asyncio.wait_for(self._process.wait(), KILL_DEADLINE_S)
        except TimeoutError:
            return "its output is closed, but it has not ended"
        return f"status {status}" if status >= 0 else f"signal {-status}"
