"""The executors of a run as they come and go, kept in step with the pure scheduler.

    join ─▶ (no weights) ─ready(v)─▶ eligible while v ≥ required ─leave─▶ gone        (may join again under the same id)

Whoever drives turns sets `listener`, which hears at once when an executor becomes ready (plan again) or leaves (its turns
are queued again). Routing is the scheduler's; bringing weights is versions.py's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rose_hpc.rollout.client import AgentClient
from rose_hpc.rollout.scheduler import ExecutorJoined, ExecutorLeft, RolloutScheduler, VersionApplied, VersionRequired

FAILURES_BEFORE_LEAVING = 3  # lost turns in a row after which an executor is taken out


@dataclass(frozen=True)
class Executor:
    """An executor as the controller reaches it. kind: "dedicated" or "opportunistic"."""

    executor_id: str
    kind: str
    client: AgentClient


class FleetListener(Protocol):
    """What the one who drives turns must hear."""

    def executor_ready(self) -> None: ...

    def turns_displaced(self, trajectory_ids: list[str], reason: str) -> None: ...


class Fleet:
    """on_event(kind, executor_id, detail): executor_up, executor_lost, for the metrics."""

    def __init__(self, scheduler: RolloutScheduler, on_event: Callable[[str, str, str], None]) -> None:
        self.scheduler, self._on_event = scheduler, on_event
        self.listener: FleetListener | None = None
        self._executors: dict[str, Executor] = {}
        self._lost_in_a_row: dict[str, int] = {}

    @property
    def executors(self) -> dict[str, Executor]:
        """Those that are there, by id."""
        return dict(self._executors)

    def of_kind(self, kind: str) -> list[Executor]:
        return [e for e in self._executors.values() if e.kind == kind]

    def join(self, executor: Executor, max_concurrency: int) -> None:
        """A new executor, or one that was restarted: what its predecessor of that id had in flight is displaced."""
        self.leave(executor.executor_id, "it was started again")
        self.scheduler.observe(ExecutorJoined(executor.executor_id, executor.kind, max_concurrency), time.monotonic())
        self._executors[executor.executor_id] = executor
        self._lost_in_a_row[executor.executor_id] = 0
        self._on_event("executor_up", executor.executor_id, executor.kind)

    def ready(self, executor_id: str, version: int) -> None:
        """The executor serves this version."""
        if executor_id in self._executors:
            self.scheduler.observe(VersionApplied(executor_id, version), time.monotonic())
            if self.listener is not None:
                self.listener.executor_ready()

    def require(self, version: int) -> None:
        """Only executors at this version or later receive turns from now on."""
        self.scheduler.observe(VersionRequired(version), time.monotonic())

    def leave(self, executor_id: str, reason: str) -> None:
        """The executor is gone. Unknown ids are ignored: two may notice."""
        if self._executors.pop(executor_id, None) is None:
            return
        self._on_event("executor_lost", executor_id, reason)
        displaced = self.scheduler.observe(ExecutorLeft(executor_id), time.monotonic())
        if self.listener is not None:
            self.listener.turns_displaced(displaced, f"{executor_id} left: {reason}")

    def turn_ended(self, executor_id: str) -> None:
        """A turn came back: the executor works."""
        self._lost_in_a_row[executor_id] = 0

    def turn_lost(self, executor_id: str, reason: str) -> None:
        """A turn did not come back; the executor leaves after FAILURES_BEFORE_LEAVING of them in a row."""
        self._lost_in_a_row[executor_id] = self._lost_in_a_row.get(executor_id, 0) + 1
        if self._lost_in_a_row[executor_id] >= FAILURES_BEFORE_LEAVING:
            self.leave(executor_id, reason)
