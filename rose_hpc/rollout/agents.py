"""The agents of a run: they register, their executors join the fleet, their leases are renewed for as long as the run lives.

One renewal task per agent, so that a slow one delays nobody. An agent that has not answered for a whole lease has lost its
executors; when it, or a restarted engine of it, registers again, they join again. Device samples come with the renewals.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from rose_hpc.config import ControlConfig
from rose_hpc.errors import RunFailed
from rose_hpc.messages import AgentStatus, AgentUp
from rose_hpc.rollout.client import AgentClient, ExecutorError
from rose_hpc.rollout.fleet import Executor, Fleet

STOP_DEADLINE_S = 5.0


class AgentPool:
    """Use as an async context manager; on leaving, every agent is asked to stop.

    arrivals: greetings from the control API. on_join: called with every executor that joined. on_status: called with every answer.
    """

    def __init__(
        self,
        fleet: Fleet,
        arrivals: asyncio.Queue[AgentUp],
        token: str,
        config: ControlConfig,
        on_join: Callable[[Executor], None],
        on_status: Callable[[AgentStatus], None],
    ) -> None:
        self._fleet, self._arrivals, self._token, self._config = fleet, arrivals, token, config
        self._on_join, self._on_status = on_join, on_status
        self._clients: dict[str, AgentClient] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._joined = asyncio.Event()

    async def __aenter__(self) -> AgentPool:
        self._tasks[""] = asyncio.create_task(self._welcome())
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await asyncio.gather(*(self._dismiss(client) for client in self._clients.values()))

    async def wait_for(self, kind: str, count: int, deadline_s: float) -> bool:
        """Wait until so many executors of a kind are there. False when the deadline came first."""
        try:
            async with asyncio.timeout(deadline_s):
                while len(self._fleet.of_kind(kind)) < count:
                    self._raise_ended()
                    self._joined.clear()
                    await self._joined.wait()
        except TimeoutError:
            return False
        return True

    def _raise_ended(self) -> None:
        """A bug in the welcoming task must not look like a missing agent."""
        task = self._tasks[""]
        if task.done() and (error := task.exception()) is not None:
            raise RunFailed("agents cannot register any more", got=repr(error))

    async def _welcome(self) -> None:
        while True:
            agent = await self._arrivals.get()
            await self._replace(agent)
            for info in agent.executors:
                executor = Executor(info.executor_id, info.kind, self._clients[agent.agent_id])
                self._fleet.join(executor, info.max_concurrency)
                self._on_join(executor)
            self._joined.set()

    async def _replace(self, agent: AgentUp) -> None:
        """A client and a renewal task for this agent, instead of those of an earlier life of it."""
        if (old := self._tasks.pop(agent.agent_id, None)) is not None:
            old.cancel()
            await asyncio.gather(old, return_exceptions=True)
            await self._clients[agent.agent_id].close()
        self._clients[agent.agent_id] = AgentClient(agent, self._token)
        self._tasks[agent.agent_id] = asyncio.create_task(self._renew(self._clients[agent.agent_id]))

    async def _renew(self, client: AgentClient) -> None:
        heard_s = time.monotonic()
        while time.monotonic() - heard_s < self._config.lease_ttl_s:
            with contextlib.suppress(ExecutorError):
                status = await client.renew(self._config.lease_ttl_s)
                heard_s = time.monotonic()
                self._on_status(status)
                self._drop_missing(client, status)
            await asyncio.sleep(self._config.heartbeat_s)
        for info in client.executors:
            self._fleet.leave(info.executor_id, f"{client.agent.agent_id} is silent")

    def _drop_missing(self, client: AgentClient, status: AgentStatus) -> None:
        for info in client.executors:
            if info.executor_id not in status.executor_ids:
                self._fleet.leave(info.executor_id, "its engine ended")

    async def _dismiss(self, client: AgentClient) -> None:
        with contextlib.suppress(ExecutorError):
            await client.stop(STOP_DEADLINE_S)
        await client.close()
