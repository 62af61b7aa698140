"""The agent's lease: how long it keeps its engines without hearing from the controller."""

from __future__ import annotations

import asyncio


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
