"""What a node shows of MPS: the folder of a control daemon, daemons of others, processes. Not yet verified on a GPU.

Nothing here starts, ends or changes a process but `each`, which is given the ones to treat.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from rose_hpc.coserve.quota.mps_control import EXECUTABLE, PIPES_VARIABLE, MpsFolders
from rose_hpc.errors import ConfigError, EnvironmentFault

DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
UUID_KINDS = ("GPU-", "MIG-")
UUID = re.compile(r"(GPU|MIG)-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
SERVER = "nvidia-cuda-mps-server"
PID_FILE = "nvidia-cuda-mps-control.pid"
LONGEST_SOCKET = "control_privileged"
SOCKET_PATH_BYTES = 107  # unix(7); over it the daemon starts, cannot listen, and ends without a word
POLL_S = 0.05

log = logging.getLogger(__name__)


# ── daemons ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def running_daemon(folders: MpsFolders) -> psutil.Process | None:
    """The daemon of that pipe folder; None where it is dead, and its pid perhaps another's. Raises EnvironmentFault: another user's."""
    try:
        process = psutil.Process(int((folders.pipes / PID_FILE).read_text()))
        if gone(process) or not is_daemon(process):
            return None
        if process.uids().effective != os.geteuid():
            raise EnvironmentFault(
                "the MPS control daemon belongs to another user",
                got=f"process {process.pid} of {process.username()}",
                expected=f"user {os.geteuid()}",
                remedy="run serving, agent and daemon as one user: an MPS server serves one user at a time",
            )
        return process if process.environ().get(PIPES_VARIABLE) == str(folders.pipes) else None
    except (FileNotFoundError, ValueError, psutil.NoSuchProcess):
        return None
    except psutil.AccessDenied as error:
        raise EnvironmentFault("a process that cannot be looked at has the pid of our MPS control daemon", got=error.pid) from error
    except PermissionError as error:
        raise EnvironmentFault(
            "the MPS folder belongs to another user", got=folders.root, expected=f"a folder of user {os.geteuid()}"
        ) from error


def words_of(start_log: Path) -> str:
    """What a start said. A log that cannot be read must not hide why it failed."""
    with suppress(OSError):
        return start_log.read_text(errors="replace").strip() or "nothing"
    return "nothing that can be read"


def devices_of(daemon: psutil.Process) -> list[str]:
    """As a daemon was told; none where it was told nothing, and has them all."""
    return [name for name in daemon.environ().get(DEVICES_VARIABLE, "").split(",") if name]


def is_daemon(process: psutil.Process) -> bool:
    """Whether it is a control daemon, and not one that sends it a command."""
    return _is(EXECUTABLE, process) and bool({"-d", "-f"} & set(process.cmdline()))


def _is(program: str, process: psutil.Process) -> bool:
    """Also through an interpreter and its option."""
    return program in (Path(word).name for word in process.cmdline()[:3])


def servers_of(pipes: Path) -> list[psutil.Process]:
    """Servers of the daemon of that pipe folder, also after its death."""
    return [process for process in _started_with(pipes) if _is(SERVER, process)]


def may_compute(pipes: Path) -> list[int]:
    """Pids that were told of the daemon of that pipe folder, when it cannot be asked: whoever computes under it is among them."""
    not_engines = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = (process for process in _started_with(pipes) if not _is(SERVER, process) and not is_daemon(process))
    return sorted(process.pid for process in found if process.pid not in not_engines)


def _started_with(pipes: Path) -> Iterator[psutil.Process]:
    """Processes of ours that have the pipe folder in their environment."""
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if not gone(process) and process.environ().get(PIPES_VARIABLE) == str(pipes):
                yield process


def refuse_competitors(devices: Sequence[str], pipes: Path) -> None:
    """Two MPS servers on one GPU take turns on it: neither is protected from the other. Raises EnvironmentFault."""
    for process, visible in _other_daemons(pipes):
        names = [name for name in (visible or "").split(",") if name]
        if visible is None or any(device.startswith(name) for device in devices for name in names):
            raise EnvironmentFault(
                "another MPS control daemon has the device already",
                got=f"process {process.pid} of {process.username()}, for {visible or 'all devices'}",
                expected="one daemon per GPU",
                remedy="end it (echo quit | nvidia-cuda-mps-control), or lend a serving engine that runs under ours",
            )
        if not all(name.startswith(UUID_KINDS) for name in names):
            log.warning("MPS control daemon %d may have the same devices: it knows them by number, as %s", process.pid, visible)


def _other_daemons(pipes: Path) -> Iterator[tuple[psutil.Process, str | None]]:
    """With what they show of the devices; None for all of them. Those of other users, which cannot be asked, are only reported."""
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            environment = _readable_environment(process) if is_daemon(process) else None
            if environment is not None and environment.get(PIPES_VARIABLE) != str(pipes):
                yield process, environment.get(DEVICES_VARIABLE)


def _readable_environment(process: psutil.Process) -> dict[str, str] | None:
    try:
        return process.environ()
    except psutil.AccessDenied:
        log.warning("MPS control daemon %d of %s may have the same devices", process.pid, process.username())
        return None


def checked_devices(devices: Sequence[str]) -> tuple[str, ...]:
    """Raises ConfigError unless they are different full UUIDs, at least one."""
    wrong = [device for device in devices if not UUID.fullmatch(device)]
    if wrong or not devices or len(set(devices)) < len(devices):
        raise ConfigError(
            "devices under MPS are named by UUID, each once",
            got=list(devices),
            expected="GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx, or MIG-…",
            remedy="take them from `nvidia-smi -L`: numbers change their meaning under MPS",
        )
    return tuple(devices)


def make_folders(folders: MpsFolders) -> None:
    """Those of a daemon, private. Raises EnvironmentFault: see make_private."""
    for folder in (folders.root, folders.pipes, folders.logs):
        make_private(folder)


def make_private(folder: Path) -> None:
    """A folder of ours, 0700. Raises EnvironmentFault when something else is there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise EnvironmentFault("the MPS folder cannot be made", got=f"{folder}: {error.strerror}", expected="a private folder") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise EnvironmentFault(
            "the MPS folder belongs to another user, or is no folder",
            got=f"{folder}, of user {found.st_uid}",
            expected=f"a folder of user {os.geteuid()}",
            remedy="give each agent a folder of its own, and run serving and agent as one user",
        )
    folder.chmod(0o700)


