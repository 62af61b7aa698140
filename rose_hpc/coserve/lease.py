"""The agent's lease: how long it keeps its engines without hearing from the controller."""

from __future__ import annotations

import asyncio
import math

from rose_hpc.http_api import Refused


def granted_s(asked_s: float, at_most_s: float) -> float:
    """What a renewal is worth: no peer can keep an agent for longer than its operator allows. Raises Refused 400: no such time."""
    if not (math.isfinite(asked_s) and asked_s > 0):
        raise Refused(400, "lease cannot be renewed", got=f"{asked_s} s", expected="more than 0 s, and finite")
    return min(asked_s, at_most_s)


class Lease:
    """Runs from the first `renew` on; each renewal replaces what was left of the earlier one."""

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self._renewed = asyncio.Event()

    def renew(self, ttl_s: float) -> None:
        """Keep the engines for ttl_s from now."""
        self.ttl_s = ttl_s
        self._renewed.set()

    async def expired(self) -> None:
        """Returns when a renewal was not followed by another within its ttl_s."""
        await self._renewed.wait()
        while True:
            self._renewed.clear()
            try:
                await asyncio.wait_for(self._renewed.wait(), self.ttl_s)
            except TimeoutError:
                return
