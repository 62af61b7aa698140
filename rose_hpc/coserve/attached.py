"""A serving engine that somebody else started with our plug-in flags: lent as it stands, and never touched.

    board ──writer's pid──▶ a process of the server that listens at the URL ──/v1/models──▶ the model that the operator named

All three must fit: a board of another server would open the gate while this one is busy. What does not fit is refused before anything
is lent; so is a server on GPUs that computes outside MPS (quota/choice.py). Its life is its own: when it ends, the lending is over.

One agent per server: each holds a lock on a file beside the board, which the kernel frees with it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

from rose_hpc.control import UNIX
from rose_hpc.coserve.board import last_reading
from rose_hpc.coserve.quota.mps_attach import family, listeners
from rose_hpc.coserve.serving_process import SCHEDULER
from rose_hpc.coserve.slots import Writer
from rose_hpc.coserve.specs import AttachSpec
from rose_hpc.errors import EnvironmentFault, RoseError, RunFailed

ANSWER_DEADLINE_S = 5.0
POLL_S = 0.5


class AttachedServing:
    """Async context manager with the interface of ServingProcess."""

    def __init__(self, spec: AttachSpec) -> None:
        self.spec = spec
        self.pid = 0
        self._writer: Writer
        self._lock = -1

    async def __aenter__(self) -> AttachedServing:
        """Raises EnvironmentFault: the board, the server and the model do not fit together, or another agent lends the device."""
        self._writer = board_writer(self.spec.board)
        self._lock = claim(self.spec.board)
        try:
            self._check()
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def _check(self) -> None:
        check_model(self.spec.url, self.spec.model)
        self.pid = server_of(self._writer.pid, self.spec.url)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """It goes on without us."""
        os.close(self._lock)

    async def healthy(self) -> None:
        """It is: it has answered."""

    async def ended(self) -> None:
        """Raises RunFailed once its scheduler's process is gone."""
        while self._writer.alive():
            await asyncio.sleep(POLL_S)
        raise RunFailed(f"the attached serving engine at {self.spec.url} has ended", remedy="start it again, then attach again")


def board_writer(board: Path) -> Writer:
    """The process that shows its state on the board. Raises EnvironmentFault: nobody who lives."""
    try:
        reading = last_reading(board)
    except (RoseError, OSError) as error:
        raise EnvironmentFault("the board cannot be read", got=f"{board}: {error}", remedy=_flags(board)) from error
    if reading is None or not reading.writer.alive():
        raise EnvironmentFault(
            "no living serving engine shows its state on the board",
            got=f"{board}: {'nothing was ever written' if reading is None else f'its writer {reading.writer.pid} is gone'}",
            remedy=_flags(board),
        )
    return reading.writer


def _flags(board: Path) -> str:
    return f"""start the server with --scheduler-cls {SCHEDULER} --additional-config '{{"rose_board": "{board}"}}'"""


def claim(board: Path) -> int:
    """Descriptor of the lock that says whose the lending is. Raises EnvironmentFault: another agent's."""
    path = board.with_name(f"{board.name}.lent")
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be made", got=error.strerror, expected="a board in a folder of ours") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise EnvironmentFault(
            "another agent lends this device",
            got=f"it holds {path}",
            expected="one agent per serving engine",
            remedy="use that one, or stop it",
        ) from error
    return lock


def check_model(url: str, model: str) -> None:
    """Whether a server answers there, with that model. Raises EnvironmentFault."""
    socket = url.removeprefix(UNIX) if url.startswith(UNIX) else None
    base = url if socket is None else "http://serving"
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=socket), base_url=base, timeout=ANSWER_DEADLINE_S, trust_env=False) as http:
            answer = http.get("/v1/models").raise_for_status().json()
        served: list[dict[str, Any]] = answer["data"]
        names = {str(each[key]) for each in served for key in ("id", "root") if each.get(key)}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EnvironmentFault("no serving engine answers there", got=f"{url}: {error!r}", expected="a vLLM server's /v1/models") from error
    if model and not {model, str(Path(model).resolve())} & (names | {str(Path(name).resolve()) for name in names if "/" in name}):
        raise EnvironmentFault("the server serves another model", got=", ".join(sorted(names)), expected=model)


def server_of(writer_pid: int, url: str) -> int:
    """Pid of the process that listens at the URL and has the board's writer below it. Raises EnvironmentFault: another server's board."""
    for pid in listeners(url):
        if writer_pid in family([pid]):
            return pid
    raise EnvironmentFault(
        "the board is not that server's",
        got=f"its writer is process {writer_pid} ({_command(writer_pid)})",
        expected=f"a process of the server at {url}",
        remedy="give the server's own --board",
    )


def _command(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())[:120]
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return "not to be seen"
