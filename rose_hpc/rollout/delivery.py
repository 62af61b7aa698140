"""Delivers policy versions to a fleet that changes: dedicated executors are waited for, opportunistic ones follow.

    publish ─▶ dedicated arenas ─▶ dedicated executors ─▶ the next step
       └─▶ opportunistic arenas ─▶ opportunistic executors          each at its own pace, none is waited for

A late joiner loads the latest version from its own node's arena; the trainer is not asked again.
"""

from __future__ import annotations

import asyncio

from rose_hpc.rollout.background import Background
from rose_hpc.rollout.fleet import Executor, Fleet
from rose_hpc.rollout.versions import Follower, SinkFollower, SyncResult, VersionSync

FOLLOWERS = "opportunistic"  # the kind that is not waited for


class Delivery:
    """One per run. `joined` for every new executor, `deliver` for every version, `close` at the end."""

    def __init__(self, fleet: Fleet, sync: VersionSync, background: Background) -> None:
        self._fleet, self._sync, self._background = fleet, sync, background
        self._followers: dict[str, Follower] = {}
        self._sinks: list[SinkFollower] = []
        self._closing: set[asyncio.Task[None]] = set()

    def joined(self, executor: Executor) -> None:
        """An executor is new, or was restarted and has no weights."""
        if executor.kind != FOLLOWERS:
            return
        self._retire(executor.executor_id)
        follower = Follower(executor, self._sync, self._background, self._fleet.ready, self._fleet.leave)
        self._followers[executor.executor_id] = follower
        if executor.relay in self._sync.latest:
            follower.deliver(self._sync.latest[executor.relay])

    async def deliver(self, version: int) -> SyncResult:
        """Returns when the version serves on every dedicated executor. Raises what VersionSync.sync raises."""
        dedicated = self._fleet.of_kind("dedicated")
        result = await self._sync.sync(version, dedicated)
        for executor in dedicated:
            self._fleet.ready(executor.executor_id, version)
        self._fleet.require(version)
        if not self._sinks:
            relays = self._sync.distribution.sinks(FOLLOWERS)
            self._sinks = [SinkFollower(relay, self._sync, self._background, self._arrived) for relay in relays]
        for sink in self._sinks:
            sink.wake()
        for executor_id in self._followers.keys() - self._fleet.executors.keys():
            self._retire(executor_id)
        return result

    def _arrived(self, relay: str) -> None:
        """A version lies in an opportunistic arena: its executors may load it."""
        for executor_id, executor in self._fleet.executors.items():
            if executor_id in self._followers and executor.relay == relay:
                self._followers[executor_id].deliver(self._sync.latest[relay])

    async def close(self) -> None:
        await asyncio.gather(*(sink.close() for sink in self._sinks))
        for executor_id in list(self._followers):
            self._retire(executor_id)
        await asyncio.gather(*self._closing)

    def _retire(self, executor_id: str) -> None:
        if (follower := self._followers.pop(executor_id, None)) is not None:
            task = asyncio.create_task(follower.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
