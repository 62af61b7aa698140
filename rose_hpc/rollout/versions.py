"""One policy version's way from the trainer to every executor: publish → transfer → apply. Verified at each receiver.

    ranks write their shards           VersionWritten, digests add up to the image's
    relays carry it to the sinks       VersionTransferred, the digest recomputed over what arrived
    executors load it                  UpdateResult, the digest recomputed over what was loaded

A digest that does not match is recorded and the version is sent once more, whole, as a new generation; a second mismatch
ends the run. A version counts as synced only when every receiver has verified it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rose_hpc.errors import DigestMismatch
from rose_hpc.messages import PublishVersion, TransferVersion, UpdateRequest, UpdateResult, VersionTransferred, VersionWritten
from rose_hpc.metrics.writer import MetricsClient
from rose_hpc.rollout.collector import Executor
from rose_hpc.rollout.workers import WorkerPool
from rose_hpc.weights.digest import combine

TRANSFERS = 2  # tries of one version


@dataclass(frozen=True)
class SyncResult:
    """One version, now serving everywhere. wire_bytes: received by all sinks together."""

    version: int
    digest: int
    wire_bytes: int
    sync_s: float


class VersionSync:
    """Brings versions to the executors; owns the generation counter. deadline_s: for one transfer or one update."""

    def __init__(
        self,
        workers: WorkerPool,
        trainers: Sequence[str],
        sources: Sequence[str],
        sinks: Sequence[str],
        metrics: MetricsClient,
        deadline_s: float,
    ) -> None:
        self._workers, self._metrics, self._deadline_s = workers, metrics, deadline_s
        self._trainers, self._sources, self._sinks = trainers, sources, sinks
        self._generation = 0

    async def sync(self, version: int, executors: Sequence[Executor]) -> SyncResult:
        """Publish, transfer and apply. Raises DigestMismatch, RunFailed, ExecutorError."""
        start = time.monotonic()
        written = await self._workers.call(self._trainers, lambda i: PublishVersion(i, version), VersionWritten, self._deadline_s)
        digest = combine([w.digest for w in written.values()])
        image_bytes = sum(w.shard_bytes for w in written.values())
        arrived = await self._transfer(version, digest)
        updates = await asyncio.gather(
            *(e.client.update(e.executor_id, UpdateRequest(version, digest), self._deadline_s) for e in executors)
        )
        for sink, reply in arrived.items():
            self._record(version, sink, reply, image_bytes, updates)
        for executor, update in zip(executors, updates, strict=True):
            if (update.version, update.digest) != (version, digest):
                raise DigestMismatch(
                    f"{executor.executor_id} serves other weights",
                    got=f"version {update.version}, digest {update.digest:016x}",
                    expected=f"version {version}, digest {digest:016x}",
                )
        return SyncResult(version, digest, sum(r.received_bytes for r in arrived.values()), time.monotonic() - start)

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

    def _record(self, version: int, sink: str, reply: VersionTransferred, image_bytes: int, updates: Sequence[UpdateResult]) -> None:
        self._metrics.record(
            "syncs",
            version=version,
            time_s=time.time(),
            receiver=sink,
            wire_bytes=reply.received_bytes,
            image_bytes=image_bytes,
            transfer_s=reply.transfer_s,
            apply_s=max(u.apply_s for u in updates),
            pause_s=max(u.pause_s for u in updates),
            digest=reply.digest,
            verified=int(reply.verified and all(u.digest == reply.digest for u in updates)),
        )
