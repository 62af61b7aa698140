"""Quotas on real processes that compete for one core; the layout of cgroup version 2 on a copy of its folder structure."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rose_hpc.coserve.quota import CgroupQuota, GateOnly, Quota, SchedIdleQuota, best_quota, pin
from rose_hpc.coserve.quota.base import cgroup_paths, threads
from rose_hpc.coserve.quota.cgroup import find_hierarchy, members
from rose_hpc.coserve.quota.sched_idle import autogroup_name
from rose_hpc.errors import EnvironmentFault

SPIN = "print('up', flush=True)\nwhile True: pass"
SPIN_THREADS = """
import threading, time
def spin():
    while True: pass
for _ in range(3): threading.Thread(target=spin, daemon=True).start()
print('up', flush=True)
time.sleep(600)
"""
CORE = max(os.sched_getaffinity(0))
WINDOW_S = 0.7


@pytest.fixture
def spinners() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes that compute without end on one core: serving and rollout."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for program in (SPIN, SPIN_THREADS):
            started.append(subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE))
        for process in started:
            assert process.stdout is not None and process.stdout.readline() == b"up\n"
        pin([p.pid for p in started], [CORE])
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate(timeout=10)


@pytest.fixture
def undisturbed(spinners: list[subprocess.Popen[bytes]]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The same two in one cgroup of high weight, where there are cgroups: other load of this machine does not come between."""
    try:
        frame = CgroupQuota()
    except EnvironmentFault:
        yield spinners
        return
    with contextlib.closing(frame):
        frame.confine([p.pid for p in spinners], [])
        yield spinners


def cgroup_quota() -> CgroupQuota:
    try:
        return CgroupQuota()
    except EnvironmentFault as fault:
        pytest.skip(f"no cgroups to change here: {fault.what}")


def sched_idle_quota() -> SchedIdleQuota:
    if os.geteuid() != 0:
        pytest.skip("leaving SCHED_IDLE takes CAP_SYS_NICE")
    return SchedIdleQuota()


def shares(processes: list[subprocess.Popen[bytes]]) -> list[float]:
    """Each process's part of the CPU time that they got together within a window."""
    before = [sum(psutil.Process(p.pid).cpu_times()[:2]) for p in processes]
    time.sleep(WINDOW_S)
    used = [sum(psutil.Process(p.pid).cpu_times()[:2]) - b for p, b in zip(processes, before, strict=True)]
    return [u / sum(used) for u in used]


def rate(process: subprocess.Popen[bytes], window_s: float = WINDOW_S) -> float:
    """CPU seconds per second of one process."""
    before_s, begin_s = sum(psutil.Process(process.pid).cpu_times()[:2]), time.monotonic()
    time.sleep(window_s)
    return (sum(psutil.Process(process.pid).cpu_times()[:2]) - before_s) / (time.monotonic() - begin_s)


@pytest.mark.kernel
@pytest.mark.parametrize("make", [cgroup_quota, sched_idle_quota])
def test_rollout_gets_what_serving_leaves_and_a_fair_share_once_released(
    make: Callable[[], Quota], undisturbed: list[subprocess.Popen[bytes]]
) -> None:
    serving, rollout = spinners = undisturbed
    quota = make()
    with contextlib.closing(quota):
        quota.confine([serving.pid], [rollout.pid])
        assert shares(spinners)[1] < 0.05
        psutil.Process(serving.pid).suspend()
        assert rate(rollout) > 0.8
        psutil.Process(serving.pid).resume()
        assert shares(spinners)[1] < 0.05
        quota.release([rollout.pid])
        assert shares(spinners)[1] > 0.2
    assert shares(spinners)[1] > 0.2


@pytest.mark.kernel
@pytest.mark.parametrize("frac", [0.3, 0.05])
def test_a_ceiling_is_what_a_process_gets_although_nobody_else_wants_the_core(spinners: list[subprocess.Popen[bytes]], frac: float) -> None:
    serving, rollout = spinners
    psutil.Process(serving.pid).suspend()
    with contextlib.closing(cgroup_quota()) as quota:
        quota.set_ceiling(frac, 1)
        quota.confine([serving.pid], [rollout.pid])
        assert rate(rollout, 2.0) == pytest.approx(frac, abs=min(0.1, frac))
        assert quota.describe().endswith(f"cpu.idle, at most {frac:g} of the device")
        quota.set_ceiling(1.0, 1)
        assert rate(rollout, 1.0) > 0.8 and quota.describe().endswith("cpu.idle")
        quota.set_ceiling(frac, 1)
        quota.release([rollout.pid])
        assert rate(rollout, 1.0) > 0.8  # it has to end, and is not held up


