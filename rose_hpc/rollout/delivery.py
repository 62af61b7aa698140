"""Delivers policy versions to a fleet that changes: dedicated executors are waited for, opportunistic ones follow.

Late joiners receive the latest version from their own node's arena; the trainer is not asked again.
"""

from __future__ import annotations

import asyncio

from rose_hpc.rollout.background import Background
from rose_hpc.rollout.fleet import Executor, Fleet
from rose_hpc.rollout.versions import Follower, SyncResult, VersionSync

FOLLOWERS = "opportunistic"  # the kind that is not waited for


class Delivery:
    """One per run. `joined` for every new executor, `deliver` for every version, `close` at the end."""

    def __init__(self, fleet: Fleet, sync: VersionSync, background: Background) -> None:
        self._fleet, self._sync, self._background = fleet, sync, background
        self._followers: dict[str, Follower] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def joined(self, executor: Executor) -> None:
        """An executor is new, or was restarted and has no weights."""
        if executor.kind != FOLLOWERS:
            return
        self._retire(executor.executor_id)
        follower = Follower(executor, self._sync, self._background, self._fleet.ready, self._fleet.leave)
        self._followers[executor.executor_id] = follower
        if FOLLOWERS in self._sync.latest:
            follower.deliver(self._sync.latest[FOLLOWERS])

    async def deliver(self, version: int) -> SyncResult:
        """Returns when the version serves on every dedicated executor. Raises what VersionSync.sync raises."""
        dedicated = self._fleet.of_kind("dedicated")
        result = await self._sync.sync(version, dedicated)
        for executor in dedicated:
            self._fleet.ready(executor.executor_id, version)
        for executor_id in list(self._followers):
            if executor_id in self._fleet.executors:
                self._followers[executor_id].deliver(self._sync.latest[FOLLOWERS])
            else:
                self._retire(executor_id)
        self._fleet.require(version)
        return result

    async def close(self) -> None:
        for executor_id in list(self._followers):
            self._retire(executor_id)
        await asyncio.gather(*self._closing)

    def _retire(self, executor_id: str) -> None:
        if (follower := self._followers.pop(executor_id, None)) is not None:
            task = asyncio.create_task(follower.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
