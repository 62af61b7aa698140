"""cpu.idle and a ceiling on the rollout engine's cgroup, versions 1 and 2 (kernel documentation, admin-guide/cgroup-v2 and
scheduler/sched-design-CFS, sched-bwc).

    BASE/rose-quota-HEX/            highest weight: serving loses nothing to other processes of the machine that come to its cores
        serving/                    ordinary
        rollout/                    cpu.idle = 1: runs on a core only while nothing of its siblings wants it;
                                    cpu.max (version 1: cpu.cfs_quota_us), the ceiling of a lease: not even then all the time
        released/                   ordinary: rollout processes that have to end or to answer; outside, the weight would starve them

BASE is this process's own cgroup in version 1. In version 2 it is the nearest one above or at ours that we may change and that can
hand the cpu controller down: a cgroup with processes of its own cannot.

Invariants
- The owner holds a flock(2) on the group's folder. A group whose lock is free belongs to nobody: the next construction moves its
  processes to its own cgroup and removes it.
- `close` puts processes back to where they came from; those born inside go to this process's cgroup.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rose_hpc.coserve.quota.base import KernelQuota, cgroup_paths
from rose_hpc.errors import EnvironmentFault

log = logging.getLogger(__name__)

PREFIX = "rose-quota-"
CONTROLLER = {1: "cpu", 2: ""}  # key in cgroup_paths, by version
WEIGHT = {1: ("cpu.shares", "262144"), 2: ("cpu.weight", "10000")}  # the highest
PERIODS_US = (20_000, 100_000)  # of a ceiling: the shorter, the less a rollout engine runs in one go
LEAST_QUOTA_US = 1_000  # per period; the kernel's own bound
SERVING, ROLLOUT, RELEASED = "serving", "rollout", "released"
NAME_ATTEMPTS = 3  # another agent's construction may remove a folder before it has been locked
REMOVE_DEADLINE_S = 2.0  # a cgroup is busy until the last process that was killed in it has gone
REMOVE_RETRY_S = 0.01


@dataclass(frozen=True)
class Hierarchy:
    """Where groups are made. mount: of the hierarchy with the cpu controller. own: this process's cgroup. weight: file and value."""

    version: int
    mount: Path
    base: Path
    own: Path
    weight: tuple[str, str]
    proc: Path

    def path_of(self, pid: int) -> Path | None:
        """Folder of a process's cgroup; None when it is gone."""
        path = cgroup_paths(pid, self.proc).get(CONTROLLER[self.version])
        return None if path is None else self.mount / path.lstrip("/")


class CgroupQuota(KernelQuota):
    """See Quota. Raises EnvironmentFault at construction where no cgroup can be made; then nothing has changed."""

    def __init__(self, root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> None:
        self._hierarchy = find_hierarchy(root, proc)
        self._origins: dict[int, Path] = {}
        self._held_frac = 1.0
        with _refused_as_fault(self._hierarchy.base):
            sweep(self._hierarchy)
            self._group, self._lock = make_group(self._hierarchy)

    def set_ceiling(self, frac: float, cores: int) -> None:
        """Of the CPU time of these cores. Where the kernel takes none, as under a lower one of a parent, `describe` says so."""
        try:
            limit(self._group / ROLLOUT, self._hierarchy.version, frac * cores if frac < 1 and cores else None)
            held = frac >= 1 or cores > 0
        except OSError as error:
            log.warning("no cgroup below %s takes a ceiling of %g cores: %s", self._group, frac * cores, error)
            held = frac >= 1
        self._held_frac = frac if held else 1.0
        super().set_ceiling(1.0 if held else frac, cores)

    def confine(self, serving_pids: Iterable[int], rollout_pids: Iterable[int]) -> None:
        with _refused_as_fault(self._group):
            for pid in serving_pids:
                self._take(pid, self._group / SERVING)
            for pid in rollout_pids:
                self._take(pid, self._group / ROLLOUT)

    def _take(self, pid: int, into: Path) -> None:
        origin = self._hierarchy.path_of(pid)
        if origin is not None and self._group not in (origin, *origin.parents):
            self._origins[pid] = origin
        move(pid, into)

    def release(self, rollout_pids: Iterable[int]) -> None:
        with _refused_as_fault(self._group):
            for pid in rollout_pids:
                self._take(pid, self._group / RELEASED)

    def _give_back(self, pid: int) -> None:
        origin = self._origins.pop(pid, self._hierarchy.own)
        move(pid, origin if origin.exists() else self._hierarchy.own)

    def close(self) -> None:
        try:
            with _refused_as_fault(self._group):
                remove_group(self._group, self._give_back)
        finally:  # what could not be removed is nobody's then, and the next construction clears it away
            os.close(self._lock)

    def describe(self) -> str:
        held = "" if self._held_frac >= 1 else f", at most {self._held_frac:g} of the device"
        return f"cgroup v{self._hierarchy.version} cpu.idle{held}{self._not_held}"


# ── where ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def find_hierarchy(root: Path, proc: Path = Path("/proc")) -> Hierarchy:
    """The cpu controller that we may use. Raises EnvironmentFault: none."""
    ours = cgroup_paths(os.getpid(), proc)
    version = 1 if CONTROLLER[1] in ours else 2
    mount = _mount(root, version)
    own = mount / ours.get(CONTROLLER[version], "").lstrip("/")
    base = own if version == 1 else next((c for c in (own, *own.parents) if mount in (c, *c.parents) and _hands_down_cpu(c)), None)
    if base is None or not _writable(base):
        raise EnvironmentFault(
            "no cgroup in which groups can be made",
            got=f"version {version}, ours is {own}",
            expected="one that is writable and hands down the cpu controller",
            remedy="delegate a cgroup to the agent (systemd: Delegate=cpu and DelegateSubgroup=agent), or run it as root",
        )
    return Hierarchy(version, mount, base, own, WEIGHT[version], proc)


def _mount(root: Path, version: int) -> Path:
    """Version 2 lies at root, or at root/unified beside version 1."""
    unified = root / "unified"
    return root / "cpu" if version == 1 else unified if unified.is_dir() else root


def _writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK)