def check_socket_path(pipes: Path) -> None:
    longest = os.fsencode(pipes / LONGEST_SOCKET)
    if len(longest) > SOCKET_PATH_BYTES:
        raise EnvironmentFault(
            "the path of the MPS folder is too long",
            got=f"{len(longest)} bytes: {longest.decode()}",
            expected=f"at most {SOCKET_PATH_BYTES}",
            remedy="use a folder nearer to the root, such as one in /run or /tmp",
        )


def find_executable(executable: Path | None) -> Path:
    name = EXECUTABLE if executable is None else str(executable)
    path = shutil.which(name)
    if path is None:
        raise EnvironmentFault(
            "MPS is not installed",
            got=f"no executable {name}",
            expected=f"{EXECUTABLE} of the NVIDIA driver on PATH",
            remedy="install the driver's compute utilities; without MPS a GPU is lent only with --gate-only",
        )
    return Path(path)


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────────


def gone(process: psutil.Process) -> bool:
    """Also as a zombie: a daemon's parent is whoever adopts orphans, who may be slow to reap them."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def lives(pid: int) -> bool:
    try:
        return not gone(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def each(processes: Sequence[psutil.Process], verb: str) -> None:
    for process in processes:
        try:
            getattr(process, verb)()
        except psutil.NoSuchProcess:
            continue


def until(true: Callable[[], bool], deadline_s: float) -> bool:
    """Whether it came true within the deadline."""
    end_s = time.monotonic() + deadline_s
    while not true():
        if time.monotonic() > end_s:
            return False
        time.sleep(POLL_S)
    return True
