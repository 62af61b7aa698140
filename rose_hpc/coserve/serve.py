"""A serving engine, and beside it the agent that lends its device: what `rose-hpc serve MODEL` runs.

    serving starts ─▶ up ─▶ agent starts, attached to it ─┬─ SIGTERM, SIGINT ─▶ agent ends, then serving: exit 0
                                  ▲                       ├─ serving ends ────▶ exit 1
                                  └── after a pause ──────┴─ agent ends

The agent is a process of its own (serving_agent.py): whatever becomes of it, users' requests go on, and the next one clears what it left.

On GPUs the MPS control daemon starts before serving and ends after it. It is this process's, not the agent's. Where it cannot be had,
serving goes on alone: users come first.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType

from rose_hpc.control import write_private
from rose_hpc.coserve.agent import say
from rose_hpc.coserve.processes import OwnedProcess
from rose_hpc.coserve.protection import in_thread
from rose_hpc.coserve.quota import GateOnly, Quota
from rose_hpc.coserve.quota.choice import NOT_TO_BE_HAD, choose_quota, is_gpu, resolved
from rose_hpc.coserve.serving_agent import terms_of
from rose_hpc.coserve.serving_process import MakeServer, ServingProcess
from rose_hpc.coserve.specs import AttachSpec, ServeSpec
from rose_hpc.errors import RunFailed
from rose_hpc.http_api import first_of, stop_signals

PAUSE_S = 1.0  # before an agent that ended starts again; doubles while it keeps ending
LONGEST_PAUSE_S = 60.0


class AgentProcess(OwnedProcess):
    """Async context manager: the operator's agent lives inside of it, started again whenever it ends."""

    def __init__(self, spec: ServeSpec, folder: Path) -> None:
        super().__init__("agent", spec.logs_dir / "agent.log", folder)
        self._spec_path = folder / "agent.json"
        write_private(self._spec_path, spec.model_dump_json())

    async def __aenter__(self) -> AgentProcess:
        await self._start_agent()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.stop()

    async def _start_agent(self) -> None:
        await self.start([sys.executable, "-m", "rose_hpc.coserve.serving_agent", str(self._spec_path)])

    async def kept_alive(self) -> None:
        """For ever. An agent that could work for a while has its next one soon."""
        pause_s = PAUSE_S
        while True:
            begin_s = time.monotonic()
            try:
                await self.ended()
            except RunFailed as failure:
                pause_s = PAUSE_S if time.monotonic() - begin_s > LONGEST_PAUSE_S else pause_s
                say(f"nothing is lent for {pause_s:g} s, serving goes on: {failure}")
            await asyncio.sleep(pause_s)
            await self._start_agent()
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


async def serve_and_lend(spec: ServeSpec, folder: Path, server_process: MakeServer = ServingProcess) -> int:
    """The exit status. folder: private. server_process: from its specification, its log and the environment that it needs.

    Raises ConfigError before anything starts, RunFailed when serving does not come up or ends.
    """
    terms_of(spec)
    stop = stop_signals()
    spec.logs_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    async with AsyncExitStack() as stack:
        spec, quota = await protected(spec)
        if quota is not None:
            stack.push_async_callback(in_thread, quota.close)
        environment = {} if quota is None else quota.serving_environment()
        server = await stack.enter_async_context(server_process(spec.serving, spec.logs_dir / "serving.log", environment))
        if await first_of(stop=stop.wait(), up=server.healthy()) == "stop":
            return 0
        say(f"serving {spec.serving.model_dir.name} at {spec.serving.url}; logs are in {spec.logs_dir}")
        lending = stop.wait() if quota is None else lend(spec, folder)
        await first_of(stop=stop.wait(), serving=server.ended(), lending=lending)
    return 0


async def protected(spec: ServeSpec) -> tuple[ServeSpec, Quota | None]:
    """What serving starts under, and what the agent is to know of it. None: nothing protects serving, and nothing is lent.

    On CPUs the quota is the agent's own. Raises ConfigError: no such GPU.
    """
    if not is_gpu(spec.gpu):
        return spec, GateOnly()
    try:
        gpu = spec.gpu if spec.gpu.gate_only else await in_thread(resolved, spec.gpu, spec.devices)
        return spec.model_copy(update={"gpu": gpu}), await in_thread(choose_quota, gpu, spec.devices)
    except NOT_TO_BE_HAD as error:
        say(f"nothing is lent, serving goes on: {error}")
        return spec, None


async def lend(spec: ServeSpec, folder: Path) -> None:
    """For ever: the agent beside the serving engine."""
    attach = AttachSpec(url=spec.serving.url, board=spec.serving.board, model=str(spec.serving.model_dir))
    async with AgentProcess(spec.model_copy(update={"attach": attach}), folder) as agent:
        await agent.kept_alive()
