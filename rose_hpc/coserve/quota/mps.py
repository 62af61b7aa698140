"""MPS as the quota of a GPU: a ceiling, a memory limit and a low priority for rollout engines. Not yet verified on a GPU.

    holds from an engine's start, by its environment           live, by the control daemon
    ───────────────────────────────────────────────────        ─────────────────────────────────────────────────
    active thread percentage  the ceiling                      terminate_client   an engine's contexts are gone
    pinned memory limit       per device; more is refused
    client priority           serving 0, rollout 1: a hint

A running client's limits cannot be changed (NVIDIA, "set_active_thread_percentage": existing clients are not affected): `set_ceiling` is
for the next engine. No kernel that runs is preempted: MPS is the ceiling, the slack gate does the fast work.

Invariants
- A process that cannot reach the daemon runs outside MPS, without limits and without a word. So environments are checked when a process
  is named, and `await_clients` is asked once the engine answers: whoever is no client is no protected, or no confined, engine.
- A rollout engine's contexts are ended through the daemon before the process is: a signal to a client with work outstanding may take
  the server and all its clients along (NVIDIA, "Client early termination").
- MPS does not isolate faults: a fatal fault of one client takes all clients of that GPU. Nothing here can change that (docs/lending.md).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from rose_hpc.coserve.quota.mps_control import PIPES_VARIABLE, TERMINATE_DEADLINE_S, Client, MpsFolders
from rose_hpc.coserve.quota.mps_daemon import MpsDaemon
from rose_hpc.coserve.quota.mps_node import DEVICES_VARIABLE, checked_devices, until
from rose_hpc.errors import ConfigError, EnvironmentFault, RunFailed

PERCENTAGE_VARIABLE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MEMORY_VARIABLE = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
PRIORITY_VARIABLE = "CUDA_MPS_CLIENT_PRIORITY"
NORMAL, BELOW_NORMAL = "0", "1"
MIB = 1 << 20

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ceiling:
    """What a rollout engine may use of each device. threads_frac: of the GPU's threads, rounded down to what it can do."""

    threads_frac: float
    memory_bytes: int

    def __post_init__(self) -> None:
        if not 0.01 <= self.threads_frac <= 1 or self.memory_bytes < MIB:
            raise ConfigError(
                "the ceiling of a rollout engine cannot be enforced",
                got=f"{self.threads_frac:g} of the threads, {self.memory_bytes} bytes",
                expected="0.01 to 1 of the threads, and at least 1 MiB",
            )

    @property
    def percentage(self) -> int:
        """Whole percent, rounded down; 0.29 is 29 although 0.29 × 100 is less."""
        return math.floor(round(self.threads_frac * 100, 6))

    @property
    def memory_mib(self) -> int:
        return self.memory_bytes // MIB

    def __str__(self) -> str:
        return f"at most {self.percentage} % of the threads and {self.memory_mib} MiB per device"


def serving_environment(folders: MpsFolders, devices: Sequence[str]) -> dict[str, str]:
    """For the serving engine: the whole device, first. Takes back a percentage that Slurm's `--gres=mps` has set."""
    return folders.variables() | {
        DEVICES_VARIABLE: ",".join(checked_devices(devices)),
        PERCENTAGE_VARIABLE: "100",
        PRIORITY_VARIABLE: NORMAL,
    }


def rollout_environment(folders: MpsFolders, devices: Sequence[str], ceiling: Ceiling) -> dict[str, str]:
    """For a rollout engine. The limits hold for the whole process: a context of it may choose less, never more."""
    return folders.variables() | {
        DEVICES_VARIABLE: ",".join(checked_devices(devices)),
        PERCENTAGE_VARIABLE: str(ceiling.percentage),
        MEMORY_VARIABLE: ",".join(f"{device}={ceiling.memory_mib}M" for device in devices),
        PRIORITY_VARIABLE: BELOW_NORMAL,
    }


