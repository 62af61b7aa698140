"""The image of an arena and everything that keeps it whole: its plan, its state, its lock, its journal.

Invariants
- Whoever holds the lock, either way, sees an image that is exactly what state.json says: an apply that was interrupted is
  finished before the lock is handed out.
- state.json changes after the image has, and the journal is cleared after that: at every instant one of the two is right.
- The image is mapped only where its size is what the layout says and its blocks are allocated.

Deltas, keyframes and retention are arena.py's.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rose_hpc.errors import WeightsError
from rose_hpc.weights.arena_apply import Applied, Decoders, DeltaApply
from rose_hpc.weights.arena_files import map_file, sweep
from rose_hpc.weights.arena_folder import (
    EMPTY,
    IMAGE,
    JOURNAL,
    LAYOUT,
    LOCK,
    PLAN,
    ArenaState,
    PlanFile,
    StateFile,
    check_plan,
)
from rose_hpc.weights.arena_journal import JOURNAL_BYTES, Journal, JournalWriter
from rose_hpc.weights.arena_locks import ImageLock
from rose_hpc.weights.bucket_plan import BucketPlan
from rose_hpc.weights.delta_store import DeltaRecord, DeltaStore
from rose_hpc.weights.layout import ImageLayout, Runs
from rose_hpc.weights.routing import RoutingPlan

LOCK_DEADLINE_S = 10.0


class ArenaImage:
    """The lower half of `Arena`: one folder's plan and image."""

    def __init__(self, path: Path, layout: ImageLayout, threads: int) -> None:
        self.path, self.layout, self._threads = path, layout, threads
        self._lock = ImageLock(path / LOCK)
        self._state = StateFile(path)
        self._plan = PlanFile(path, layout)
        self._store = DeltaStore(path)
        self._maps: dict[tuple[str, bool], mmap.mmap] = {}
        self._journal_kept: Journal | None = None
        self._decoders_kept: Decoders | None = None

    @staticmethod
    def is_ready(path: Path) -> bool:
        """Whether there is an arena with a plan, so that buckets can be stored and served."""
        return (path / LAYOUT).exists() and (path / PLAN).exists()

    # ── plan ──

    def set_plan(self, plan: RoutingPlan, bucket_bytes: int, deadline_s: float = LOCK_DEADLINE_S) -> None:
        """Agree on streams and buckets. Nothing happens when plan and bucket_bytes are those that are here.

        Another plan drops all stored versions, whose buckets belong to the old one. The image stays what it is; deltas of the
        new plan fit it if they cover the same bytes.
        Raises LayoutError for a plan that does not fit the image, TransferTimeout, EnvironmentFault.
        """
        if self._has_plan(plan, bucket_bytes):
            return
        check_plan(plan, bucket_bytes, self.layout.image_bytes)
        with self.writing(deadline_s):
            if self._has_plan(plan, bucket_bytes):
                return
            for version in self._store.versions():
                self._store.discard(version)
            self._plan.write(plan, bucket_bytes)

    def _has_plan(self, plan: RoutingPlan, bucket_bytes: int) -> bool:
        found = self._plan.read()
        return found is not None and (found.plan.fingerprint, found.bucket_bytes) == (plan.fingerprint, bucket_bytes)

    @property
    def plan(self) -> RoutingPlan:
        """Raises WeightsError before `set_plan`."""
        return self._buckets().plan

    @property
    def bucket_bytes(self) -> int:
        """Dense bytes of a bucket. Raises WeightsError before `set_plan`."""
        return self._buckets().bucket_bytes

    def runs_of(self, streams: tuple[int, ...]) -> Runs:
        """What these streams cover of the image: sorted, neighbours joined. Raises WeightsError before `set_plan`."""
        return self._buckets().runs(streams)

    def _buckets(self) -> BucketPlan:
        found = self._plan.read()
        if found is None:
            raise WeightsError("no routing plan yet", got=self.path, remedy="set_plan comes first")
        return found

    def _decoders(self) -> Decoders:
        plan = self._buckets()
        if self._decoders_kept is None or self._decoders_kept.plan is not plan:
            self._decoders_kept = Decoders(plan, self._threads)
        return self._decoders_kept

    # ── image ──

    def state(self) -> ArenaState:
        """What the image is. To be sure that it stays so, ask inside `reading`."""
        return self._state.read()[0]

    def image(self, writable: bool = False) -> NDArray[np.uint16]:
        """The image, uint16 [image_bytes / 2], little-endian lanes, mapped: it changes when somebody applies.

        Read it inside `reading`; write it only as a publisher on a trainer's node.
        """
        return np.frombuffer(self._map(IMAGE, self.layout.image_bytes, writable), "<u2")

    def _journal(self) -> Journal:
        if self._journal_kept is None:
            self._journal_kept = Journal(self._map(JOURNAL, JOURNAL_BYTES, True))
        return self._journal_kept

    def _map(self, name: str, nbytes: int, writable: bool) -> mmap.mmap:
        """Mapped once per process: the page faults of a first pass cost more than an apply."""
        if (name, writable) not in self._maps:
            mapping = map_file(self.path / name, nbytes, writable)
            if mapping is None:
                raise WeightsError(f"the arena in {self.path} is gone", got=f"no {name}")
            self._maps[name, writable] = mapping
        return self._maps[name, writable]

    @contextlib.contextmanager
    def reading(self, deadline_s: float) -> Iterator[None]:
        """Shared with others who read (on a trainer's node: with the other publishers). The image stands still meanwhile.

        Finishes an apply that was interrupted first. Raises TransferTimeout when the lock is not free within deadline_s.
        """
        end_s = time.monotonic() + deadline_s
        while True:
            with self._lock.shared(max(end_s - time.monotonic(), 0.0)):
                if not self._journal().newest().is_active:
                    yield
                    return
            self.recover(max(end_s - time.monotonic(), 0.0))

    @contextlib.contextmanager
    def writing(self, deadline_s: float) -> Iterator[None]:
        """Alone with the image (on a trainer's node: a relay that READS it for a keyframe). Re-entrant for the same thread.

        Finishes an apply that was interrupted first. Raises TransferTimeout when the lock is not free within deadline_s.
        """
        with self._lock.exclusive(deadline_s):
            self._finish_interrupted()
            yield

    def recover(self, deadline_s: float) -> ArenaState:
        """Put right what a SIGKILL left: finish an interrupted apply, remove half-written files. Then the image is what is returned.

        Raises TransferTimeout when the lock is not free within deadline_s.
        """
        with self.writing(deadline_s):
            sweep(self.path)
            return self.state()

    # ── ends of an apply, under the exclusive lock ──

    def _settle(self, record: DeltaRecord, applied: Applied) -> None:
        """The image is whole again: say what it is, then forget how it came to be."""
        verified = applied.digest == record.digest
        self._state.write(ArenaState(record.version, applied.digest, verified), self._buckets().covers(record.streams))
        self._forget(record.version, verified)

    def _forget(self, version: int, verified: bool) -> None:
        if not verified:
            self._store.withdraw(version)
        JournalWriter(self._journal()).clear()

    def _give_up(self) -> None:
        """The image is between two versions and cannot be brought out of there: it is nothing."""
        self._state.write(EMPTY, "")
        JournalWriter(self._journal()).clear()

    def _finish_interrupted(self) -> None:
        """Under the exclusive lock: what the journal's newest mark asks for."""
        mark = self._journal().newest()
        if not mark.is_active:
            return
        state, record = self.state(), self._store.delta(mark.version)
        if state.version == mark.version:
            self._forget(mark.version, state.verified)
        elif record is None or (record.base, state.version) != (mark.base, mark.base):
            self._give_up()
        else:
            try:
                delta = DeltaApply(self._store, self._decoders(), record)
                applied = delta.go_on(self.image(writable=True), JournalWriter(self._journal()))
            except WeightsError:
                self._give_up()
            else:
                self._settle(record, applied)
