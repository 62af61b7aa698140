"""A machine with MPS for tests: the stand-in of the control daemon as an executable, daemons, and processes that use CUDA."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose_hpc.coserve.quota.mps import Ceiling, MpsQuota
from rose_hpc.coserve.quota.mps_control import MpsFolders, daemon_environment
from rose_hpc.coserve.quota.mps_daemon import MpsDaemon
from rose_hpc.coserve.quota.mps_node import EXECUTABLE, SERVER, make_private, running_daemon, servers_of
from rose_hpc.errors import EnvironmentFault

GIB = 1 << 30
CEILING = Ceiling(0.3, 20 * GIB)
NOBODY = 65534
STAND_IN = Path(__file__).with_name("fake_mps_control.py")


def make_executable(folder: Path) -> Path:
    """The stand-in, under the name of what it stands for, and its server."""
    folder.mkdir()
    for name, program in ((EXECUTABLE, STAND_IN.read_text()), (SERVER, "import time\ntime.sleep(600)\n")):
        (folder / name).write_text(f"#!{sys.executable} -SE\n{program}")
        (folder / name).chmod(0o755)
    return folder / EXECUTABLE


def gpu_uuid() -> str:
    return f"GPU-{uuid.uuid4()}"


def as_root() -> None:
    """Skips the test for others."""
    if os.geteuid() != 0:
        pytest.skip("making something another user's takes root")


@contextlib.contextmanager
def process_of_another_user(name: str) -> Iterator[int]:
    """Its pid. It calls itself by that name, and has an option that a control daemon may have."""
    with subprocess.Popen([name, "-f", os.devnull], executable=shutil.which("tail"), user=NOBODY, cwd="/") as process:
        try:
            yield process.pid
        finally:
            process.kill()


class Process:
    """A program's process, and the lines that it says."""

    def __init__(self, argv: list[str], env: dict[str, str]) -> None:
        self._process = subprocess.Popen(argv, env={**daemon_environment(os.environ), **env}, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid

    def says(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=10)


class Node:
    """A machine with MPS: daemons and CUDA processes that are all ended with it. Its folder's path is short, for sockets."""

    def __init__(self, executable: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="mps-"))
        self.root, self.executable = self._folder / "mps", executable
        self._daemons: list[MpsDaemon] = []
        self._processes: list[Process] = []

    def daemon(self, *devices: str) -> MpsDaemon:
        daemon = MpsDaemon(self.root, devices or [gpu_uuid()], self.executable)
        self._daemons.append(daemon)
        return daemon

    def quota(self, *devices: str) -> MpsQuota:
        daemon = self.daemon(*devices)
        daemon.start()
        return MpsQuota(daemon, CEILING)

    def process(self, env: dict[str, str], program: str = "client") -> Process:
        process = Process([str(self.executable), program], env)
        self._processes.append(process)
        return process

    def client(self, env: dict[str, str]) -> Process:
        process = self.process(env)
        assert process.says() == "joined"
        return process

    def fault(self, *words: str) -> None:
        for folder in (self.root, self.root / "log"):
            make_private(folder)
        (self.root / "log" / "fault").write_text(" ".join(words))

    def close(self) -> None:
        self.fault()
        for process in self._processes:
            process.kill()
        for daemon in self._daemons:
            with contextlib.suppress(EnvironmentFault):
                daemon.close()
        folders = MpsFolders(self.root)
        for process in (running_daemon(folders), *servers_of(folders.pipes)):
            if process is not None:
                process.kill()
        shutil.rmtree(self._folder)
