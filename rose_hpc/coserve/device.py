"""A lent device: what a serving engine and a rollout engine share, and who may use it when.

On CPUs the device is a set of cores. Only what computes is bound to it: vLLM's EngineCore and workers, which are the children of
an engine's process. The API processes stay outside, on the other cores and at normal priority, so that health checks are
answered while the rollout engine waits.

    serving_up      serving's workers: pinned, in the protected group
    rollout_spawned the whole rollout engine: pinned, idle class, from its first instruction on (starting is heavy work)
    rollout_up      its workers stay; its API process leaves the device
    give_back       the idle class is lifted, so that whatever must end can end quickly

On GPUs (cpus empty; not yet verified on one) nothing is bound or confined: the gate alone protects, and CPU time says nothing
about the device, so its busy fractions are NaN.

It starts and ends no process (lender.py), and does not read the serving engine's state (slack gate).
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from rose_hpc.coserve.gate import read_gate_stats
from rose_hpc.coserve.quota import Quota, pin
from rose_hpc.errors import EnvironmentFault
from rose_hpc.messages import DeviceSample

log = logging.getLogger(__name__)


def workers_of(engine_pid: int) -> list[int]:
    """Pids of everything below an engine's own process."""
    try:
        return [child.pid for child in psutil.Process(engine_pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time used by these processes so far; those that are gone count nothing."""
    total = 0.0
    for pid in pids:
        try:
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return total


@dataclass
class _Mark:
    """Readings at the last sample."""

    time_s: float
    serving_s: float
    rollout_s: float
    held_s: float


class Device:
    """One lent device on this machine."""

    def __init__(self, name: str, cpus: Iterable[int], quota: Quota, board: Path) -> None:
        self.name, self._cpus, self._quota, self._board = name, sorted(cpus), quota, board
        everywhere = os.sched_getaffinity(0)
        elsewhere = everywhere - set(self._cpus)
        self._elsewhere = sorted(elsewhere if elsewhere else everywhere)
        self._serving: list[int] = []
        self._rollout: list[int] = []
        self._mark = _Mark(time.monotonic(), 0.0, 0.0, 0.0)
        self._complained = False

    def serving_up(self, engine_pid: int) -> None:
        """The serving engine answers: bind its workers to the device."""
        self._serving = workers_of(engine_pid)
        self._bind(self._serving, [engine_pid])
        self._quota.confine([engine_pid, *self._serving], [])
        self.restart_sampling()

    def rollout_spawned(self, engine_pid: int) -> None:
        """A rollout engine has been started: nothing of it may hurt, not even its imports."""
        self._bind([engine_pid], [])
        self._quota.confine([], [engine_pid])
        self._rollout = [engine_pid]

    def rollout_up(self, engine_pid: int) -> None:
        """The rollout engine answers: its workers stay confined, its API process need not. Where it has to stay, it answers late."""
        self._rollout = workers_of(engine_pid)
        self._quota.confine([], self._rollout)
        self._release([engine_pid])
        self._bind(self._rollout, [engine_pid])
        self.restart_sampling()

    def give_back(self) -> None:
        """Lift the idle class from the rollout engine, which is about to end. Where that is not permitted, it ends more slowly."""
        self._release([pid for pid in self._rollout if psutil.pid_exists(pid)])
        self._rollout = []

    def close(self) -> None:
        """Undo what was set up, as far as it is permitted."""
        try:
            self._quota.close()
        except EnvironmentFault as fault:
            self._complain(fault)

    def _release(self, pids: list[int]) -> None:
        """Out of the idle class, where that is permitted: an ordinary user may put threads into SCHED_IDLE, but not take them out."""
        try:
            self._quota.release(pids)
        except EnvironmentFault as fault:
            self._complain(fault)

    def _complain(self, fault: EnvironmentFault) -> None:
        if not self._complained:
            log.warning("the rollout engine stays in the idle class: its health answers may be late, and it ends more slowly: %s", fault)
        self._complained = True

    def _bind(self, to_device: list[int], off_device: list[int]) -> None:
        if self._cpus:
            pin(to_device, self._cpus)
            pin(off_device, self._elsewhere)

    @property
    def quota(self) -> str:
        """What confines the rollout side."""
        return self._quota.describe()

    def restart_sampling(self) -> None:
        self._mark = self._reading()

    def sample(self) -> DeviceSample:
        """How the device was used since the last sample."""
        now, before = self._reading(), self._mark
        self._mark = now
        span_s = max(now.time_s - before.time_s, 1e-6)
        capacity_s = span_s * len(self._cpus) if self._cpus else math.nan
        return DeviceSample(
            device=self.name,
            serving_busy_frac=max(now.serving_s - before.serving_s, 0.0) / capacity_s,
            rollout_busy_frac=max(now.rollout_s - before.rollout_s, 0.0) / capacity_s,
            gate_held_frac=max(now.held_s - before.held_s, 0.0) / span_s,
            quota=self.quota,
        )

    def _reading(self) -> _Mark:
        stats = read_gate_stats(self._board)
        held_s = stats.held_s if stats is not None else 0.0
        return _Mark(time.monotonic(), cpu_seconds(self._serving), cpu_seconds(self._rollout), held_s)