def _hands_down_cpu(folder: Path) -> bool:
    """Whether children of this version 2 cgroup have the cpu controller; hands it down where it can."""
    control = folder / "cgroup.subtree_control"
    try:
        if "cpu" in control.read_text().split():
            return _writable(folder)
        if "cpu" not in (folder / "cgroup.controllers").read_text().split() or not _writable(folder):
            return False
        control.write_text("+cpu")
    except OSError:
        return False  # processes of its own (EBUSY), or not ours
    return True


# ── ceiling ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def limit(group: Path, version: int, cores: float | None) -> None:
    """What the group may use in a period of CPU time, in cores; None: all that is there. Raises OSError where the kernel refuses it."""
    period_us = next((p for p in PERIODS_US if cores is not None and cores * p >= LEAST_QUOTA_US), PERIODS_US[-1])
    quota_us = None if cores is None else max(round(cores * period_us), LEAST_QUOTA_US)
    if version == 2:
        (group / "cpu.max").write_text(f"{'max' if quota_us is None else quota_us} {period_us}")
        return
    (group / "cpu.cfs_quota_us").write_text("-1")  # a new period is refused where the old quota does not fit it
    (group / "cpu.cfs_period_us").write_text(str(period_us))
    if quota_us is not None:
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))


# ── making and removing ──────────────────────────────────────────────────────────────────────────────────────────────


def make_group(hierarchy: Hierarchy) -> tuple[Path, int]:
    """A fresh group with both sides, and the descriptor that holds its lock."""
    for _ in range(NAME_ATTEMPTS):
        group = hierarchy.base / f"{PREFIX}{secrets.token_hex(4)}"
        group.mkdir()
        try:
            lock = _lock(group)
        except FileNotFoundError:
            continue
        if lock is not None and group.is_dir():
            _furnish(group, hierarchy, lock)
            return group, lock
    raise EnvironmentFault("groups vanish as fast as they are made", got=f"{NAME_ATTEMPTS} attempts in {hierarchy.base}")


def _furnish(group: Path, hierarchy: Hierarchy, lock: int) -> None:
    file, value = hierarchy.weight
    try:
        (group / file).write_text(value)
        if hierarchy.version == 2:
            (group / "cgroup.subtree_control").write_text("+cpu")
        for side in (SERVING, ROLLOUT, RELEASED):
            (group / side).mkdir()
        (group / ROLLOUT / "cpu.idle").write_text("1")
    except OSError:
        remove_group(group, lambda pid: None)
        os.close(lock)
        raise


def sweep(hierarchy: Hierarchy) -> None:
    """Remove the groups of owners that were killed."""
    for group in hierarchy.base.glob(f"{PREFIX}*"):
        try:
            lock = _lock(group)
        except FileNotFoundError:
            continue  # its owner has just removed it
        if lock is None:
            continue
        try:
            remove_group(group, lambda pid: move(pid, hierarchy.own))
        finally:
            os.close(lock)


def remove_group(group: Path, give_back: Callable[[int], None]) -> None:
    """Move all processes out, those that are born meanwhile as well, and remove the folders. Raises OSError after a deadline."""
    end_s = time.monotonic() + REMOVE_DEADLINE_S
    while True:
        for side in (group / name for name in (SERVING, ROLLOUT, RELEASED)):
            for pid in members(side):
                give_back(pid)
        try:
            _remove_folders(group)
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > end_s:
                raise
        time.sleep(REMOVE_RETRY_S)


def _remove_folders(group: Path) -> None:
    for folder in (group / SERVING, group / ROLLOUT, group / RELEASED, group):
        if folder.is_dir():
            folder.rmdir()


def members(group: Path) -> list[int]:
    """Pids of a cgroup; none when it does not exist."""
    try:
        return [int(line) for line in (group / "cgroup.procs").read_text().split()]
    except FileNotFoundError:
        return []


def move(pid: int, into: Path) -> None:
    """Move a process with all its threads; nothing when it is gone."""
    try:
        (into / "cgroup.procs").write_text(str(pid))
    except ProcessLookupError:
        return


def _lock(folder: Path) -> int | None:
    """Descriptor that holds the lock, or None when somebody else does."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


@contextmanager
def _refused_as_fault(where: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EnvironmentFault(
            f"cgroups below {where} cannot be used", got=error, remedy="a kernel with cpu.idle (5.15 or newer), and write permission"
        ) from error
