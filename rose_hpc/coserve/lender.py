"""The agent of a lent device: the operator's side of co-serving. Its process is agent_process.py."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

from rose_hpc.coserve.agent import Agent, say
from rose_hpc.coserve.board import last_reading
from rose_hpc.coserve.device import Device
from rose_hpc.coserve.protection import in_thread, until_protected, while_protected
from rose_hpc.coserve.quota.choice import NOT_TO_BE_HAD, choose_quota, is_gpu
from rose_hpc.coserve.serving_process import MakeServer, ServingProcess
from rose_hpc.coserve.specs import AgentSpec
from rose_hpc.errors import ConfigError, RoseError
from rose_hpc.http_api import first_of, stop_signals

RESTARTS = 2  # of a rollout engine that died on a lent device
BOARD_DEADLINE_S = 10.0  # from the serving engine's first answer; its scheduler has published before that
BOARD_POLL_S = 0.1


class RolloutSide(Protocol):
    """One stay of the rollout side on the device: an Agent."""

    async def run(self, stop: asyncio.Event) -> int: ...


class Lender:
    """The agent of a lent device: a serving engine for good, and rollout engines on its device for as long as a run wants them.

        serving starts ─▶ device protected ─▶ lending ─┬─ lease expired, or the run is over ─▶ serving alone ─▶ SIGTERM: exit 0
                                  │                   └─ rollout side failed, or the quota ─▶ lend again once it is
                                  └─ no board, no quota ─▶ serving alone                     healthy, at most RESTARTS times

    Whatever befalls the rollout side, serving goes on until the operator ends it. A serving engine whose board cannot be read is not
    lent, as no gate could protect it, nor is one on a GPU without MPS, unless the operator says so (quota/choice.py).
    """

    def __init__(
        self,
        spec: AgentSpec,
        folder: Path,
        rollout_side: Callable[[AgentSpec, Path, Device], RolloutSide] = Agent,
        server_process: MakeServer = ServingProcess,
    ) -> None:
        if spec.serving is None:
            raise ConfigError("a lender needs a serving engine", got=spec.agent_id)
        self._spec, self._folder, self._serving_spec = spec, folder, spec.serving
        self._rollout_side, self._server_process = rollout_side, server_process

    async def run(self) -> int:
        """The exit status. Raises RunFailed when the serving engine does not come up or ends."""
        stop = stop_signals()
        async with AsyncExitStack() as stack:
            device = await self._device()
            if device is not None:
                stack.push_async_callback(in_thread, device.close)
            environment = {} if device is None else device.serving_environment()
            server_process = self._server_process(self._serving_spec, self._spec.logs_dir / "serving.log", environment)
            server = await stack.enter_async_context(server_process)
            if await first_of(stop=stop.wait(), up=server.healthy()) == "stop":
                return 0
            lending = stop.wait() if device is None else self._lend_beside(server.pid, device, stop)
            await first_of(stop=stop.wait(), serving=server.ended(), lending=lending)
        return 0

    async def _device(self) -> Device | None:
        """On the CPU build the cores that stand for it, on others the GPUs that the engines see. None: nothing would protect serving."""
        serving, gpu = self._serving_spec, self._spec.gpu
        try:
            quota = await in_thread(choose_quota, gpu, serving.engine.tensor_parallel)
        except NOT_TO_BE_HAD as error:
            say(f"the device is not lent, serving goes on: {error}")
            return None
        return Device(self._spec.agent_id, [] if is_gpu(gpu) else serving.device_cpus, quota, serving.board)

    async def _lend_beside(self, server_pid: int, device: Device, stop: asyncio.Event) -> None:
        try:
            await in_thread(device.serving_up, server_pid)
        except (RoseError, *NOT_TO_BE_HAD) as error:
            say(f"the device is not lent, serving goes on: {error}")
            await stop.wait()
            return
        say(f"serving is up; the rollout side is confined by {device.quota}")
        await self.lend(device, stop)

    async def lend(self, device: Device, stop: asyncio.Event, board_deadline_s: float = BOARD_DEADLINE_S) -> None:
        """Lend until the run is over; then wait for the operator. Raises nothing: serving depends on it."""
        if await board_shows(self._serving_spec.board, board_deadline_s):
            await self._stays(device, stop)
            say("the device is given back; serving goes on alone")
        await stop.wait()

    async def _stays(self, device: Device, stop: asyncio.Event) -> None:
        """One stay of the rollout side after the other, until one ends in good order or too many have failed."""
        for _ in range(1 + RESTARTS):
            await until_protected(device, lambda why: say(f"nothing is lent until serving is protected, serving goes on: {why}"))
            try:
                await first_of(over=self._rollout_side(self._spec, self._folder, device).run(stop), unprotected=while_protected(device))
                return
            except RoseError as error:
                say(f"the rollout side failed, serving goes on: {error}")
            except Exception:  # the edge between the operator's side and the run's: nothing of the run may end serving
                say(f"the rollout side failed, serving goes on: {traceback.format_exc()}")


async def board_shows(board: Path, deadline_s: float = BOARD_DEADLINE_S) -> bool:
    """Whether the serving engine has published on the board within the deadline. Raises nothing: serving depends on it."""
    try:
        async with asyncio.timeout(deadline_s):
            while not board_lives(board):
                await asyncio.sleep(BOARD_POLL_S)
        return True
    except TimeoutError:
        say(f"the device is not lent, serving goes on: nothing on the board {board} within {deadline_s:g} s")
    except (RoseError, OSError) as error:
        say(f"the device is not lent, serving goes on: the board cannot be read: {error}")
    return False


def board_lives(path: Path) -> bool:
    """Whether a process that lives has published there; a dead one's record says nothing. Raises RoseError, OSError: board.py."""
    reading = last_reading(path)
    return reading is not None and reading.writer.alive()
