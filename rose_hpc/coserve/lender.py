"""The agent of a lent device: the operator's side of co-serving. Its process is agent_process.py."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rose_hpc.coserve.agent import Agent, say
from rose_hpc.coserve.device import Device
from rose_hpc.coserve.engine import is_cpu_build
from rose_hpc.coserve.quota import GateOnly, best_quota
from rose_hpc.coserve.serving_process import ServingProcess
from rose_hpc.coserve.specs import AgentSpec
from rose_hpc.errors import ConfigError, RoseError
from rose_hpc.http_api import first_of, stop_signals

RESTARTS = 2  # of a rollout engine that died on a lent device


class Lender:
    """The agent of a lent device: a serving engine for good, and rollout engines on its device for as long as a run wants them.

        serving starts ─▶ device protected ─▶ lending ─┬─ lease expired, or the run is over ─▶ serving alone ─▶ SIGTERM: exit 0
                                                      └─ rollout engine died ─▶ lend again, at most RESTARTS times

    Whatever befalls the rollout side, serving goes on until the operator ends it.
    """

    def __init__(self, spec: AgentSpec, folder: Path) -> None:
        if spec.serving is None:
            raise ConfigError("a lender needs a serving engine", got=spec.agent_id)
        self._spec, self._folder, self._serving_spec = spec, folder, spec.serving

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
                await first_of(stop=stop.wait(), serving=server.ended(), lending=self._lend(device, stop))
            finally:
                device.close()
        return 0

    def _device(self) -> Device:
        """On the CPU build the cores that stand for it, on others the GPU that the engines see."""
        spec = self._serving_spec
        cpus, quota = (spec.device_cpus, best_quota()) if is_cpu_build() else ([], GateOnly())
        return Device(self._spec.agent_id, cpus, quota, spec.board)

    async def _lend(self, device: Device, stop: asyncio.Event) -> None:
        """Lend until the run is over; then wait for the operator."""
        for _ in range(1 + RESTARTS):
            try:
                await Agent(self._spec, self._folder, device).run(stop)
                break
            except RoseError as error:
                say(f"the rollout side failed, serving goes on: {error}")
        say("the device is given back; serving goes on alone")
        await stop.wait()
