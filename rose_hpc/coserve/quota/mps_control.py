"""Commands to an MPS control daemon, as text, each within a deadline. Not yet verified on a GPU.

    MpsControl ── one command on stdin ──▶ nvidia-cuda-mps-control ── PIPES/control ──▶ the daemon of that folder
               ◀─ lines, checked ────────

Sources: NVIDIA, Multi-Process Service, "Tools and interface reference" and "Client early termination"; nvidia-cuda-mps-control(1).
What those leave open was taken from reports of drivers 550 to 580: the daemon takes one connection at a time and refuses others,
a reply is one bare value or pids between blanks, and `terminate_client` has been seen not to return at all.

Invariants
- One command at a time per daemon, across processes: a flock(2) on LOCK; what the daemon refuses for being busy is asked again.
- No call takes longer than its deadline. One that passes leaves nothing behind but a daemon that may still act on the command.
- A reply that is not understood raises; it never counts as an empty list or as success.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from rose_hpc.errors import RunFailed

EXECUTABLE = "nvidia-cuda-mps-control"
PIPES_VARIABLE, LOGS_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
LOCK = "commands.lock"
COMMAND_DEADLINE_S = 5.0
TERMINATE_DEADLINE_S = 2.0  # reported: 17 to 34 ms, or never
RETRY_S = 0.02

NO_DAEMON = "Cannot find MPS control daemon process"
BUSY = "Cannot send command to MPS control daemon process"
NO_SERVER = "Server not found"  # of `ps`, before the first client
TERMINATED = ("0", "CUDA_SUCCESS")
SERVER_STATES = ("INITIALIZING", "ACTIVE", "FAULT")


class DaemonGone(RunFailed):
    """No control daemon answers at that folder."""


class DaemonSilent(RunFailed):
    """The control daemon lives but has not answered within the deadline."""


@dataclass(frozen=True)
class Client:
    """A process that computes under an MPS server. Pids as in the daemon's pid namespace."""

    server: int
    pid: int


@dataclass(frozen=True)
class ClientOnDevice:
    """One row of `ps`. device: the beginning of a UUID."""

    pid: int
    server: int
    device: str


@dataclass(frozen=True)
class MpsFolders:
    """Where one daemon lives. All of it private to one user: whoever reaches `pipes` can join its servers, or end them."""

    root: Path

    @property
    def pipes(self) -> Path:
        return self.root / "pipe"

    @property
    def logs(self) -> Path:
        return self.root / "log"

    def variables(self) -> dict[str, str]:
        """What makes a process speak to this daemon."""
        return {PIPES_VARIABLE: str(self.pipes), LOGS_VARIABLE: str(self.logs)}


