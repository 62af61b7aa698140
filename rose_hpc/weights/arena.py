"""Node-local home of the policy, outside every process: one image, changed in place, and the deltas that lead to it.

    ARENA/ (mode 0700)
      layout.json       the image layout, written once, last of all: with it the arena exists
      image             the policy's bits, image_bytes, every block allocated
      state.json        which version the image is, its digest, whether that was proved
      image.lock        shared: the image stands still for me; exclusive: nobody looks while I change it
      journal           redo journal of an apply (arena_journal.py)
      plan.bin          bucket_bytes and the routing plan
      v7/               buckets and records of version 7 (delta_store.py)

State of the image, on a sink's node

             begin_keyframe                 write_dense …, finish_keyframe(v)
      any ──────────────────▶ −1 (nothing) ──────────────────────────────────▶ v
                                                                              │ apply(v+1)   again and again
                                                                              ▼
                                                          v+1, verified where the digest is the record's

Invariants (tested by SIGKILL at every line)
- state.version ≥ 0 and no apply is under way ⇒ the image is that version to the last bit and state.digest is its digest.
- An apply that a SIGKILL interrupted is finished by whoever next takes the lock, either way, or calls `recover`: nobody who
  holds the lock ever sees an image between two versions.
- A payload that cannot be decoded makes the image nothing (−1), never something else: a keyframe heals it.
- A full file system raises EnvironmentFault and leaves the arena as it was.
- Only names inside the folder are used: arenas of one run, or of several, share nothing.

One process at a time stores, applies and prunes (the node's relay); any number read under `reading`. On a TRAINER's node it
is the other way round: the publishers of several ranks each write their own runs of the image at once, under the SHARED lock,
and a relay that reads the image for a keyframe takes the EXCLUSIVE one. There state stays −1 and `shards` tell the versions.

It does not move bytes between nodes (relay.py) and does not know tensors (publisher.py, vllm_backend.py). It is not safe
against loss of power: shared memory does not survive that.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rose_hpc.errors import WeightsError
from rose_hpc.weights import wire
from rose_hpc.weights.arena_apply import Applied, DeltaApply, Undo, changed_lanes
from rose_hpc.weights.arena_folder import EMPTY, NOTHING, ArenaState, create_folder, open_folder
from rose_hpc.weights.arena_image import LOCK_DEADLINE_S, ArenaImage
from rose_hpc.weights.arena_journal import JournalWriter
from rose_hpc.weights.arena_keyframe import Keyframe
from rose_hpc.weights.bucket_plan import check_delta, sorted_streams
from rose_hpc.weights.delta_store import DamagedBucket, DeltaRecord, ShardRecord, check_shard, delta_bytes
from rose_hpc.weights.digest import digest_runs
from rose_hpc.weights.layout import ImageLayout
from rose_hpc.weights.wire import BucketHeader

__all__ = ["NOTHING", "Applied", "Arena", "ArenaState", "DamagedBucket", "DeltaRecord", "ShardRecord", "Undo"]


class Arena(ArenaImage):
    """One arena folder. Use `create` where it may not exist yet and `open` elsewhere."""

    def __init__(self, path: Path, layout: ImageLayout, threads: int) -> None:
        """Not for callers: the folder must be complete."""
        super().__init__(path, layout, threads)
        self._keyframe: Keyframe | None = None

    # ── life ──

    @classmethod
    def create(cls, path: Path, layout: ImageLayout, deadline_s: float = LOCK_DEADLINE_S, threads: int = 1) -> Arena:
        """Make the arena, or join one that holds the same layout. threads: for keyframes (write_dense, digest) in this process.

        Raises LayoutError when it holds another layout or the layout is empty, EnvironmentFault when there is no room (then
        there is no arena), TransferTimeout when somebody else is making it for longer than deadline_s.
        """
        create_folder(path, layout, deadline_s)
        return cls(path, layout, threads)

    @classmethod
    def open(cls, path: Path, deadline_s: float = 0.0, threads: int = 1) -> Arena:
        """Open an existing arena, waiting up to deadline_s for it. Raises WeightsError when there is none."""
        return cls(path, open_folder(path, deadline_s), threads)

    # ── deltas ──

    def store_bucket(self, version: int, message: bytes | memoryview) -> BucketHeader:
        """Keep one bucket of a delta, once it was checked. Storing it again changes nothing.

        Its base must be the image's version, or a stored delta's that leads there; where the image is nothing any base will do.
        Raises WeightsError: not whole, not of this plan or version, a keyframe's, or of a delta that does not follow;
        EnvironmentFault: no room, and the arena is as it was.
        """
        header, _ = wire.unpack(message)
        check_delta(self._buckets(), header, version)
        if not self._store.has(header):
            self._check_follows(version, header.base)
            self._store.store(header, message)
        return header

    def _check_follows(self, version: int, base: int) -> None:
        here = self.state().version
        found = base
        while found > here != NOTHING:
            record = self._store.delta(found)
            if record is None:
                break
            found = record.base
        if here not in (found, NOTHING):
            raise WeightsError(
                f"version {version} does not follow from what is here",
                got=f"its base is version {base}",
                expected=f"version {here}, which the image is",
                remedy="fetch the deltas between, or a keyframe",
            )

    def stored(self, version: int) -> dict[int, set[int]]:
        """Stream → indices of its stored buckets; a stream without any is left out."""
        return self._store.stored(version, self._buckets())

    def missing(self, version: int, streams: Sequence[int]) -> list[tuple[int, int]]:
        """(stream, index) of every bucket of these streams that is not stored, in order. Raises WeightsError: no such stream."""
        plan, stored = self._buckets(), self.stored(version)
        wanted = sorted_streams(plan, streams)
        return [(s, i) for s in wanted for i in range(plan.counts[s]) if i not in stored.get(s, ())]

    def bucket(self, version: int, stream: int, index: int) -> memoryview | None:
        """One stored message, verbatim, read-only; None while it is not here. It stays readable after `prune`.

        Raises WeightsError when the plan has no such bucket.
        """
        self._buckets().check_place(stream, index)
        return self._store.bucket(version, stream, index)

    def commit_delta(self, version: int, base: int, digest: int, streams: Sequence[int]) -> None:
        """All buckets of these streams are here: record it. digest: the trainer's, of these streams at this version.

        Raises WeightsError when buckets are missing or start from another base, or when the delta does not follow from what is here.
        """
        plan, record = self._buckets(), self.delta(version)
        wanted = sorted_streams(plan, streams)
        if record is not None and (record.base, record.digest, record.streams) == (base, digest, wanted):
            return
        self._check_follows(version, base)
        if missing := self.missing(version, wanted):
            raise WeightsError(f"version {version} is not complete", got=f"{len(missing)} buckets missing, the first {missing[0]}")
        nbytes = delta_bytes(self._store, plan, version, base, wanted)
        self._store.commit(DeltaRecord(version, base, digest, wanted, nbytes))

    def delta(self, version: int) -> DeltaRecord | None:
        """The record of a complete delta, or None."""
        return self._store.delta(version)

    def changed_lanes(self, from_version: int, to_version: int) -> NDArray[np.int64] | None:
        """Image lanes, int64, increasing, that the deltas between two versions write; None where the chain is not all here.

        A lane that was changed and changed back is among them; of a bucket that travelled dense, all lanes are.
        """
        return changed_lanes(self._store, self._decoders(), from_version, to_version)

    # ── apply ──

    def apply(self, version: int, deadline_s: float, collect: bool = False) -> Applied:
        """Bring the image to this version, in place, while nobody reads. deadline_s: longest wait for the lock.

        An image that is this version already is left alone: changes=0. The state is verified afterwards where the digest is the
        record's; where it is not, the delta's record is withdrawn. Raises WeightsError (no such delta, another base, damaged
        buckets: the image is untouched; payload that cannot be decoded: it is nothing, −1), TransferTimeout.
        """
        with self.writing(deadline_s):
            state, covers = self._state.read()
            if state.version == version:
                return Applied(state.digest, 0)
            record = self._applicable(version, state, covers)
            try:
                delta = DeltaApply(self._store, self._decoders(), record)
            except DamagedBucket as damage:
                self._store.drop_bucket(version, *damage.place)
                raise
            try:
                applied = delta.run(self.image(writable=True), JournalWriter(self._journal()), state.digest, collect)
            except WeightsError:
                self._give_up()
                raise
            self._settle(record, applied)
            return applied

    def _applicable(self, version: int, state: ArenaState, covers: str) -> DeltaRecord:
        record = self.delta(version)
        if record is None:
            raise WeightsError(
                f"version {version} is not complete here",
                got=f"no record of its delta; the image is version {state.version}",
                expected="commit_delta first",
            )
        if record.base != state.version:
            raise WeightsError(
                f"version {version} does not follow from what is here",
                got=f"its base is version {record.base}",
                expected=f"version {state.version}, which the image is",
                remedy="apply the deltas between, or fetch a keyframe",
            )
        if self._buckets().covers(record.streams) != covers:
            raise WeightsError(
                f"version {version} covers other bytes than the image holds", got=f"streams {record.streams[:8]}", remedy="fetch a keyframe"
            )
        return record

    # ── keyframes ──

    def begin_keyframe(self, deadline_s: float = LOCK_DEADLINE_S) -> None:
        """From here on the image is nothing, until `finish_keyframe`. Raises TransferTimeout when readers do not leave."""
        decoders = self._decoders()
        self.disown(deadline_s)
        self._keyframe = Keyframe(decoders)

    def disown(self, deadline_s: float) -> None:
        """The image is not what its state says: from here on it is nothing. Raises TransferTimeout when readers do not leave."""
        with self.writing(deadline_s):
            self._state.write(EMPTY, "")

    def write_dense(self, message: bytes | memoryview, version: int | None = None) -> BucketHeader:
        """One bucket of the keyframe into the image; in any order, again if need be. version: must be the message's, if given.

        Raises WeightsError: no keyframe was begun by this object, not whole, not of this plan, another version than before.
        """
        return self._begun().write(message, version, self.image(writable=True))

    def finish_keyframe(self, version: int, digest: int, deadline_s: float = LOCK_DEADLINE_S) -> ArenaState:
        """The image is this version: its streams are digested in full. digest: the trainer's, of these streams.

        Raises WeightsError when buckets of a stream are missing, TransferTimeout.
        """
        keyframe = self._begun()
        streams = keyframe.streams(version)
        found = digest_runs(self.image(), keyframe.plan.runs(streams), self._threads)
        state = ArenaState(version, found, found == digest)
        with self.writing(deadline_s):
            self._state.write(state, keyframe.plan.covers(streams))
        self._keyframe = None
        return state

    def _begun(self) -> Keyframe:
        if self._keyframe is None or self._keyframe.plan is not self._buckets():
            raise WeightsError(
                "no keyframe is under way", got="none was begun here since the plan was set", remedy="begin_keyframe comes first"
            )
        return self._keyframe

    # ── trainer side ──

    def record_shard(self, shard: ShardRecord) -> None:
        """One rank's part of a version is published. Raises WeightsError for a rank or streams that cannot be."""
        check_shard(self._buckets(), shard)
        self._store.record_shard(shard)

    def shards(self, version: int) -> list[ShardRecord]:
        """The published shards of a version on this node, by rank."""
        return self._store.shards(version)

    def newest_shards(self) -> list[ShardRecord]:
        """Each rank's newest shard on this node, by rank."""
        newest = {shard.rank: shard for version in self._store.versions() for shard in self.shards(version)}
        return [newest[rank] for rank in sorted(newest)]

    # ── retention ──

    def versions(self) -> list[int]:
        """Versions that are complete here, oldest first: recorded deltas, and on a trainer's node those with a shard."""
        return [version for version, is_complete in self._store.versions().items() if is_complete]

    def prune(self, keep: int) -> None:
        """Keep the newest `keep` complete versions and what is newer than all of them (it is being received).

        The delta of an interrupted apply is always kept.
        """
        if keep < 0:
            raise WeightsError("cannot keep less than nothing", got=keep)
        self._store.prune(keep, spared=[self._journal().newest().version])

    def discard(self, version: int) -> None:
        """Drop a version, complete or not. Raises WeightsError for the delta of an interrupted apply: `recover` first."""
        mark = self._journal().newest()
        if mark.is_active and mark.version == version:
            raise WeightsError(f"version {version} is being applied", remedy="recover first")
        self._store.discard(version)