def test_a_ceiling_that_cannot_be_held_is_told(caplog: pytest.LogCaptureFixture) -> None:
    quotas: list[Quota] = [SchedIdleQuota(), GateOnly()]
    for quota in quotas:
        assert "ceiling" not in quota.describe()
        quota.set_ceiling(0.3, 1)
        assert quota.describe().endswith("which does not hold the ceiling of 0.3")
        quota.set_ceiling(1.0, 1)
        assert "ceiling" not in quota.describe()
    assert caplog.text.count("degraded") == 2


def test_quotas_of_the_kernel_need_no_word_with_a_daemon() -> None:
    for quota in (SchedIdleQuota(), GateOnly()):
        assert quota.serving_environment() == quota.rollout_environment() == quota.end([os.getpid()], 1.0) == {}
        quota.await_clients([os.getpid()], 1.0)
        assert quota.fault() is None


def test_cgroups_give_processes_back_to_where_they_came_from_and_leave_nothing(spinners: list[subprocess.Popen[bytes]]) -> None:
    serving, rollout = spinners
    quota = cgroup_quota()
    before = cgroup_paths(serving.pid)
    quota.confine([serving.pid], [])
    quota.confine([], [rollout.pid])
    inside = [cgroup_paths(p.pid) for p in spinners]
    assert inside[0] != before and inside[1] != before and inside[0] != inside[1]
    group = group_of(serving.pid)
    assert members(group / "serving") == [serving.pid] and members(group / "rollout") == [rollout.pid]
    quota.close()
    assert [cgroup_paths(p.pid) for p in spinners] == [before, before]
    assert "cpu.idle" in quota.describe()
    assert not group.exists()


def group_of(pid: int) -> Path:
    """The private group above a confined process's cgroup."""
    path = find_hierarchy(Path("/sys/fs/cgroup")).path_of(pid)
    assert path is not None
    return path.parent


OWNER = """
import sys, time
from rose_hpc.coserve.quota import CgroupQuota
quota = CgroupQuota()
quota.confine([int(sys.argv[1])], [int(sys.argv[2])])
print("up", flush=True)
time.sleep(600)
"""


