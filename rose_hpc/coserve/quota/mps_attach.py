"""Whether a server that runs already does so under our MPS daemon: the condition for lending its device. Not yet verified on a GPU.

    URL ──▶ who listens there, on this machine ──▶ with its descendants ──▶ among the daemon's clients, on every lent device?

A CUDA process joins MPS when it initialises, or never: a server that was started without the daemon cannot be taken in later. It can be
lent only after a restart, and is refused until then.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from rose_hpc.control import UNIX
from rose_hpc.coserve.quota.mps import MpsQuota
from rose_hpc.coserve.quota.mps_control import Client
from rose_hpc.errors import EnvironmentFault

CONNECT_DEADLINE_S = 2.0
ANY_ADDRESS = ("0.0.0.0", "::")
PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: unix(7), SO_PEERCRED
DEFAULT_PORT = {"http": 80, "https": 443}


def attached(quota: MpsQuota, server: str | int) -> list[Client]:
    """The server's processes that compute under the quota's daemon. server: its URL, `unix:PATH`, or the pid of one of its processes.

    Raises EnvironmentFault unless they compute there on every device that is lent, as this user.
    """
    roots = [server] if isinstance(server, int) else listeners(server)
    tree = family(roots)
    _require_own(tree)
    clients = [client for client in quota.daemon.control.clients() if client.pid in tree]
    if not clients:
        raise _refused(quota, f"{server}: none of its processes {sorted(tree)} is a client", "its workers are clients")
    shown = [row.device for row in quota.daemon.control.clients_on_devices() if row.pid in tree]
    if missing := [device for device in quota.daemon.devices if not any(device.startswith(prefix) for prefix in shown)]:
        raise _refused(quota, f"{server}: no client on {', '.join(missing)}", "it computes on every device that is lent")
    return clients


def _refused(quota: MpsQuota, got: str, expected: str) -> EnvironmentFault:
    variables = " ".join(f"{name}={value}" for name, value in sorted(quota.serving_environment().items()))
    return EnvironmentFault(
        f"the serving engine does not run under the MPS daemon at {quota.daemon.folders.pipes}",
        got=got,
        expected=expected,
        remedy=f"restart the server with: {variables}",
    )


def family(roots: Iterable[int]) -> set[int]:
    """These processes and all below them. Raises EnvironmentFault when none is there."""
    found: set[int] = set()
    for pid in roots:
        try:
            process = psutil.Process(pid)
            found |= {pid, *(child.pid for child in process.children(recursive=True))}
        except psutil.NoSuchProcess:
            continue
    if not found:
        raise EnvironmentFault("the serving engine is not there", got=f"no process {list(roots)}", expected="one that runs on this machine")
    return found


def _require_own(pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            process = psutil.Process(pid)
            owner = process.uids().effective
        except psutil.NoSuchProcess:
            continue
        if owner != os.geteuid():
            raise EnvironmentFault(
                "the serving engine belongs to another user",
                got=f"process {pid} of user {owner}",
                expected=f"user {os.geteuid()}",
                remedy="run the agent as the user of the serving engine: an MPS server serves one user at a time",
            )


def listeners(url: str) -> list[int]:
    """Pids of those that listen at `unix:PATH` or http://HOST:PORT. Raises EnvironmentFault when none is found on this machine."""
    found = [_unix_listener(Path(url.removeprefix(UNIX)))] if url.startswith(UNIX) else _tcp_listeners(url)
    if not found:
        raise EnvironmentFault(
            "no process of this machine is seen to listen there",
            got=url,
            expected="a server on this machine, in this process's namespaces",
            remedy="give the pid of the serving engine, as seen from here",
        )
    return found


def _unix_listener(path: Path) -> int:
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(CONNECT_DEADLINE_S)
            connection.connect(str(path))
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
    except OSError as error:
        raise EnvironmentFault(
            "the serving engine cannot be reached", got=f"{path}: {error}", expected="a listening Unix socket"
        ) from error
    pid: int = PEER_CREDENTIALS.unpack(credentials)[0]
    return pid


def _tcp_listeners(url: str) -> list[int]:
    parts = urlsplit(url)
    try:
        port = parts.port or DEFAULT_PORT[parts.scheme]
        addresses = {info[4][0] for info in socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)}
    except (KeyError, ValueError, OSError) as error:
        raise EnvironmentFault("that is not a server's address", got=f"{url}: {error}", expected="http://HOST:PORT or unix:PATH") from error
    listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.pid is not None]
    wanted = {(address, port) for address in (*addresses, *ANY_ADDRESS)}
    return sorted({c.pid for c in listening if c.pid is not None and tuple(c.laddr) in wanted})