class MpsControl:
    """The commands that we use. All raise DaemonGone, DaemonSilent, or RunFailed for a refusal or a reply not understood.

    executable: path of nvidia-cuda-mps-control. Blocking; an event loop calls it in a thread.
    """

    def __init__(self, folders: MpsFolders, executable: Path, deadline_s: float = COMMAND_DEADLINE_S) -> None:
        self._folders, self._executable, self._deadline_s = folders, executable, deadline_s

    def servers(self, deadline_s: float | None = None) -> list[int]:
        """Pids of the daemon's servers: none before the first client."""
        return self._pids("get_server_list", deadline_s)

    def clients(self, deadline_s: float | None = None) -> list[Client]:
        """Every process that computes under this daemon. deadline_s: for all the commands that this takes, one a server and one more."""
        end_s = self._end_s(deadline_s)
        return [
            Client(server, pid)
            for server in self.servers(_left_s(end_s))
            for pid in self._pids(f"get_client_list {server}", _left_s(end_s))
        ]

    def clients_on_devices(self) -> list[ClientOnDevice]:
        """Which client uses which device; a client of two devices has two entries."""
        return rows_of_ps(self.ask("ps"))

    def server_state(self, server: int) -> str:
        """One of SERVER_STATES. FAULT: a client has faulted, and all that share its GPU have lost their contexts."""
        reply = self.ask(f"get_server_status {server}")
        states = [state for state in SERVER_STATES if state in re.findall("[A-Z]+", reply.upper())]
        return (
            states[0] if len(states) == 1 else _not_understood(f"get_server_status {server}", reply, f"one of {', '.join(SERVER_STATES)}")
        )

    def terminate_client(self, client: Client, deadline_s: float = TERMINATE_DEADLINE_S) -> None:
        """Destroy a client's contexts, its outstanding work included. The process lives on: it may then be killed safely."""
        command = f"terminate_client {client.server} {client.pid}"
        reply = self.ask(command, deadline_s)
        if reply not in TERMINATED:
            _not_understood(command, reply, "0: the contexts are gone")

    def default_cap(self) -> float:
        """In percent, of servers to come. The cheapest question that the daemon itself answers: whether it is up."""
        return self._number("get_default_active_thread_percentage")

    def quit(self, deadline_s: float) -> None:
        """End the daemon and its servers. Returns when it has been told, not when it is gone."""
        self.ask("quit", deadline_s)

    def _pids(self, command: str, deadline_s: float | None) -> list[int]:
        reply = self.ask(command, deadline_s)
        words = reply.split()
        return [int(word) for word in words] if all(map(str.isdecimal, words)) else _not_understood(command, reply, "pids")

    def _number(self, command: str) -> float:
        reply = self.ask(command)
        try:
            return float(reply)
        except ValueError:
            return _not_understood(command, reply, "a number")

    def ask(self, command: str, deadline_s: float | None = None) -> str:
        """The reply without its line end."""
        end_s = self._end_s(deadline_s)
        with self._alone(command, end_s):
            while True:
                status, reply = self._ask_once(command, end_s)
                if NO_DAEMON in reply:
                    raise DaemonGone("no MPS control daemon answers", got=reply, expected=f"one at {self._folders.pipes}")
                if BUSY not in reply:
                    return reply if status == 0 else _not_understood(command, f"status {status}: {reply}", "status 0")
                time.sleep(RETRY_S)

    def _end_s(self, deadline_s: float | None) -> float:
        """Of time.monotonic(). None: the deadline of this control."""
        return time.monotonic() + (self._deadline_s if deadline_s is None else deadline_s)

    def _ask_once(self, command: str, end_s: float) -> tuple[int, str]:
        if (left_s := end_s - time.monotonic()) <= 0:
            raise self._silent(command)
        try:
            done = subprocess.run(
                [self._executable],
                input=f"{command}\n",
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=left_s,
                env=daemon_environment(os.environ) | self._folders.variables(),
            )
        except subprocess.TimeoutExpired as error:
            raise self._silent(command) from error
        except OSError as error:
            raise RunFailed(f"{self._executable} cannot be run", got=error.strerror) from error
        return done.returncode, done.stdout.strip()

    @contextmanager
    def _alone(self, command: str, end_s: float) -> Iterator[None]:
        """While nobody else asks this daemon."""
        try:
            lock = os.open(self._folders.root / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError as error:
            raise DaemonGone("no MPS control daemon answers", got="no such folder", expected=f"{self._folders.root}") from error
        except OSError as error:  # a full disk, say
            raise RunFailed(
                f"MPS control: {command} cannot be asked, as its lock cannot be opened",
                got=f"{self._folders.root / LOCK}: {error.strerror}",
            ) from error
        try:
            while not try_lock(lock):
                if time.monotonic() > end_s:
                    raise self._silent(command)
                time.sleep(RETRY_S)
            yield
        finally:
            os.close(lock)

    def _silent(self, command: str) -> DaemonSilent:
        return DaemonSilent(
            f"the MPS control daemon does not answer: {command}",
            expected="an answer within its deadline",
            remedy=f"see {self._folders.logs}/control.log; serving goes on, but its device cannot be lent",
        )


def _left_s(end_s: float) -> float:
    return max(end_s - time.monotonic(), 0.0)


def try_lock(descriptor: int) -> bool:
    """Take flock(2) on it, unless another holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def daemon_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Without any MPS setting of the surroundings: Slurm's, or a user's, would become every client's limit."""
    return {name: value for name, value in inherited.items() if not name.startswith("CUDA_MPS_")}


def rows_of_ps(reply: str) -> list[ClientOnDevice]:
    """From lines under the title PID ID SERVER DEVICE NAMESPACE COMMAND. Raises RunFailed when it is something else."""
    if not reply or reply == NO_SERVER:
        return []
    title, *lines = reply.splitlines()
    columns = title.split()
    if not {"PID", "SERVER", "DEVICE"} <= set(columns):
        _not_understood("ps", title, "PID ID SERVER DEVICE NAMESPACE COMMAND")
    return [_row(dict(zip(columns, line.split(), strict=False)), line) for line in lines if line.strip()]


def _row(fields: Mapping[str, str], line: str) -> ClientOnDevice:
    try:
        return ClientOnDevice(int(fields["PID"]), int(fields["SERVER"]), fields["DEVICE"])
    except (KeyError, ValueError):
        return _not_understood("ps", line, "PID ID SERVER DEVICE NAMESPACE COMMAND")


def _not_understood(command: str, reply: str, expected: str) -> NoReturn:
    raise RunFailed(f"MPS control: {command} was refused, or its reply is not understood", got=reply or "nothing", expected=expected)
