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

FAILURES_BEFORE_LEAVING = 3  # trajectories that lost a turn in a row, after which an executor is taken out


@dataclass(frozen=True)
class Executor:
    """An executor as the controller reaches it. kind: "dedicated" or "opportunistic"; relay: whose arena it loads from.

    device: what it runs on, where its id does not come back and the device may.
    """

    executor_id: str
    kind: str
    client: AgentClient
    relay: str = ""
    device: str | None = None


class FleetListener(Protocol):
    """What the one who drives turns must hear."""

    def executor_ready(self) -> None: ...

    def turns_displaced(self, trajectory_ids: list[str], reason: str) -> None: ...


class Fleet:
    """on_event(kind, executor_id, detail): executor_up, executor_lost, for the metrics."""

    def __init__(self, scheduler: RolloutScheduler, on_event: Callable[[str, str, str], None]) -> None:
        self.scheduler, self._on_event = scheduler, on_event
        self.listener: FleetListener | None = None
        self.newest_version = -1  # no executor can serve a later one
        self._executors: dict[str, Executor] = {}
        self._failed_for: dict[str, set[str]] = {}  # executor → trajectories that it lost a turn of since its last success

    @property
    def executors(self) -> dict[str, Executor]:
        """Those that are there, by id."""
        return dict(self._executors)

    def of_kind(self, kind: str) -> list[Executor]:
        return [e for e in self._executors.values() if e.kind == kind]

    def join(self, executor: Executor, max_concurrency: int) -> None:
        """A new executor, or one that was restarted: what its predecessor of that id had in flight is displaced."""
        self.leave(executor.executor_id, "it was started again")
        joined = ExecutorJoined(executor.executor_id, executor.kind, max_concurrency, executor.device)
        self.scheduler.observe(joined, time.monotonic())
        self._executors[executor.executor_id] = executor
        self._failed_for[executor.executor_id] = set()
        self._on_event("executor_up", executor.executor_id, executor.kind)

    def publishing(self, version: int) -> None:
        """Executors may serve this version from now on."""
        self.newest_version = max(self.newest_version, version)

    def ready(self, executor_id: str, version: int) -> None:
        """The executor serves this version."""
        self.publishing(version)
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

    def over(self, executor: Executor, reason: str) -> None:
        """The executor has said itself that it is gone; nothing where another one has its id meanwhile."""
        if self._executors.get(executor.executor_id) is executor:
            self.leave(executor.executor_id, reason)

    def turn_ended(self, executor_id: str) -> None:
        """A turn came back: the executor works."""
        self._failed_for[executor_id] = set()

    def turn_failed(self, executor: Executor, trajectory_id: str, reason: str) -> None:
        """The executor is to blame for a lost turn; it leaves once FAILURES_BEFORE_LEAVING trajectories in a row say so.

        Different ones: a single turn that breaks executors must not take them out one after the other. What an executor of the
        same id did before it was started again does not count.
        """
        if self._executors.get(executor.executor_id) is not executor:
            return
        failed_for = self._failed_for[executor.executor_id]
        failed_for.add(trajectory_id)
        if len(failed_for) >= FAILURES_BEFORE_LEAVING:
            self.leave(executor.executor_id, reason)
