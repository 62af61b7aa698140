"""What a run gives to, and takes from, the leases that it holds: names and a token of their own, an arena, an executor, and an end.

    names ─▶ (ask) ─▶ expect: the arena gets what was published last ─▶ work: the executor rolls out ─▶ over ─▶ forget
      └──────────── refused ──────────────────────────────────────────────────────────────────────────────────────┘

Invariants
- No name is used for two leases: what a lease that is over left behind cannot be taken for the next one's.
- The token that goes to the lent node opens its relay's routes of the control API and no others, and nothing after `forget`.
- Nobody waits for a lease, and nothing that befalls one ends the run.

It asks nobody for leases and knows no registry: whoever does that drives it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from rose_hpc.messages import AgentUp, ExecutorInfo
from rose_hpc.rollout.agents import AgentPool
from rose_hpc.rollout.delivery import FOLLOWERS, Delivery
from rose_hpc.rollout.known_arenas import Place
from rose_hpc.rollout.relay_tokens import RelayTokens

PARTITION = "lent"


@dataclass(frozen=True)
class LeaseNames:
    """Of one lease. token: the relay's, towards the control API."""

    serial: int
    executor_id: str
    relay: str
    token: str = field(repr=False)


class BorrowedExecutors:
    """One per run. first_relay: number of the first relay that no other part of the run has."""

    def __init__(
        self, agents: AgentPool, delivery: Delivery, tokens: RelayTokens, first_relay: int, on_event: Callable[[str, str, str], None]
    ) -> None:
        self._agents, self._delivery, self._tokens, self._first_relay = agents, delivery, tokens, first_relay
        self._serial = itertools.count()
        self.on_event = on_event

    def names(self) -> LeaseNames:
        """For the next lease to be asked for; each wants its `forget`."""
        serial = next(self._serial)
        relay = f"relay-{self._first_relay + serial}"
        return LeaseNames(serial, f"borrowed-{serial}", relay, self._tokens.issue(relay))

    def expect(self, names: LeaseNames, agent: str) -> None:
        """The lease is granted: its relay may come."""
        self._delivery.expect(names.relay, Place(PARTITION, agent, feeds=FOLLOWERS))

    async def work(self, names: LeaseNames, agent: str, url: str, token: str, max_concurrency: int, ttl_s: float) -> str:
        """The lease's engine is up: its executor rolls out, and the lease is renewed, until it is over. Returns why it is.

        url, token: open the agent's routes for this lease. ttl_s: what one renewal is worth.
        """
        info = ExecutorInfo(names.executor_id, FOLLOWERS, max_concurrency, -1, names.relay)
        return await self._agents.hold(AgentUp(f"{agent}/{names.executor_id}", url, [info], token), ttl_s, device=agent)

    async def forget(self, names: LeaseNames) -> None:
        """The lease is over, or was never granted: nothing of it opens anything or is waited for."""
        self._tokens.revoke(names.relay)
        await self._delivery.forget(names.relay)
