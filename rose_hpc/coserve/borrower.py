"""Keeps a run supplied with leases: finds agents that lend, asks, waits for their engines, and hands each over to the run.

    registry ─┬─ unfit ──▶ told once
              └─ fit ────▶ ask ─┬─ refused ─▶ not again for PAUSE_S
                                └─ granted ─▶ until up, renewing ─▶ the run works, and renews ─▶ over ─▶ released, the next candidate

At most `wanted` leases at a time, one per agent. Once a lease is handed over the run renews it, and nobody else: when the run falls
silent, the lease expires, whatever becomes of this. Whatever it holds it releases when it is cancelled.

Every turn of a lease's life is an event: lease_asked, lease_refused, lease_granted, lease_up, lease_over; lease_not_asked: why an agent is
of no use to the run now.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Protocol

from rose_hpc.coserve.lease_client import LeaseClient, Refusal, fitted, lending_most, unfit
from rose_hpc.coserve.lease_messages import LeaseAsk, LeaseGranted
from rose_hpc.coserve.registry import AgentEntry, Registry
from rose_hpc.errors import RoseError

PAUSE_S = 10.0  # before an agent that refused, or whose lease is over, is asked again
LOOK_S = 1.0  # between two looks into the registry


class RunSide(Protocol):
    """The run as leases come and go. Each ask has names of its own, which tell the run what a call is about."""

    def wish(self) -> LeaseAsk:
        """What it asks for, whoever may grant it; its names count for nothing."""
        ...

    def ask(self) -> LeaseAsk:
        """The same, with the names of the next lease; `over` follows."""
        ...

    def granted(self, ask: LeaseAsk, agent: AgentEntry) -> None:
        """A lease; its engine and relay start."""
        ...

    async def work(self, ask: LeaseAsk, agent: AgentEntry, granted: LeaseGranted) -> str:
        """Its engine is up. The run renews the lease from now on; returns why it is over."""
        ...

    async def over(self, ask: LeaseAsk) -> None:
        """Refused, or over, and the agent knows it: what has these names will not come back."""
        ...

    def event(self, kind: str, subject: str, detail: str) -> None:
        """subject: the agent's name."""
        ...


class Borrower:
    """See the module's docstring. is_local: the run can be reached from this machine only."""

    def __init__(
        self,
        registry: Registry,
        wanted: int,
        run: RunSide,
        up_deadline_s: float = 300.0,
        pause_s: float = PAUSE_S,
        look_s: float = LOOK_S,
        is_local: bool = False,
    ) -> None:
        self._registry, self._wanted, self._run = registry, wanted, run
        self._up_deadline_s, self._pause_s, self._look_s = up_deadline_s, pause_s, look_s
        self._is_local = is_local
        self._not_before_s: dict[str, float] = {}
        self._leases: dict[str, asyncio.Task[None]] = {}
        self._told: dict[str, str] = {}

    @property
    def held(self) -> list[str]:
        """Names of the agents that lend to us, or are being asked."""
        return sorted(self._leases)

    async def run(self) -> None:
        """For ever. Cancelling it releases what it holds."""
        try:
            while True:
                self._reap()
                if len(self._leases) < self._wanted:
                    await self._look()
                await asyncio.sleep(self._look_s)
        finally:
            for task in self._leases.values():
                task.cancel()
            await asyncio.gather(*self._leases.values(), return_exceptions=True)

    def _reap(self) -> None:
        """A bug in a lease's task is raised here."""
        for name, task in list(self._leases.items()):
            if task.done():
                del self._leases[name]
                task.result()

    async def _look(self) -> None:
        """A registry that cannot be read is told, and looked into again."""
        try:
            entries = await asyncio.to_thread(self._registry.entries)
        except OSError as error:
            self._tell({"": f"the registry cannot be read: {error}"})
        else:
            self._ask_some(entries)

    def _ask_some(self, entries: list[AgentEntry]) -> None:
        wish, now_s = self._run.wish(), time.monotonic()
        others = [entry for entry in entries if entry.name not in self._leases]
        self._tell_unfit(others, wish)
        fit = [e for e in others if self._unfit(e, wish) is None and self._not_before_s.get(e.name, 0.0) <= now_s]
        for entry in lending_most(fit)[: self._wanted - len(self._leases)]:
            self._leases[entry.name] = asyncio.create_task(self._borrow(entry))

    def _unfit(self, entry: AgentEntry, wish: LeaseAsk) -> str | None:
        if self._is_local and not entry.is_here:
            return f"it is on {entry.host}, from where a loopback address does not lead to the run: set control.host"
        return unfit(entry, wish)

    def _tell_unfit(self, entries: list[AgentEntry], wish: LeaseAsk) -> None:
        why = {entry.name: reason for entry in entries if (reason := self._unfit(entry, wish)) is not None}
        if not entries and not self._leases:
            why = {"": f"no agent is listed in {self._registry.folder}"}
        self._tell(why)

    def _tell(self, why: dict[str, str]) -> None:
        """Name of an agent, "" for none → why nobody is asked. Each reason once, until it changes."""
        for name in sorted(why):
            if self._told.get(name) != why[name]:
                self._run.event("lease_not_asked", name, why[name])
        self._told = why

    async def _borrow(self, entry: AgentEntry) -> None:
        ask = fitted(self._run.ask(), entry)
        try:
            async with LeaseClient(entry.url) as client:
                self._run.event("lease_asked", entry.name, f"{ask.executor_id}, a share of {ask.ceiling_frac:g}")
                granted = await client.ask(entry.key, ask)
                self._run.event("lease_granted", entry.name, f"{ask.executor_id}: lease {granted.lease_id} for {granted.ttl_s:g} s")
                await self._hold(client, entry, ask, granted)
        except RoseError as refusal:
            self._run.event("lease_refused", entry.name, f"{ask.executor_id}: {_line(refusal)}")
        finally:
            self._not_before_s[entry.name] = time.monotonic() + self._pause_s
            await self._run.over(ask)

    async def _hold(self, client: LeaseClient, entry: AgentEntry, ask: LeaseAsk, granted: LeaseGranted) -> None:
        """Until the lease is over, which is told; then it is released, where that is still to be done."""
        reason = "the run gives it back"
        try:
            self._run.granted(ask, entry)
            await client.until_up(self._up_deadline_s)
            self._run.event("lease_up", entry.name, f"{ask.executor_id}: its engine is up")
            reason = await self._run.work(ask, entry, granted)
        except TimeoutError:
            reason = f"its engine was not up within {self._up_deadline_s:g} s"
        except RoseError as error:
            reason = _line(error)
        finally:
            self._run.event("lease_over", entry.name, f"{ask.executor_id}: {reason}")
            with suppress(RoseError):
                await client.release()


def _line(error: RoseError) -> str:
    """What an agent answered, or what befell us, on one line."""
    said = error.got if isinstance(error, Refusal) and error.status is not None else error
    return " ".join(str(said).split())
