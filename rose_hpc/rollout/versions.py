"""One policy version's way from the trainer to every executor: publish → transfer → apply. Verified at each receiver.

    ranks write their shards           VersionWritten, digests add up to the image's
    relays carry it to the sinks       VersionTransferred, the digest recomputed over what arrived
    executors load it                  UpdateResult, the digest recomputed over what was loaded

Dedicated executors are waited for. Opportunistic ones follow on their own (`Follower`): training never waits for one, and one
that is late, or gone, receives no turns until it has applied what is required.

A digest that does not match is recorded and the version is sent once more, whole, as a new generation; a second mismatch
ends the run. A version counts as verified only when every receiver that holds it has recomputed the trainer's digest.

Each transfer gives a row of the table `syncs` per sink, which carries the bytes, whether anyone follows from that arena or not;
each update gives a row per executor, which carries none: it had them from the sink.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rose_hpc.errors import DigestMismatch, RoseError
from rose_hpc.messages import PublishVersion, TransferVersion, UpdateRequest, UpdateResult, VersionTransferred, VersionWritten
from rose_hpc.metrics.writer import MetricsClient
from rose_hpc.rollout.background import Background
from rose_hpc.rollout.client import ExecutorError
from rose_hpc.rollout.fleet import Executor
from rose_hpc.rollout.workers import WorkerPool
from rose_hpc.weights.digest import combine

TRANSFERS = 2  # tries of one version
REFUSED = 409  # status of an update that does not fit the executor's state, such as a version that its arena holds no more


@dataclass(frozen=True)
class Delivered:
    """A version as it lies verified in one sink's arena."""

    version: int
    digest: int


@dataclass(frozen=True)
class SyncResult:
    """One version, now serving on every dedicated executor. wire_bytes: received by all sinks together, in all tries."""

    version: int
    digest: int
    wire_bytes: int
    sync_s: float


class VersionSync:
    """Brings versions to the sinks and on to the executors; owns the generation counter.

    latest: what lies in the arena that feeds a kind of executor. newest: the version that `sync` was last asked for; from then on
    the sinks may drop older ones.
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
        self.latest: dict[str, Delivered] = {}
        self.newest = -1

    async def sync(self, version: int, dedicated: Sequence[Executor]) -> SyncResult:
        """Publish, transfer, and apply on the dedicated executors. Raises DigestMismatch, RunFailed, ExecutorError."""
        start, self.newest = time.monotonic(), version
        written = await self._workers.call(self._trainers, lambda i: PublishVersion(i, version), VersionWritten, self._deadline_s)
        digest = combine([w.digest for w in written.values()])
        image_bytes = sum(w.shard_bytes for w in written.values())
        wire_bytes = await self._transfer(version, digest, image_bytes)
        for kind in self._sinks.values():
            self.latest[kind] = Delivered(version, digest)
        await asyncio.gather(*(self.apply(executor, self.latest[executor.kind]) for executor in dedicated))
        return SyncResult(version, digest, wire_bytes, time.monotonic() - start)

    async def apply(self, executor: Executor, delivered: Delivered) -> None:
        """Have one executor load what lies in its arena, and record it.

        Raises ExecutorError where it did not load; DigestMismatch where it says that it loaded something else.
        """
        request = UpdateRequest(delivered.version, delivered.digest)
        update = await executor.client.update(executor.executor_id, request, self._deadline_s)
        self._record_update(executor.executor_id, delivered, update)
        if (update.version, update.digest) != (delivered.version, delivered.digest):
            raise DigestMismatch(
                f"{executor.executor_id} serves other weights",
                got=f"version {update.version}, digest {update.digest:016x}",
                expected=f"version {delivered.version}, digest {delivered.digest:016x}",
            )

    def _record_update(self, executor_id: str, delivered: Delivered, update: UpdateResult) -> None:
        self._metrics.record(
            "syncs",
            version=delivered.version,
            time_s=time.time(),
            receiver=executor_id,
            wire_bytes=0,
            image_bytes=0,
            transfer_s=math.nan,
            apply_s=update.apply_s,
            pause_s=update.pause_s,
            digest=update.digest,
            verified=int(update.digest == delivered.digest),
        )

    def _record_arrival(self, sink: str, reply: VersionTransferred, version: int, image_bytes: int, digest: int) -> None:
        self._metrics.record(
            "syncs",
            version=version,
            time_s=time.time(),
            receiver=sink,
            wire_bytes=reply.received_bytes,
            image_bytes=image_bytes,
            transfer_s=reply.transfer_s,
            apply_s=math.nan,
            pause_s=math.nan,
            digest=reply.digest,
            verified=int(reply.verified and reply.digest == digest),
        )

    async def _transfer(self, version: int, digest: int, image_bytes: int) -> int:
        """Bytes that all sinks received, in all tries. Raises DigestMismatch when the last try did not verify."""
        wire_bytes = 0
        for attempt in range(TRANSFERS):
            arrived = await self._transfer_once(version, digest)
            wire_bytes += sum(reply.received_bytes for reply in arrived.values())
            for sink, reply in arrived.items():
                self._record_arrival(sink, reply, version, image_bytes, digest)
            wrong = [sink for sink, reply in arrived.items() if not (reply.verified and reply.digest == digest)]
            if not wrong:
                return wire_bytes
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
                               ├──superseded──▶ idle, or the latest delivered meanwhile
                               └──ExecutorError, DigestMismatch──▶ on_lost(reason), ended

    Superseded: v failed, but a newer version waits; or the executor refused v (409) while a newer one is on its way, to which the
    arena may have given v's place.
    """

    def __init__(
        self,
        executor: Executor,
        sync: VersionSync,
        background: Background,
        on_applied: Callable[[str, int], None],
        on_lost: Callable[[str, str], None],
    ) -> None:
        self._executor, self._sync, self._on_applied, self._on_lost = executor, sync, on_applied, on_lost
        self._next: Delivered | None = None
        self._wake = asyncio.Event()
        self._task = background.spawn(self._follow(), f"bringing versions to {executor.executor_id}")

    def deliver(self, delivered: Delivered) -> None:
        """The latest version; one that had not been started is skipped."""
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
                if self._is_superseded(delivered, error):
                    continue
                self._on_lost(self._executor.executor_id, str(error))
                return
            self._on_applied(self._executor.executor_id, delivered.version)

    def _is_superseded(self, delivered: Delivered, error: RoseError) -> bool:
        refused = isinstance(error, ExecutorError) and error.status == REFUSED
        return self._next is not None or (refused and self._sync.newest > delivered.version)
