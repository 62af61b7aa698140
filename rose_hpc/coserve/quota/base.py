"""What every quota does, and the threads of processes: Linux schedules, and binds, threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from rose_hpc.errors import EnvironmentFault

ROUNDS = 100  # over a process's threads; each round only meets threads that were started by one not yet treated


class Quota(Protocol):
    """Serving first, on CPUs. All methods skip processes that are gone, and apply to every thread, later ones included."""

    def confine(self, serving_pids: Iterable[int], rollout_pids: Iterable[int]) -> None:
        """From now on the rollout processes get only what the serving ones leave. Called again, it adds processes.

        Raises EnvironmentFault where the kernel would not enforce it.
        """

    def release(self, rollout_pids: Iterable[int]) -> None:
        """Make these ordinary processes again, at once: they have to end, or to answer. Raises EnvironmentFault if not permitted."""

    def close(self) -> None:
        """Undo everything, as far as the processes still live."""

    def describe(self) -> str:
        """The mechanism, in words."""


class GateOnly:
    """No quota at all: what a device has for which none exists yet. Says so instead of pretending."""

    def confine(self, serving_pids: Iterable[int], rollout_pids: Iterable[int]) -> None:
        """Nothing."""

    def release(self, rollout_pids: Iterable[int]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""

    def describe(self) -> str:
        return "the gate alone"


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
