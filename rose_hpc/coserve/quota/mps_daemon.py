"""An MPS control daemon of our own: one per serving engine, for the devices that are lent. Not yet verified on a GPU.

    ROOT/               0700
        owner.lock      flock(2) by whoever starts and ends it: `rose-hpc serve`, a run's lender
        agent.lock      flock(2) by the agent that lends under it, where that is another process
        commands.lock   flock(2) around each command (mps_control.py)
        pipe/           0700, CUDA_MPS_PIPE_DIRECTORY: the daemon's sockets and its pid file
        log/            0700, CUDA_MPS_LOG_DIRECTORY: control.log, server.log; start.log is what the start said

                 ┌─ none there ──────────▶ `-d` ─ answers ─┐
    start ───────┼─ there already, ours ─▶ adopted ────────┼──▶ up ── close ─┬─ nobody computes under it ─▶ quit, TERM, KILL by pid
                 └─ another's, or not                      │                 └─ a serving engine does ────▶ left, to be adopted
                    to be had ──▶ EnvironmentFault         └─ it dies: alive() is False, health() raises DaemonGone

    join ────────── runs already, whoever started it ─▶ up ── close ─▶ left as it is

Invariants
- It outlives its owner for as long as something computes under it: killing agent and owner must not cost the serving engine a request.
- Only this user reaches it. Folders and processes of others are never touched, joined or ended.
- Devices are named by UUID: numbers change their meaning under MPS (NVIDIA, "CUDA_VISIBLE_DEVICES").

A daemon that died cannot be replaced under a serving engine that runs: what is started later joins the new one, apart from it. So it
is not restarted here; its device is given back and serving goes on.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from rose_hpc.coserve.quota.mps_control import Client, DaemonGone, MpsControl, MpsFolders, daemon_environment, try_lock
from rose_hpc.coserve.quota.mps_node import (
    DEVICES_VARIABLE,
    POLL_S,
    check_socket_path,
    checked_devices,
    devices_of,
    each,
    find_executable,
    gone,
    lives,
    make_folders,
    make_private,
    may_compute,
    refuse_competitors,
    running_daemon,
    servers_of,
    until,
    words_of,
)
from rose_hpc.errors import EnvironmentFault, RunFailed

START_DEADLINE_S = 10.0
STOP_DEADLINE_S = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MpsHealth:
    """daemon: its pid. servers: pid → state."""

    daemon: int
    servers: dict[int, str]

    @property
    def faulted(self) -> bool:
        """A client has faulted: every client that shares its GPU has lost its contexts, serving too."""
        return "FAULT" in self.servers.values()


class MpsDaemon:
    """root: its folder, made if absent. devices: UUIDs of all that is lent. executable: None looks it up on PATH.

    Raises at construction ConfigError for a device that is no UUID, EnvironmentFault for a missing executable or too long a path.
    """

    def __init__(self, root: Path, devices: Sequence[str], executable: Path | None = None) -> None:
        self.folders, self.devices = MpsFolders(root.absolute()), checked_devices(devices)
        check_socket_path(self.folders.pipes)
        self._executable = find_executable(executable)
        self.control = MpsControl(self.folders, self._executable)
        self._lock: int | None = None
        self._joined = False
        self._process: psutil.Process | None = None

    def start(self, deadline_s: float = START_DEADLINE_S) -> None:
        """It answers on return. Raises EnvironmentFault when it cannot be had; then nothing is left running that we started."""
        make_folders(self.folders)
        self._take("owner.lock", "another agent owns this MPS folder")
        try:
            left = running_daemon(self.folders)
            if left is None:
                self._clear_orphans()
                refuse_competitors(self.devices, self.folders.pipes)
                self._launch(deadline_s)
            else:
                self._adopt(left)
        except BaseException:
            self._let_go()
            raise

    def join(self) -> None:
        """Use the one that runs, which neither our end nor our death ends. Raises EnvironmentFault: none is there, or it is unusable."""
        if not self.folders.root.is_dir() or (running := running_daemon(self.folders)) is None:
            raise EnvironmentFault(
                "no MPS control daemon runs there",
                got=f"nothing at {self.folders.pipes}",
                expected="the daemon under which the serving engine was started",
                remedy="start both with `rose-hpc serve MODEL`, or the daemon by hand before the server (docs/lending.md)",
            )
        make_folders(self.folders)
        self._take("agent.lock", "another agent lends under this MPS control daemon")
        self._process, self._joined = running, True
        try:
            self._check_joined(running)
        except BaseException:
            self._let_go()
            raise

    def alive(self) -> bool:
        """Whether its process lives. Costs a look into /proc: to be asked often."""
        return self._process is not None and not gone(self._process)

    def health(self) -> MpsHealth:
        """One command a server and one more. Raises DaemonGone when it died, DaemonSilent when it does not answer, RunFailed otherwise."""
        if self._process is None or not self.alive():
            raise DaemonGone(
                "the MPS control daemon has died", got=f"nothing at {self.folders.pipes}", remedy=f"see {self.folders.logs}/control.log"
            )
        return MpsHealth(self._process.pid, {pid: self.control.server_state(pid) for pid in self.control.servers()})

    def close(self, deadline_s: float = STOP_DEADLINE_S) -> None:
        """End it and its servers, unless something computes under it: then leave it to the next owner. A joined one is left.

        Raises EnvironmentFault when a process of it does not even end on SIGKILL.
        """
        try:
            if self._process is not None and not self._joined:
                if users := self._users(deadline_s / 4):
                    log.warning("the MPS control daemon %d stays: processes %s compute under it", self._process.pid, users)
                else:
                    self._end(deadline_s * 3 / 4)
        finally:
            self._let_go()

    # ── start ──

    def _take(self, lock_name: str, taken: str) -> None:
        lock = os.open(self.folders.root / lock_name, os.O_RDWR | os.O_CREAT, 0o600)
        if not try_lock(lock):
            os.close(lock)
            raise EnvironmentFault(taken, got=self.folders.root, remedy="give each agent a folder of its own")
        self._lock = lock

    def _let_go(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._lock = self._process = None
        self._joined = False

    def _check_joined(self, running: psutil.Process) -> None:
        self._clients_of(running)
        if set(before := devices_of(running)) != set(self.devices):
            raise EnvironmentFault(
                "the MPS control daemon that is there already has other devices",
                got=",".join(before) or "all, by number",
                expected=",".join(self.devices),
                remedy="lend its devices (CUDA_VISIBLE_DEVICES, by UUID), or restart daemon and serving engine with these",
            )

    def _clients_of(self, running: psutil.Process) -> list[Client]:
        try:
            return self.control.clients()
        except RunFailed as failure:
            raise EnvironmentFault(
                "the MPS control daemon that is there already does not answer",
                got=f"process {running.pid}: {failure.what}",
                remedy="end what computes under it, then this process and those below it",
            ) from failure

    def _adopt(self, left: psutil.Process) -> None:
        """Take over what a killed owner left, or the operator started, if it is what we would have started."""
        before = devices_of(left)
        self._process = left
        clients = self._clients_of(left)
        if set(before) == set(self.devices):
            log.info("adopted the MPS control daemon %d with %d clients", left.pid, len(clients))
            return
        if users := self._users(STOP_DEADLINE_S):
            raise EnvironmentFault(
                "the MPS control daemon that is there already has other devices, and is in use",
                got=f"{','.join(before)}, used by processes {users}",
                expected=",".join(self.devices),
                remedy="lend the same devices, or restart the serving engine",
            )
        self._end(STOP_DEADLINE_S)
        make_private(self.folders.pipes)
        self._launch(START_DEADLINE_S)

    def _clear_orphans(self) -> None:
        """End servers whose daemon died with nobody under them. One in use cannot be joined; beside another it would protect nothing."""
        if not (orphans := servers_of(self.folders.pipes)):
            return
        if users := may_compute(self.folders.pipes):
            raise EnvironmentFault(
                "an MPS server is still there whose control daemon died",
                got=f"processes {[server.pid for server in orphans]}, used by {users}",
                remedy="restart the serving engine: it runs on, but its device cannot be lent",
            )
        self._end_all(orphans, STOP_DEADLINE_S)

    def _launch(self, deadline_s: float) -> None:
        end_s = time.monotonic() + deadline_s
        start_log = self.folders.logs / "start.log"
        environment = daemon_environment(os.environ) | self.folders.variables() | {DEVICES_VARIABLE: ",".join(self.devices)}
        try:
            with open(start_log, "w", opener=_private) as out:  # not a pipe, which the daemon might keep open
                done = subprocess.run(
                    [self._executable, "-d"],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    timeout=deadline_s,
                    env=environment,
                )
            while done.returncode == 0 and time.monotonic() < end_s:
                if (process := running_daemon(self.folders)) is not None and self._answers(end_s):
                    self._process = process
                    return
                time.sleep(POLL_S)
            got = f"status {done.returncode}"
        except (subprocess.TimeoutExpired, OSError) as error:
            got = str(error)
        self._process = running_daemon(self.folders)
        if self._process is not None:
            self._end(STOP_DEADLINE_S)
        raise EnvironmentFault(
            "the MPS control daemon does not start",
            got=f"{got}; it said: {words_of(start_log)}",
            expected=f"an answer within {deadline_s:g} s",
            remedy=f"see {self.folders.logs}/control.log; without MPS a GPU is lent only with --gate-only",
        )

    def _answers(self, end_s: float) -> bool:
        try:
            MpsControl(self.folders, self._executable, max(end_s - time.monotonic(), POLL_S)).default_cap()
        except RunFailed:
            return False
        return True

    # ── end ──

    def _users(self, deadline_s: float) -> list[int]:
        """Pids of what computes under it; where it does not answer, of whatever may."""
        try:
            listed = self.control.clients(deadline_s)
        except RunFailed as failure:
            log.warning("the MPS control daemon does not tell who uses it: %s", failure)
            return may_compute(self.folders.pipes)
        return sorted({client.pid for client in listed if lives(client.pid)})

    def _end(self, deadline_s: float) -> None:
        """`quit`, then SIGTERM, then SIGKILL of the daemon and its servers, each with a third of the deadline."""
        family = servers_of(self.folders.pipes)
        if self._process is not None and not gone(self._process):
            family.append(self._process)
            try:
                self.control.quit(deadline_s / 3)
                until(lambda: all(map(gone, family)), deadline_s / 3)
            except RunFailed as failure:
                log.warning("the MPS control daemon did not take `quit`: %s", failure)
        self._end_all(family, deadline_s * 2 / 3)
        self._process = None
        shutil.rmtree(self.folders.pipes, ignore_errors=True)

    def _end_all(self, processes: Sequence[psutil.Process], deadline_s: float) -> None:
        for verb in ("terminate", "kill"):
            each(processes, verb)
            if until(lambda: all(map(gone, processes)), deadline_s / 2):
                return
        raise EnvironmentFault(
            "processes of the MPS control daemon do not end",
            got=[process.pid for process in processes if not gone(process)],
            remedy="look for GPU errors in dmesg",
        )


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
