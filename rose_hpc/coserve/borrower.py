"""Keeps a run supplied with leases: finds agents that lend, asks, waits for their engines, and hands each over to the run.

    registry ──can_grant───▶ ask ─┬─ refused ─▶ not again for PAUSE_S
                                  └─ granted ─▶ until up, renewing ─▶ hand over ─▶ watch ─▶ over ─▶ the next candidate

At most `wanted` leases at a time, one per agent. Once a lease is handed over the run renews it, and nobody else: when the run falls
silent, the lease expires, whatever becomes of this. What it holds but could not hand over it releases when it is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from rose_hpc.coserve.lease_client import LeaseClient, Refusal, can_grant, lending_most
from rose_hpc.coserve.lease_messages import LeaseAsk, LeaseGranted
from rose_hpc.coserve.registry import AgentEntry, Registry
from rose_hpc.messages import AgentUp

PAUSE_S = 10.0  # before an agent that refused, or whose lease is over, is asked again
LOOK_S = 1.0
log = logging.getLogger(__name__)

HandOver = Callable[[AgentUp, LeaseGranted], Awaitable[None]]


class Borrower:
    """See the module's docstring. make_ask: the question to one agent, with an executor id of its own; hand_over: the run takes it."""

    def __init__(
        self,
        registry: Registry,
        wanted: int,
        make_ask: Callable[[str], LeaseAsk],
        hand_over: HandOver,
        up_deadline_s: float = 300.0,
        pause_s: float = PAUSE_S,
    ) -> None:
        self._registry, self._wanted, self._make_ask, self._hand_over = registry, wanted, make_ask, hand_over
        self._up_deadline_s, self._pause_s = up_deadline_s, pause_s
        self._not_before_s: dict[str, float] = {}
        self._leases: dict[str, asyncio.Task[None]] = {}

    @property
    def held(self) -> list[str]:
        """Names of the agents that lend to us, or are being asked."""
        return sorted(name for name, task in self._leases.items() if not task.done())

    async def run(self) -> None:
        """For ever. Cancelling it ends its watch over leases that were handed over, not those leases."""
        try:
            while True:
                for entry in self._next():
                    self._leases[entry.name] = asyncio.create_task(self._borrow(entry))
                await asyncio.sleep(LOOK_S)
        finally:
            for task in self._leases.values():
                task.cancel()
            await asyncio.gather(*self._leases.values(), return_exceptions=True)

    def _next(self) -> list[AgentEntry]:
        """Whom to ask now."""
        held, now_s = self.held, time.monotonic()
        due = [e for e in self._registry.entries() if e.name not in held and self._not_before_s.get(e.name, 0.0) <= now_s]
        return [entry for entry in lending_most(due) if can_grant(entry, self._make_ask(entry.name))][: max(self._wanted - len(held), 0)]

    async def _borrow(self, entry: AgentEntry) -> None:
        try:
            async with LeaseClient(entry.url) as client:
                await self._hold(client, await client.ask(entry.key, self._make_ask(entry.name)))
        except (Refusal, TimeoutError) as over:
            log.info("agent %s: %s", entry.name, over)
        finally:
            self._not_before_s[entry.name] = time.monotonic() + self._pause_s

    async def _hold(self, client: LeaseClient, granted: LeaseGranted) -> None:
        """Returns never. Raises Refusal: the lease is over; TimeoutError: its engine did not come up in time."""
        handed_over = False
        try:
            await self._hand_over(await client.until_up(self._up_deadline_s), granted)
            handed_over = True
            while True:
                await client.state()
                await asyncio.sleep(LOOK_S)
        finally:
            if not handed_over:
                with suppress(Refusal):
                    await client.release()
