"""Two network namespaces joined by a link of a chosen rate: two "clusters" on one machine.

    near ── veth ═══ tbf, both ways ═══ veth ── far

    with ShapedLink(bits_per_s=1e9) as link:
        with link.inside(link.far): ...        # sockets made and processes started here belong to the far side
        before = link.counters()

Segmentation offload is off on both ends, so that a burst of the token bucket is what it says and the interface counts what a wire would
carry. IPv6 is off inside, so that nothing crosses by itself but ARP.

Namespaces outlive a process that is killed: their names carry the owner's pid and start time, and whoever comes next removes those whose
owner is gone. Needs root, `ip` and `tc`. Delay is not shaped (many kernels have no netem): delay.py forwards with one.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import secrets
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rose_hpc.errors import EnvironmentFault, RunFailed

BURST_BYTES = 128_000
LATENCY = "400ms"  # a packet that would wait longer is dropped: more than TCP's buffers hold at any of our rates
COMMAND_DEADLINE_S = 10.0
_NAMED = Path("/run/netns")
_NAME = re.compile(r"rosebench-(\d+)-(\d+)-[0-9a-f]{6}-(?:near|far)")
_CLONE_NEWNET = 0x40000000
_SIOCETHTOOL = 0x8946
_OFFLOADS = {"tso": 0x1F, "gso": 0x24, "gro": 0x2C}  # ETHTOOL_S… commands of linux/ethtool.h
_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"


@dataclass(frozen=True)
class Side:
    """One end. namespace: its name for `ip netns`; interface: inside; address: IPv4, of the interface."""

    namespace: str
    interface: str
    address: str

    @property
    def path(self) -> Path:
        return _NAMED / self.namespace


@dataclass(frozen=True)
class LinkCounters:
    """Bytes that have entered the link: from near to far (forward) and back, whole frames without preamble and checksum."""

    forward_bytes: int
    backward_bytes: int

    def since(self, before: LinkCounters) -> LinkCounters:
        return LinkCounters(self.forward_bytes - before.forward_bytes, self.backward_bytes - before.backward_bytes)


class ShapedLink:
    """Use as a context manager; leaving it removes both namespaces, and the link with them."""

    def __init__(self, bits_per_s: float) -> None:
        """Raises EnvironmentFault where this process may not or cannot make namespaces."""
        check_possible()
        sweep()
        self._bits_per_s = bits_per_s
        stem, self._tag = f"rosebench-{os.getpid()}-{_start_ticks(os.getpid())}", secrets.token_hex(3)
        self.near = Side(f"{stem}-{self._tag}-near", f"rb{self._tag}n", "10.77.0.1")
        self.far = Side(f"{stem}-{self._tag}-far", f"rb{self._tag}f", "10.77.0.2")

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def set_rate(self, bits_per_s: float) -> None:
        """Shape both directions anew; what waits in the queues is dropped."""
        for side in (self.near, self.far):
            shape = ["tbf", "rate", f"{int(bits_per_s)}bit", "burst", str(BURST_BYTES), "latency", LATENCY]
            _command("tc", "-n", side.namespace, "qdisc", "replace", "dev", side.interface, "root", *shape)
        self._bits_per_s = bits_per_s

    @contextlib.contextmanager
    def inside(self, side: Side) -> Iterator[None]:
        """This thread in the namespace, with all that it creates there: sockets and child processes stay in it."""
        with _entered(side.path):
            yield

    def counters(self) -> LinkCounters:
        """Read from the interfaces inside the namespaces."""
        return LinkCounters(self._sent_bytes(self.near), self._sent_bytes(self.far))

    def _make(self) -> None:
        for side in (self.near, self.far):
            _command("ip", "netns", "add", side.namespace)
        peer = ["peer", "name", self.far.interface, "netns", self.far.namespace]
        _command("ip", "link", "add", self.near.interface, "netns", self.near.namespace, "type", "veth", *peer)
        for side in (self.near, self.far):
            with self.inside(side):
                _without_ipv6()
                _without_offloads(side.interface)
            _command("ip", "-n", side.namespace, "address", "add", f"{side.address}/24", "dev", side.interface)
            for interface in ("lo", side.interface):
                _command("ip", "-n", side.namespace, "link", "set", interface, "up")
        self.set_rate(self._bits_per_s)

    def _remove(self) -> None:
        for side in (self.near, self.far):
            if side.path.exists():
                _command("ip", "netns", "delete", side.namespace)

    def _sent_bytes(self, side: Side) -> int:
        with self.inside(side):
            table = Path("/proc/thread-self/net/dev").read_text()
        for line in table.splitlines():
            name, colon, fields = line.partition(":")
            if colon and name.strip() == side.interface:
                return int(fields.split()[8])
        raise RunFailed("the shaped link has gone", got=table, expected=f"an interface {side.interface}")


def check_possible() -> None:
    """Raises EnvironmentFault with what is missing, unless namespaces and a token bucket can be made here."""
    missing = [tool for tool in ("ip", "tc") if _tool(tool) is None]
    if os.geteuid() != 0 or missing:
        raise EnvironmentFault(
            "no shaped link can be made here",
            got=f"no {' and no '.join(missing)} on PATH" if missing else f"user {os.geteuid()}",
            expected="root (CAP_NET_ADMIN, CAP_SYS_ADMIN) with ip and tc",
            remedy="run as root with iproute2 installed, or pass --skip-link to measure the codec only",
        )


def sweep() -> list[str]:
    """Remove the namespaces whose owner has ended without doing so; returns their names."""
    left = sorted(_NAMED.iterdir()) if _NAMED.is_dir() else []
    gone = [path.name for path in left if (match := _NAME.fullmatch(path.name)) and not _lives(int(match[1]), int(match[2]))]
    for name in gone:
        _command("ip", "netns", "delete", name)
    return gone


def _lives(pid: int, start_ticks: int) -> bool:
    try:
        return _start_ticks(pid) == start_ticks
    except FileNotFoundError:
        return False


def _start_ticks(pid: int) -> int:
    """When the process started, proc(5) stat field 22: a pid that is used again has another."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