def test_the_group_of_an_owner_that_was_killed_is_cleared_away_by_the_next_one_only(spinners: list[subprocess.Popen[bytes]]) -> None:
    cgroup_quota().close()
    pids = [str(p.pid) for p in spinners]
    with subprocess.Popen([sys.executable, "-c", OWNER, *pids], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        group = group_of(spinners[0].pid)
        cgroup_quota().close()
        assert members(group / "serving") == [spinners[0].pid]  # its owner lives
        owner.kill()
    assert group.is_dir()
    cgroup_quota().close()
    assert not group.exists()
    assert all(p.poll() is None for p in spinners)


@pytest.mark.parametrize("make", [cgroup_quota, sched_idle_quota])
def test_processes_that_are_gone_are_skipped(make: Callable[[], Quota]) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait(60)
    quota = make()
    quota.confine([gone.pid], [gone.pid])
    quota.release([gone.pid])
    quota.close()


def test_sched_idle_reaches_every_thread_and_is_lifted_from_every_thread(spinners: list[subprocess.Popen[bytes]]) -> None:
    quota = sched_idle_quota()
    pid = spinners[1].pid
    assert len(threads(pid)) == 4
    quota.confine([], [pid])
    assert {os.sched_getscheduler(t) for t in threads(pid)} == {os.SCHED_IDLE}
    quota.close()
    assert {os.sched_getscheduler(t) for t in threads(pid)} == {os.SCHED_OTHER}


def test_a_process_of_the_default_autogroup_has_a_group_of_its_own() -> None:
    assert autogroup_name("") == autogroup_name("\n") == ""
    assert autogroup_name("/autogroup-12 nice 0\n") == "/autogroup-12"


def test_sched_idle_refuses_what_it_cannot_protect(spinners: list[subprocess.Popen[bytes]]) -> None:
    quota, cgroups = sched_idle_quota(), cgroup_quota()
    with contextlib.closing(cgroups):
        cgroups.confine([spinners[0].pid], [])
        with pytest.raises(EnvironmentFault, match="another scheduling group"):
            quota.confine([spinners[0].pid], [spinners[1].pid])
        assert {os.sched_getscheduler(t) for t in threads(spinners[1].pid)} == {os.SCHED_OTHER}


def test_pinning_reaches_every_thread(spinners: list[subprocess.Popen[bytes]]) -> None:
    pid, cores = spinners[1].pid, sorted(os.sched_getaffinity(0))
    pin([pid], cores)
    assert {tuple(sorted(os.sched_getaffinity(t))) for t in threads(pid)} == {tuple(cores)}
    pin([pid], [CORE])
    assert {tuple(os.sched_getaffinity(t)) for t in threads(pid)} == {(CORE,)}


def test_pinning_to_cores_that_do_not_exist_is_refused(spinners: list[subprocess.Popen[bytes]]) -> None:
    with pytest.raises(EnvironmentFault, match="cannot be bound"):
        pin([spinners[0].pid], [4095])


def test_without_cgroups_sched_idle_is_what_is_left(tmp_path: Path) -> None:
    assert best_quota(tmp_path).describe() == "SCHED_IDLE"


# ── cgroup version 2, as a folder structure: what is written where; that the kernel obeys was seen with version 1 only ──────────


def cgroup2_folder(path: Path, controllers: str, handed_down: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, text in (("controllers", controllers), ("subtree_control", handed_down), ("procs", "")):
        (path / f"cgroup.{name}").write_text(text)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with version 2 only, whose root hands the cpu controller to a delegated unit; we are in the unit's `agent`."""
    root = cgroup2_folder(tmp_path / "cgroup", "cpu memory", "cpu memory")
    cgroup2_folder(root / "unit", "cpu memory", "")
    cgroup2_folder(root / "unit" / "agent", "", "")
    in_cgroup(tmp_path / "proc", os.getpid(), "/unit/agent")
    return root


def in_cgroup(proc: Path, pid: int, path: str) -> None:
    (proc / str(pid)).mkdir(parents=True, exist_ok=True)
    (proc / str(pid) / "cgroup").write_text(f"0::{path}\n")


def test_version_2_makes_its_groups_in_the_delegated_cgroup_above_ours(root: Path) -> None:
    found = find_hierarchy(root, root.parent / "proc")
    assert (found.version, found.base, found.own) == (2, root / "unit", root / "unit" / "agent")
    assert (root / "unit" / "cgroup.subtree_control").read_text() == "+cpu"


def test_version_2_stays_inside_its_mount(root: Path) -> None:
    for folder in (root, root / "unit"):
        (folder / "cgroup.controllers").write_text("memory")
        (folder / "cgroup.subtree_control").write_text("memory")
    with pytest.raises(EnvironmentFault, match="no cgroup in which groups can be made"):
        find_hierarchy(root, root.parent / "proc")


def test_version_2_confines_with_weight_and_idle(root: Path) -> None:
    quota = CgroupQuota(root, root.parent / "proc")
    (group,) = (root / "unit").glob("rose-quota-*")
    in_cgroup(root.parent / "proc", 4001, "/unit/serving")
    in_cgroup(root.parent / "proc", 4002, "/unit/agent")
    quota.confine([4001], [4002])
    assert quota.describe() == "cgroup v2 cpu.idle"
    assert (group / "cpu.weight").read_text() == "10000" and (group / "cgroup.subtree_control").read_text() == "+cpu"
    assert (group / "rollout" / "cpu.idle").read_text() == "1"
    assert (members(group / "serving"), members(group / "rollout")) == ([4001], [4002])
    for frac, cores, written in ((0.3, 2, "12000 20000"), (0.01, 1, "1000 100000"), (1.0, 2, "max 100000")):
        quota.set_ceiling(frac, cores)
        assert (group / "rollout" / "cpu.max").read_text() == written
    quota.release([4002])
    assert members(group / "released") == [4002]
