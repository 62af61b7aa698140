"""The agent of a lent device: the operator's side of co-serving. Its process is agent_process.py."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from rose_hpc.coserve.agent import Agent, say
from rose_hpc.coserve.board import last_reading
from rose_hpc.coserve.device import Device
from rose_hpc.coserve.engine import device_cores, is_cpu_build
from rose_hpc.coserve.quota import GateOnly, best_quota
from rose_hpc.coserve.serving_process import ServingProcess
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
                                  │                   └─ rollout side failed ─▶ lend again, at most RESTARTS times
                                  └─ no board ─▶ serving alone

    Whatever befalls the rollout side, serving goes on until the operator ends it. A serving engine whose board cannot be read is not
    lent: no gate could protect it.
    """

    def __init__(self, spec: AgentSpec, folder: Path, rollout_side: Callable[[AgentSpec, Path, Device], RolloutSide] = Agent) -> None:
        if spec.serving is None:
            raise ConfigError("a lender needs a serving engine", got=spec.agent_id)
        self._spec, self._folder, self._serving_spec = spec, folder, spec.serving
        self._rollout_side = rollout_side

    async def run(self) -> int:
        """The exit status. Raises RunFailed when the serving engine does not come up or ends."""
        stop = stop_signals()
        async with ServingProcess(self._serving_spec, self._spec.logs_dir / "serving.log") as server:
            if await first_of(stop=stop.wait(), up=server.healthy()) == "stop":
                return 0
            device = self._device()
            try:
                device.serving_up(server.pid)
                say(f"serving is up; the rollout side is confined by {device.quota}")
                await first_of(stop=stop.wait(), serving=server.ended(), lending=self.lend(device, stop))
            finally:
                device.close()
        return 0

    def _device(self) -> Device:
        """On the CPU build the cores that stand for it, on others the GPU that the engines see."""
        spec = self._serving_spec
        quota = best_quota() if is_cpu_build() else GateOnly()
        return Device(self._spec.agent_id, device_cores(spec), quota, spec.board)

    async def lend(self, device: Device, stop: asyncio.Event, board_deadline_s: float = BOARD_DEADLINE_S) -> None:
        """Lend until the run is over; then wait for the operator. Raises nothing: serving depends on it."""
        if await board_shows(self._serving_spec.board, board_deadline_s):
            await self._stays(device, stop)
            say("the device is given back; serving goes on alone")
        await stop.wait()

    async def _stays(self, device: Device, stop: asyncio.Event) -> None:
        """One stay of the rollout side after the other, until one ends in good order or too many have failed."""
        for _ in range(1 + RESTARTS):
            try:
                await self._rollout_side(self._spec, self._folder, device).run(stop)
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