@contextlib.contextmanager
def _entered(namespace: Path) -> Iterator[None]:
    """setns(2) of the calling thread, there and back."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        there = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _setns(there)
        finally:
            os.close(there)
        try:
            yield
        finally:
            _setns(home)
    finally:
        os.close(home)


def _setns(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWNET) != 0:
        raise EnvironmentFault(
            "cannot enter a network namespace",
            got=os.strerror(ctypes.get_errno()),
            remedy="run with CAP_SYS_ADMIN, or pass --skip-link to measure the codec only",
        )


def _without_ipv6() -> None:
    switch = Path("/proc/sys/net/ipv6/conf/all/disable_ipv6")
    if switch.exists():
        switch.write_text("1")


def _without_offloads(interface: str) -> None:
    """ethtool -K INTERFACE tso off gso off gro off, by its ioctl: the tool is often not installed."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in _OFFLOADS.values():
            value = ctypes.create_string_buffer(struct.pack("=II", command, 0))
            request = struct.pack("16sP16x", interface.encode(), ctypes.addressof(value))  # struct ifreq
            fcntl.ioctl(control, _SIOCETHTOOL, request)


def _tool(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_SBIN}")


def _command(tool: str, *arguments: str) -> None:
    path = _tool(tool)
    result = subprocess.run([path or tool, *arguments], capture_output=True, text=True, timeout=COMMAND_DEADLINE_S, check=False)
    if result.returncode != 0:
        raise EnvironmentFault(
            f"{tool} {' '.join(arguments)} failed",
            got=result.stderr.strip(),
            remedy="run as root on a kernel with network namespaces, veth and sch_tbf, or pass --skip-link to measure the codec only",
        )
