"""One policy version's way from the trainer to every executor: publish → transfer → apply. Verified at each receiver.

    ranks write their shards           VersionWritten, digests add up to the image's
    relays carry it to the sinks       VersionTransferred, the digest recomputed over what arrived
    executors load it                  UpdateResult, the digest recomputed over what was loaded

Dedicated executors are waited for. Opportunistic ones follow on their own (`Follower`): training never waits for one, and one
that is late, or gone, receives no turns until it has applied what is required.

A digest that does not match is recorded and the version is sent once more, whole, as a new generation; a second mismatch
ends the run. A version counts as verified only when every receiver that holds it has recomputed the trainer's digest.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rose_hpc.errors import DigestMismatch
from rose_hpc.messages import PublishVersion, TransferVersion, UpdateRequest, UpdateResult, VersionTransferred, VersionWritten
from rose_hpc.metrics.writer import MetricsClient
from rose_hpc.rollout.client import ExecutorError
from rose_hpc.rollout.fleet import Executor
from rose_hpc.rollout.workers import WorkerPool
from rose_hpc.weights.digest import combine

TRANSFERS = 2  # tries of one version


@dataclass(frozen=True)
class Delivered:
    """A version as it lies verified in one sink's arena."""

    version: int
    digest: int
    image_bytes: int
    wire_bytes: int
    transfer_s: float


@dataclass(frozen=True)
class SyncResult:
    """One version, now serving on every dedicated executor. wire_bytes: received by all sinks together."""

    version: int
    digest: int
    wire_bytes: int
    sync_s: float


class VersionSync:
    """Brings versions to the sinks and on to the executors; owns the generation counter.

    sinks: relay → kind of the executors that its arena feeds. deadline_s: for one transfer or one update.
    """

    def __init__(
        self,
        workers: WorkerPool,
        trainers: Sequence[str],
        sources: Sequence[str],
        sinks: dict[str, str],
        metrics: MetricsClient,
        deadline_s: float,
    ) -> None:
        self._workers, self._metrics, self._deadline_s = workers, metrics, deadline_s
        self._trainers, self._sources, self._sinks = trainers, sources, sinks
        self._generation = 0
        self.latest: dict[str, Delivered] = {}  # by kind of executor

    async def sync(self, version: int, dedicated: Sequence[Executor]) -> SyncResult:
        """Publish, transfer, and apply on the dedicated executors. Raises DigestMismatch, RunFailed, ExecutorError."""
        start = time.monotonic()
        written = await self._workers.call(self._trainers, lambda i: PublishVersion(i, version), VersionWritten, self._deadline_s)
        digest = combine([w.digest for w in written.values()])
        image_bytes = sum(w.shard_bytes for w in written.values())
        arrived = await self._transfer(version, digest)
        for sink, reply in arrived.items():
            self.latest[self._sinks[sink]] = Delivered(version, digest, image_bytes, reply.received_bytes, reply.transfer_s)
        await asyncio.gather(*(self.apply(executor, self.latest[executor.kind], dedicated.index(executor) == 0) for executor in dedicated))
        return SyncResult(version, digest, sum(r.received_bytes for r in arrived.values()), time.monotonic() - start)

    async def apply(self, executor: Executor, delivered: Delivered, carries_bytes: bool = True) -> None:
        """Have one executor load what lies in its arena, and record it.

        carries_bytes: the bytes on the wire are counted at this executor; those that share its arena got them for nothing.
        Raises ExecutorError where it did not load; DigestMismatch where it says that it loaded something else.
        """
        request = UpdateRequest(delivered.version, delivered.digest)
        update = await executor.client.update(executor.executor_id, request, self._deadline_s)
        self.record(executor.executor_id, delivered, update, carries_bytes)
        if (update.version, update.digest) != (delivered.version, delivered.digest):
            raise DigestMismatch(
                f"{executor.executor_id} serves other weights",
                got=f"version {update.version}, digest {update.digest:016x}",
                expected=f"version {delivered.version}, digest {delivered.digest:016x}",
            )

    def record(self, receiver: str, delivered: Delivered, update: UpdateResult | None, carries_bytes: bool = True) -> None:
        """A row of the table `syncs`. update None: the version arrived verified, but the executor went on to a later one."""
        digest = delivered.digest if update is None else update.digest
        self._metrics.record(
            "syncs",
            version=delivered.version,
            time_s=time.time(),
            receiver=receiver,
            wire_bytes=delivered.wire_bytes if carries_bytes else 0,
            image_bytes=delivered.image_bytes,
            transfer_s=delivered.transfer_s,
            apply_s=math.nan if update is None else update.apply_s,
            pause_s=math.nan if update is None else update.pause_s,
            digest=digest,
            verified=int(digest == delivered.digest),
        )

    async def _transfer(self, version: int, digest: int) -> dict[str, VersionTransferred]:
        """What each sink reports. Raises DigestMismatch when the last try did not verify."""
        for attempt in range(TRANSFERS):
            arrived = await self._transfer_once(version, digest)
            wrong = [sink for sink, reply in arrived.items() if not reply.verified]
            if not wrong:
                return arrived
            detail = f"version {version}, try {attempt + 1}: expected {digest:016x}"
            for sink in wrong:
                self._metrics.record("events", time_s=time.time(), kind="digest_mismatch", subject=sink, detail=detail)
        raise DigestMismatch(
            f"version {version} arrived damaged {TRANSFERS} times",
            got=f"at {', '.join(wrong)}",
            expected=f"digest {digest:016x}",
            remedy="check this node's memory and network",
        )

    async def _transfer_once(self, version: int, digest: int) -> dict[str, VersionTransferred]:
        """One generation: every relay plays its part; what the sinks report."""
        self._generation += 1
        generation = self._generation
        relays, deadline_s = [*self._sources, *self._sinks], 2 * self._deadline_s
        replies = await self._workers.call(
            relays, lambda i: TransferVersion(i, generation, version, digest), VersionTransferred, deadline_s
        )
        return {sink: replies[sink] for sink in self._sinks}


class Follower:
    """Keeps one opportunistic executor as new as it can be: applies the latest delivered version, skips those in between.

    idle ──deliver(v)──▶ applying v ──ok──▶ on_applied(v) ──▶ idle, or the latest delivered meanwhile
                               └──ExecutorError, DigestMismatch──▶ on_lost(reason), ended
    """

    def __init__(
        self, executor: Executor, sync: VersionSync, on_applied: Callable[[str, int], None], on_lost: Callable[[str, str], None]
    ) -> None:
        self._executor, self._sync, self._on_applied, self._on_lost = executor, sync, on_applied, on_lost
        self._next: Delivered | None = None
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._follow())

    def deliver(self, delivered: Delivered) -> None:
        """The latest version; one that had not been started is skipped, and recorded as such."""
        if self._next is not None:
            self._sync.record(self._executor.executor_id, self._next, None)
        self._next = delivered
        self._wake.set()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            delivered, self._next = self._next, None
            if delivered is None:
                continue
            try:
                await self._sync.apply(self._executor, delivered)
            except (ExecutorError, DigestMismatch) as error:
                self._on_lost(self._executor.executor_id, str(error))
                return
            self._on_applied(self._executor.executor_id, delivered.version)
