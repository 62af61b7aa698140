"""An agent's child processes, and the rollout engine seen from its agent: start, health, requests, end.

    absent ──enter──▶ starting ──answers /health──▶ healthy ──exit──▶ absent        (ended by itself: RunFailed with its log's tail)

The engine's socket lies in the agent's private folder; its output goes to a log file.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import aiohttp

from rose_hpc.control import write_private
from rose_hpc.coserve.specs import EngineSpec
from rose_hpc.errors import RunFailed
from rose_hpc.http_api import CONTENT_TYPE, Refused
from rose_hpc.lifeline import last_words
from rose_hpc.messages import TOKEN_HEADER, EngineHealth, decode

HEALTH_POLL_S = 0.1
HEALTH_DEADLINE_S = 5
TERM_DEADLINE_S = 5  # from SIGTERM to SIGKILL of the group
TRACKER_S = 1.0
TAIL_LINES = 20


class OwnedProcess:
    """A child that leads a process group of its own and writes to a log; its owner ends it, group and all."""

    def __init__(self, name: str, log_path: Path) -> None:
        self.name, self._log_path = name, log_path
        self._process: asyncio.subprocess.Process

    async def start(self, argv: list[str], env: dict[str, str] | None = None) -> None:
        """From the main thread (lifeline.py). env: in addition to our own."""
        with self._log_path.open("ab") as log:
            streams = {"stdin": asyncio.subprocess.DEVNULL, "stdout": log, "stderr": log}
            self._process = await asyncio.create_subprocess_exec(*argv, **streams, process_group=0, env={**os.environ, **(env or {})})

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL of whatever is left of its group."""
        if self.is_running:
            self._process.terminate()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), TERM_DEADLINE_S)
        with suppress(ProcessLookupError):  # nothing is left
            await self._let_group_end()
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    async def _let_group_end(self) -> None:
        """A moment for multiprocessing's resource tracker, which unlinks semaphores. Raises ProcessLookupError when all are gone."""
        if self.is_running:
            return
        for _ in range(int(TRACKER_S / HEALTH_POLL_S)):
            os.killpg(self._process.pid, 0)
            await asyncio.sleep(HEALTH_POLL_S)

    async def ended(self) -> None:
        """Waits for its end, then raises RunFailed with the end of its log."""
        status = await self._process.wait()
        raise self.failure(f"ended with status {status}")

    async def until(self, ready: Callable[[], Awaitable[bool]], deadline_s: float) -> None:
        """Returns when `ready` says so. Raises RunFailed when the process ends before, or the deadline passes."""
        try:
            async with asyncio.timeout(deadline_s):
                while not await ready():
                    if not self.is_running:
                        await self.ended()
                    await asyncio.sleep(HEALTH_POLL_S)
        except TimeoutError as error:
            raise self.failure(f"did not start within {deadline_s:g} s") from error

    def failure(self, what: str) -> RunFailed:
        """What happened, with its last words or the end of its log."""
        text = self._log_path.read_text(errors="replace")
        said = last_words(text)
        tail = said if said is not None else "\n    ".join(text.splitlines()[-TAIL_LINES:])
        return RunFailed(f"{self.name} {what}; its log {self._log_path} ends:\n    {tail}")


class EngineProcess(OwnedProcess):
    """Async context manager: the engine lives inside of it."""

    def __init__(self, spec: EngineSpec, log_path: Path, token: str) -> None:
        super().__init__(f"engine {spec.executor_id}", log_path)
        self.spec, self._token = spec, token
        self._session: aiohttp.ClientSession
        self._groups: set[str] = set()

    async def __aenter__(self) -> EngineProcess:
        """Start it; `healthy` tells when it is up."""
        spec_path = self.spec.socket.with_suffix(".json")
        write_private(spec_path, self.spec.model_dump_json())
        await self.start([sys.executable, "-m", "rose_hpc.coserve.engine", str(spec_path)])
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path=str(self.spec.socket), limit=0),
            headers={TOKEN_HEADER: f"Bearer {self._token}", "Content-Type": CONTENT_TYPE},
            timeout=aiohttp.ClientTimeout(total=self.spec.engine.request_deadline_s),
        )
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End it; nothing of it stays in shared memory."""
        await self._session.close()
        await self.stop()
        remove_shared_memory(self._groups | worker_groups(self.spec.socket.parent))

    async def healthy(self) -> None:
        """Returns when it answers. Raises RunFailed when it ends before, or the start deadline passes."""
        await self.until(self._answers, self.spec.engine.start_deadline_s)
        self._groups = worker_groups(self.spec.socket.parent)

    async def _answers(self) -> bool:
        if not self.spec.socket.exists():
            return False
        try:
            await self.health()
        except aiohttp.ClientConnectionError:
            return False
        return True

    async def health(self) -> EngineHealth:
        """The engine's own word. Raises aiohttp.ClientError when it does not answer."""
        deadline = aiohttp.ClientTimeout(total=HEALTH_DEADLINE_S)
        async with self._session.get("http://engine/health", timeout=deadline, raise_for_status=True) as response:
            return decode(await response.read(), EngineHealth)

    async def post(self, verb: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of the engine's answer. Raises Refused: 502 when it is gone, 504 after the request's deadline."""
        try:
            async with self._session.post(f"http://engine/{verb}", data=body) as response:
                return response.status, await response.read()
        except aiohttp.ClientError as error:
            raise Refused(502, f"engine {self.spec.executor_id} does not answer", got=error) from error
        except TimeoutError as error:
            raise Refused(
                504, f"engine {self.spec.executor_id}: {verb} took longer than {self.spec.engine.request_deadline_s:g} s"
            ) from error


def worker_groups(folder: Path) -> set[str]:
    """Names of the worker groups of engines running with this folder as their TMPDIR: vLLM's rendezvous files."""
    return {path.name for path in folder.glob("vllm_dist_*")}


def remove_shared_memory(groups: set[str]) -> None:
    """Unlink what tensor-parallel CPU workers leave in /dev/shm (4 MiB a worker), on SIGTERM as on SIGKILL: vLLM never does."""
    for group in groups:
        for segment in Path("/dev/shm").glob(f"{group}*"):
            segment.unlink(missing_ok=True)