class MpsQuota:
    """See Quota, and the invariants above. daemon: started or joined. ceiling: of rollout engines, where `set_ceiling` names no other."""

    def __init__(self, daemon: MpsDaemon, ceiling: Ceiling) -> None:
        self.daemon, self._ceiling = daemon, ceiling

    def serving_environment(self) -> dict[str, str]:
        return serving_environment(self.daemon.folders, self.daemon.devices)

    def rollout_environment(self, devices: Sequence[str] | None = None) -> dict[str, str]:
        """devices: some of those lent; None: all."""
        chosen = self.daemon.devices if devices is None else devices
        if foreign := set(chosen) - set(self.daemon.devices):
            raise ConfigError("a rollout engine asks for a device that is not lent", got=sorted(foreign), expected=self.daemon.devices)
        return rollout_environment(self.daemon.folders, chosen, self._ceiling)

    def set_ceiling(self, frac: float, cores: int = 0) -> None:
        """Of the threads; the memory limit stays. One that runs keeps its own."""
        self._ceiling = Ceiling(frac, self._ceiling.memory_bytes)

    def confine(self, serving_pids: Iterable[int], rollout_pids: Iterable[int]) -> None:
        """Check what was set at their start. Raises EnvironmentFault: serving is no client, or a rollout process has no limits."""
        if serving := list(serving_pids):
            self.require_clients(serving)
        for pid in rollout_pids:
            environment = _environment(pid)
            if environment is not None and not self._limits(environment):
                raise EnvironmentFault(
                    "a rollout process does not carry the limits of MPS",
                    got=f"process {pid}: {_mps_part(environment) or 'nothing of MPS'}",
                    expected=_mps_part(self.rollout_environment()),
                    remedy="start rollout engines through the agent",
                )

    def _limits(self, environment: Mapping[str, str]) -> bool:
        return (
            environment.get(PIPES_VARIABLE) == str(self.daemon.folders.pipes)
            and environment.get(PRIORITY_VARIABLE) == BELOW_NORMAL
            and {PERCENTAGE_VARIABLE, MEMORY_VARIABLE} <= environment.keys()
        )

    def require_clients(self, pids: Iterable[int]) -> list[Client]:
        """Those of an engine's processes that compute under our daemon. Raises EnvironmentFault when none does: it runs outside MPS."""
        wanted = set(pids)
        found = [client for client in self.daemon.control.clients() if client.pid in wanted]
        if wanted and not found:
            raise EnvironmentFault(
                "an engine runs outside MPS, where nothing protects or confines it",
                got=f"none of {sorted(wanted)} is a client of the daemon at {self.daemon.folders.pipes}",
                expected="its workers are clients, once it answers",
                remedy="start it with the environment of this quota; compute mode EXCLUSIVE_PROCESS makes it fail instead",
            )
        return found

    def end(self, rollout_pids: Iterable[int], deadline_s: float = TERMINATE_DEADLINE_S) -> dict[int, str]:
        """Destroy the contexts of those that are clients, before they are ended; returns what was refused, by pid.

        deadline_s: for all of it. Raises nothing: whatever happens here, the device has to become free. A process whose contexts could
        not be destroyed should get SIGTERM and time; SIGKILL may cost the server, and serving with it.
        """
        end_s, refused, pids = time.monotonic() + deadline_s, dict[int, str](), set(rollout_pids)
        try:
            clients = [client for client in self.daemon.control.clients(deadline_s) if client.pid in pids]
        except RunFailed as failure:
            return dict.fromkeys(sorted(pids), str(failure))
        for client in clients:  # one after the other: the daemon refuses a second connection
            try:
                self.daemon.control.terminate_client(client, max(end_s - time.monotonic(), 0.0))
            except RunFailed as failure:
                log.warning("contexts of rollout process %d are not known to be gone: %s", client.pid, failure)
                refused[client.pid] = str(failure)
        return refused

    def release(self, rollout_pids: Iterable[int]) -> None:
        """Nothing: what was set at a client's start cannot be lifted. Whoever has to go is ended with `end`."""

    def close(self) -> None:
        """End the daemon where it is ours, and nothing computes under it."""
        self.daemon.close()

    def describe(self) -> str:
        return f"MPS, {self._ceiling}, low priority"

    def await_clients(self, pids: Iterable[int], deadline_s: float) -> None:
        """`require_clients`, for an engine that may still be making its first context."""
        wanted = set(pids)
        until(lambda: any(client.pid in wanted for client in self.daemon.control.clients()), deadline_s)
        self.require_clients(wanted)

    def fault(self) -> str | None:
        """The daemon has died or does not answer, or a server is in state FAULT: its clients have lost their contexts, serving too."""
        try:
            health = self.daemon.health()
        except RunFailed as failure:
            return str(failure)
        return f"a client of the MPS server has faulted, and all of its GPU with it: {health.servers}" if health.faulted else None


def _environment(pid: int) -> dict[str, str] | None:
    """That a process was started with; None when it is gone. Raises EnvironmentFault: another user's."""
    try:
        return psutil.Process(pid).environ()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return None
    except psutil.AccessDenied as error:
        raise EnvironmentFault("a process belongs to another user", got=f"process {pid}", expected="one of ours") from error


def _mps_part(environment: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(environment.items()) if name.startswith("CUDA_MPS_"))
