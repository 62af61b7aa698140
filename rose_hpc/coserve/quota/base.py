"""What every quota does, and the threads of processes: Linux schedules, and binds, threads.

    serving   starts with serving_environment ─▶ confine ─▶ … fault? … fault? … ─▶ close
    a lease   set_ceiling ─▶ its engine starts with rollout_environment ─▶ confine ─▶ await_clients ─▶ … ─▶ release ─▶ end ─▶ (killed)

Where a daemon stands between the engines and the device (MPS) every step says something; a quota of the kernel needs but a few of
them (KernelQuota).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from rose_hpc.errors import EnvironmentFault

log = logging.getLogger(__name__)

ROUNDS = 100  # over a process's threads; each round only meets threads that were started by one not yet treated


class Quota(Protocol):
    """Serving first. All methods skip processes that are gone, and apply to every thread, later ones included.

    Those that ask a daemon block, each within a deadline: an event loop calls `confine`, `end`, `await_clients`, `fault` and `close` in
    a thread.
    """

    def serving_environment(self) -> dict[str, str]:
        """What a serving engine must be started with, in addition to the inherited environment."""

    def set_ceiling(self, frac: float, cores: int) -> None:
        """The rollout engine that starts next may use at most this share of the device. 1: all of it.

        cores: that stand for the device; 0: it is a GPU. A quota that cannot hold a ceiling says so in `describe`.
        Raises ConfigError: no share that can be enforced.
        """

    def rollout_environment(self) -> dict[str, str]:
        """What a rollout engine under that ceiling must be started with, in addition to the inherited environment."""

    def confine(self, serving_pids: Iterable[int], rollout_pids: Iterable[int]) -> None:
        """From now on the rollout processes get only what the serving ones leave. Called again, it adds processes.

        Raises EnvironmentFault where it would not be enforced.
        """

    def await_clients(self, pids: Iterable[int], deadline_s: float) -> None:
        """Return once an engine that answers, with these processes, computes where the quota reaches it.

        Raises EnvironmentFault: it computes elsewhere, unprotected or unconfined. RunFailed: nobody can tell.
        """

    def fault(self) -> str | None:
        """Why serving is not protected any more, None while it is."""

    def end(self, rollout_pids: Iterable[int], deadline_s: float) -> dict[int, str]:
        """Take from these what they hold of the device, before they are killed; by pid, what could not be taken. Raises nothing."""

    def release(self, rollout_pids: Iterable[int]) -> None:
        """Make these ordinary processes again, at once: they have to end, or to answer. Raises EnvironmentFault if not permitted."""

    def close(self) -> None:
        """Undo everything, as far as the processes still live."""

    def describe(self) -> str:
        """The mechanism, in words, and what of the ceiling it cannot hold."""


class KernelQuota:
    """What quotas without a daemon have in common: the kernel sees every process, and a killed one holds nothing."""

    _ceiling_frac = 1.0  # the last that could not be held

    def serving_environment(self) -> dict[str, str]:
        """Nothing."""
        return {}

    def rollout_environment(self) -> dict[str, str]:
        """Nothing."""
        return {}

    def set_ceiling(self, frac: float, cores: int) -> None:
        """Cannot be held; see `describe`."""
        self._ceiling_frac = frac
        if frac < 1:
            log.warning("degraded: the rollout engine may use more than its ceiling of %g of the device", frac)

    @property
    def _not_held(self) -> str:
        return "" if self._ceiling_frac >= 1 else f", which does not hold the ceiling of {self._ceiling_frac:g}"

    def await_clients(self, pids: Iterable[int], deadline_s: float) -> None:
        """They cannot escape."""

    def fault(self) -> str | None:
        """The kernel does not fail alone."""
        return None

    def end(self, rollout_pids: Iterable[int], deadline_s: float) -> dict[int, str]:
        """Nothing: the kernel does, once they are killed."""
        return {}


class GateOnly(KernelQuota):
    """No quota at all: where none can be had, and the operator lends all the same. Says so instead of pretending."""

    def confine(self, serving_pids: Iterable[int], rollout_pids: Iterable[int]) -> None:
        """Nothing."""

    def release(self, rollout_pids: Iterable[int]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""

    def describe(self) -> str:
        return f"the gate alone{self._not_held}"


def pin(pids: Iterable[int], cpus: Iterable[int]) -> None:
    """Bind all threads of the processes to these cores; threads to come inherit it. Raises EnvironmentFault: no such cores."""
    cores = sorted(set(cpus))
    for pid in pids:
        try:
            for_each_thread(pid, lambda thread: os.sched_setaffinity(thread, cores))
        except (OSError, ValueError) as error:
            raise EnvironmentFault(
                f"process {pid} cannot be bound to its device", got=f"cores {cores}: {error}", expected=f"some of {usable_cores()}"
            ) from error


def usable_cores() -> list[int]:
    """Cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def threads(pid: int) -> set[int]:
    """Thread ids of a process; empty when it is gone."""
    try:
        return {int(name) for name in os.listdir(f"/proc/{pid}/task")}
    except (FileNotFoundError, ProcessLookupError):
        return set()


def for_each_thread(pid: int, apply: Callable[[int], None]) -> None:
    """Apply something that new threads inherit, until no thread is left without: one may be born of another still untreated."""
    treated: set[int] = set()
    for _ in range(ROUNDS):
        fresh = threads(pid) - treated
        if not fresh:
            return
        for thread in fresh:
            try:
                apply(thread)
            except ProcessLookupError:
                continue  # it ended meanwhile
        treated |= fresh
    raise EnvironmentFault(f"process {pid} starts threads faster than they can be treated", got=f"{len(treated)} threads so far")


def cgroup_paths(pid: int, proc: Path = Path("/proc")) -> dict[str, str]:
    """Controller → path of a process (cgroups(7), /proc/PID/cgroup); version 2 has the key "". Empty when the process is gone."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    entries = (line.split(":", 2) for line in lines)
    return {name: path for _, names, path in entries for name in names.split(",")}
