"""SCHED_IDLE (sched(7)) on the rollout engine's threads, where cgroups are not ours to change.

It ranks threads only inside one scheduling group. Between sibling cgroups it does nothing (measured: latencies 2.4 to 3.2 times as
long as alone), nor between sessions under autogroup, so that processes of different groups are refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from rose_hpc.coserve.quota.base import KernelQuota, cgroup_paths, for_each_thread
from rose_hpc.errors import EnvironmentFault

AUTOGROUP_SWITCH = Path("/proc/sys/kernel/sched_autogroup_enabled")


class SchedIdleQuota(KernelQuota):
    """See Quota. It ranks, and limits nothing: a ceiling is not held."""

    def __init__(self) -> None:
        self._serving: set[int] = set()
        self._rollout: set[int] = set()

    def confine(self, serving_pids: Iterable[int], rollout_pids: Iterable[int]) -> None:
        """Raises EnvironmentFault where serving and rollout are in different scheduling groups; then nothing has changed."""
        serving, rollout = self._serving | set(serving_pids), self._rollout | set(rollout_pids)
        groups = {pid: group for pid in serving | rollout if (group := scheduling_group(pid)) is not None}
        if len(set(groups.values())) > 1 and rollout & groups.keys():
            raise EnvironmentFault(
                "SCHED_IDLE does not protect serving from a process of another scheduling group",
                got=groups,
                expected="one cgroup and, under autogroup, one session",
                remedy="start both engines from one session, or let the agent manage cgroups (a delegated cgroup)",
            )
        for pid in rollout:
            _set_policy(pid, os.SCHED_IDLE)
        self._serving, self._rollout = serving & groups.keys(), rollout & groups.keys()

    def release(self, rollout_pids: Iterable[int]) -> None:
        """Raises EnvironmentFault where leaving SCHED_IDLE is not permitted: it takes CAP_SYS_NICE or RLIMIT_NICE of 20."""
        for pid in set(rollout_pids):
            self._rollout.discard(pid)
            _set_policy(pid, os.SCHED_OTHER)

    def close(self) -> None:
        self.release(self._rollout.copy())

    def describe(self) -> str:
        return f"SCHED_IDLE{self._not_held}"


def scheduling_group(pid: int) -> tuple[str, ...] | None:
    """What must be equal for SCHED_IDLE to rank two processes: CPU cgroup, and autogroup where that is on. None when it is gone."""
    paths = cgroup_paths(pid)
    if not paths:
        return None
    return paths.get("cpu", paths.get("", "")), _autogroup(pid)


def _autogroup(pid: int) -> str:
    try:
        if AUTOGROUP_SWITCH.read_text().strip() != "1":
            return ""
        return autogroup_name(Path(f"/proc/{pid}/autogroup").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return ""  # a kernel without it


def autogroup_name(content: str) -> str:
    """From /proc/PID/autogroup, which is empty for the default group: of processes whose session is as old as the machine."""
    return content.split()[0] if content.strip() else ""


def _set_policy(pid: int, policy: int) -> None:
    apply: Callable[[int], None] = lambda thread: os.sched_setscheduler(thread, policy, os.sched_param(0))  # noqa: E731
    try:
        for_each_thread(pid, apply)
    except PermissionError as error:
        raise EnvironmentFault(
            f"scheduling policy of process {pid} cannot be changed",
            got=error.strerror,
            remedy="set RLIMIT_NICE to 20 (LimitNICE=-0 in a unit, `nice` in limits.conf), or grant CAP_SYS_NICE",
        ) from error
