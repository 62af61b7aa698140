"""The agents of a run: they register, their executors join the fleet, their leases are renewed for as long as the run lives.

One renewal task per agent, so that a slow one delays nobody. An agent that has not answered for a whole lease has lost its
executors; when it, or a restarted engine of it, registers again, they join again. Device samples come with the renewals.

An opportunistic executor that the fleet has taken out (turns lost, an update failed) holds its lent device for nothing. While its
agent still lists it, it joins again after REJOIN_S, at most MAX_REJOINS times in a life of its agent; after that it stays out.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable

from rose_hpc.config import ControlConfig
from rose_hpc.messages import AgentStatus, AgentUp, ExecutorInfo
from rose_hpc.rollout.background import Background
from rose_hpc.rollout.client import AgentClient, ExecutorError
from rose_hpc.rollout.fleet import Executor, Fleet

STOP_DEADLINE_S = 5.0
RENEWAL_DEADLINE_S = 2.0  # of one renewal, or the heartbeat where that is longer: one that hangs must not cost the lease
REJOIN_S = 10.0  # pause before an executor that was taken out may join again
MAX_REJOINS = 5  # in a life of its agent
REJOINING = "opportunistic"  # the kind; a dedicated executor has nobody to bring it weights in the middle of a step


class Absences:
    """When an executor that was taken out may join again. Pure: now_s is any clock that goes forward."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._since_s: dict[str, float] = {}
        self._rejoins: Counter[str] = Counter()

    def is_due(self, executor_id: str, now_s: float) -> bool:
        """It is out: may it join again now? True counts as joining again."""
        absent_s = now_s - self._since_s.setdefault(executor_id, now_s)
        if absent_s < self._pause_s or self._rejoins[executor_id] >= MAX_REJOINS:
            return False
        del self._since_s[executor_id]
        self._rejoins[executor_id] += 1
        return True


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
        background: Background,
        on_join: Callable[[Executor], None],
        on_status: Callable[[AgentStatus], None],
        rejoin_s: float = REJOIN_S,
    ) -> None:
        self._fleet, self._arrivals, self._token, self._config = fleet, arrivals, token, config
        self._background, self._on_join, self._on_status, self._rejoin_s = background, on_join, on_status, rejoin_s
        self._clients: dict[str, AgentClient] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._joined = asyncio.Event()

    async def __aenter__(self) -> AgentPool:
        self._tasks[""] = self._background.spawn(self._welcome(), "welcoming agents")
        self._tasks[""].add_done_callback(lambda _: self._joined.set())  # whoever waits for agents must notice
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await asyncio.gather(*(self._dismiss(client) for client in self._clients.values()))

    async def wait_for(self, kind: str, count: int, deadline_s: float) -> bool:
        """Wait until so many executors of a kind are there. False when the deadline came first.

        Raises RunFailed as soon as agents cannot register any more: a bug must not look like a missing agent.
        """
        try:
            async with asyncio.timeout(deadline_s):
                while len(self._fleet.of_kind(kind)) < count:
                    self._background.raise_failure()
                    self._joined.clear()
                    await self._joined.wait()
        except TimeoutError:
            return False
        return True

    async def _welcome(self) -> None:
        while True:
            agent = await self._arrivals.get()
            await self._replace(agent)
            for info in agent.executors:
                self._join(self._clients[agent.agent_id], info)
            self._joined.set()

    def _join(self, client: AgentClient, info: ExecutorInfo) -> None:
        executor = Executor(info.executor_id, info.kind, client, info.relay)
        self._fleet.join(executor, info.max_concurrency)
        self._on_join(executor)

    async def _replace(self, agent: AgentUp) -> None:
        """A client and a renewal task for this agent, instead of those of an earlier life of it."""
        if (old := self._tasks.pop(agent.agent_id, None)) is not None:
            old.cancel()
            await asyncio.gather(old, return_exceptions=True)
            await self._clients[agent.agent_id].close()
        self._clients[agent.agent_id] = AgentClient(agent, agent.token or self._token)
        self._tasks[agent.agent_id] = self._background.spawn(
            self._renew(self._clients[agent.agent_id]), f"renewing the lease of {agent.agent_id}"
        )

    async def _renew(self, client: AgentClient) -> None:
        heard_s, absences = time.monotonic(), Absences(self._rejoin_s)
        deadline_s = min(self._config.lease_ttl_s, max(self._config.heartbeat_s, RENEWAL_DEADLINE_S))
        while time.monotonic() - heard_s < self._config.lease_ttl_s:
            with contextlib.suppress(ExecutorError):
                status = await client.renew(self._config.lease_ttl_s, deadline_s)
                heard_s = time.monotonic()
                self._on_status(status)
                self._drop_missing(client, status)
                self._rejoin(client, status, absences)
            await asyncio.sleep(self._config.heartbeat_s)
        for info in client.executors:
            self._fleet.leave(info.executor_id, f"{client.agent.agent_id} is silent")

    def _drop_missing(self, client: AgentClient, status: AgentStatus) -> None:
        for info in client.executors:
            if info.executor_id not in status.executor_ids:
                self._fleet.leave(info.executor_id, "its engine ended")

    def _rejoin(self, client: AgentClient, status: AgentStatus, absences: Absences) -> None:
        """Those that the agent still has, but the fleet has taken out."""
        for info in client.executors:
            is_out = info.executor_id in status.executor_ids and info.executor_id not in self._fleet.executors
            if is_out and info.kind == REJOINING and absences.is_due(info.executor_id, time.monotonic()):
                self._join(client, info)

    async def _dismiss(self, client: AgentClient) -> None:
        with contextlib.suppress(ExecutorError):
            await client.stop(STOP_DEADLINE_S)
        await client.close()
