"""Delivers policy versions to a fleet that changes: dedicated executors are waited for, opportunistic ones follow.

    publish ─▶ dedicated arenas ─▶ dedicated executors ─▶ the next step
       └─▶ opportunistic arenas ─▶ opportunistic executors          each at its own pace, none is waited for

A late joiner loads the latest version from its own node's arena; the trainer is not asked again. An arena may join in the middle of
a run (`expect`: the relay of a lease), and is forgotten at once when it cannot come back (`forget`).
"""

from __future__ import annotations

import asyncio

from rose_hpc.rollout.background import Background
from rose_hpc.rollout.fleet import Executor, Fleet
from rose_hpc.rollout.known_arenas import Place
from rose_hpc.rollout.versions import Follower, SinkFollower, SyncResult, VersionSync

FOLLOWERS = "opportunistic"  # the kind that is not waited for


class Delivery:
    """One per run. `joined` for every new executor, `deliver` for every version, `close` at the end."""

    def __init__(self, fleet: Fleet, sync: VersionSync, background: Background) -> None:
        self._fleet, self._sync, self._background = fleet, sync, background
        self._followers: dict[str, Follower] = {}
        self._sinks: dict[str, SinkFollower] = {}
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
        self._fleet.publishing(version)
        result = await self._sync.sync(version, dedicated)
        for executor in dedicated:
            self._fleet.ready(executor.executor_id, version)
        self._fleet.require(version)
        for relay in self._sync.distribution.sinks(FOLLOWERS):
            self._follow(relay).wake()
        for executor_id in self._followers.keys() - self._fleet.executors.keys():
            self._retire(executor_id)
        return result

    def _follow(self, relay: str) -> SinkFollower:
        if relay not in self._sinks:
            self._sinks[relay] = SinkFollower(relay, self._sync, self._background, self._arrived)
        return self._sinks[relay]

    def _arrived(self, relay: str) -> None:
        """A version lies in an opportunistic arena: its executors may load it."""
        for executor_id, executor in self._fleet.executors.items():
            if executor_id in self._followers and executor.relay == relay:
                self._followers[executor_id].deliver(self._sync.latest[relay])

    # ── arenas that come and go ──

    def expect(self, relay: str, place: Place) -> None:
        """The arena of a lease that has begun: from now on it gets what was published last, once its relay has said hello."""
        self._sync.distribution.expect(relay, place)
        self._follow(relay)

    async def forget(self, relay: str) -> None:
        """The lease is over: its arena and relay will not come back, and nobody tries to reach them. Their executors have left."""
        for executor_id in [name for name, follower in self._followers.items() if follower.relay == relay]:
            self._retire(executor_id)
        await asyncio.gather(*self._closing)
        while (sink := self._sinks.pop(relay, None)) is not None:  # a version published meanwhile has made another one
            await sink.close()
        self._sync.latest.pop(relay, None)
        self._sync.distribution.forget(relay)

    async def close(self) -> None:
        await asyncio.gather(*(sink.close() for sink in self._sinks.values()))
        for executor_id in list(self._followers):
            self._retire(executor_id)
        await asyncio.gather(*self._closing)

    def _retire(self, executor_id: str) -> None:
        if (follower := self._followers.pop(executor_id, None)) is not None:
            task = asyncio.create_task(follower.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
