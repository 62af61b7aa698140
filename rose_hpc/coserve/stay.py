"""What one lease runs on a lent device: a rollout engine, and the relay that feeds it. Children of the operator's agent.

    enter ─▶ starting, confined ──healthy──▶ up ──┐
                 │                                ├─ exit: idle class lifted ─▶ turns in flight aborted, their callers get what
                 └─ engine or relay ends: RunFailed    they have ─▶ SIGKILL of the engine's group, GRACE_S after at most ─▶ relay ends

Leaving takes the device back within GRACE_S and the time that the kernel needs: nobody is asked twice. `freed_s` tells when nothing
of the engine ran any more.

It knows no tokens but the engine's own, and not why it has to end (lending.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import TracebackType

import aiohttp
import msgspec
import psutil

from rose_hpc.coserve.device import Device, workers_of
from rose_hpc.coserve.processes import EngineProcess
from rose_hpc.coserve.progress import ProgressState
from rose_hpc.coserve.progress_watch import ProgressWatch
from rose_hpc.coserve.relay_process import RelayProcess
from rose_hpc.coserve.specs import EngineSpec
from rose_hpc.errors import ControlError
from rose_hpc.http_api import Refused, first_of
from rose_hpc.messages import AbortRequest, EngineHealth, encode

GRACE_S = 0.5  # from the end of a lease to SIGKILL of its engine
POLL_S = 0.01
GONE_DEADLINE_S = 5.0  # for the kernel to end what was killed
DEAD = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


class _Named(msgspec.Struct):
    """The one field that the agent reads of a turn; the others pass through."""

    request_id: str


class Stay:
    """Async context manager: the engine lives inside of it. board: whose gate it is behind."""

    def __init__(self, engine: EngineProcess, relay: RelayProcess | None, device: Device, board: Path) -> None:
        self._engine, self._relay, self._device = engine, relay, device
        self._watch = ProgressWatch(board)
        self._started = AsyncExitStack()
        self.is_up = False
        self.freed_s: float | None = None  # of time.monotonic()
        self._flying: dict[str, int] = {}  # turns that the engine has, by request id
        self._landed = asyncio.Event()
        self._workers: set[int] = set()

    @property
    def engine_spec(self) -> EngineSpec:
        """What the engine was told."""
        return self._engine.spec

    @property
    def executor_id(self) -> str:
        return self._engine.spec.executor_id

    @property
    def relay_name(self) -> str:
        """Whose arena the engine loads from, "" where the run's relay is not ours."""
        return "" if self._relay is None else self._relay.name

    @property
    def max_concurrency(self) -> int:
        return self._engine.spec.engine.max_concurrency

    async def __aenter__(self) -> Stay:
        """Start both, the engine confined from its first instruction on. Raises RoseError, OSError: nothing is left then."""
        async with AsyncExitStack() as started:
            if self._relay is not None:
                await started.enter_async_context(self._relay)
            await started.enter_async_context(self._engine)
            self._device.rollout_spawned(self._engine.pid)
            self._started = started.pop_all()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.is_up = False
        try:
            self._note_workers()
            self._device.give_back()
            await self._abort_all()
        finally:  # whatever was in the way
            with suppress(ProcessLookupError):  # nothing is left of it
                os.killpg(self._engine.pid, signal.SIGKILL)
            await self._gone()
            self.freed_s = time.monotonic()
            await self._started.aclose()

    async def _abort_all(self) -> None:
        """Every caller gets the tokens that its turn has so far. Returns when all have been answered, or after GRACE_S."""
        if not self._flying:
            return
        with suppress(TimeoutError, Refused):
            async with asyncio.timeout(GRACE_S):
                await self._engine.post("abort", encode(AbortRequest(list(self._flying))))
                while self._flying:
                    self._landed.clear()
                    await self._landed.wait()

    def _note_workers(self) -> None:
        """Those of an engine that has ended cannot be found any more, and may have outlived it."""
        self._workers |= set(workers_of(self._engine.pid))

    async def _gone(self) -> None:
        end_s = time.monotonic() + GONE_DEADLINE_S
        while any(map(_runs, (self._engine.pid, *self._workers))) and time.monotonic() < end_s:
            await asyncio.sleep(POLL_S)

    async def work(self) -> None:
        """Raises RunFailed when the engine does not come up or ends, or the relay cannot be kept alive; returns never."""
        relay = {} if self._relay is None else {"relay": self._relay.kept_alive()}
        await first_of(engine=self._engine_lives(), **relay)

    async def _engine_lives(self) -> None:
        await self._engine.healthy()
        self._note_workers()
        self._device.rollout_up(self._engine.pid)
        self.is_up = True
        await self._engine.ended()

    async def forward(self, verb: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of the engine's answer to a verb. Raises Refused: see EngineProcess.post."""
        if verb != "generate":
            return await self._engine.post(verb, body)
        name = _request_id(body)
        self._flying[name] = self._flying.get(name, 0) + 1
        try:
            return await self._engine.post(verb, body)
        finally:
            self._flying[name] -= 1
            if not self._flying[name]:
                del self._flying[name]
            self._landed.set()

    async def health(self) -> EngineHealth:
        """The engine's own word. Raises Refused: 503 while it starts, 502 when it does not answer."""
        if not self.is_up:
            raise Refused(503, f"engine {self.executor_id} is starting")
        try:
            return await self._engine.health()
        except (aiohttp.ClientError, TimeoutError, ControlError) as error:
            raise Refused(502, f"engine {self.executor_id} does not answer", got=repr(error)) from error

    def state(self) -> ProgressState:
        """What the engine has been doing lately."""
        return self._watch.state(self._engine.pid)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in DEAD
    except psutil.NoSuchProcess:
        return False


def _request_id(body: bytes) -> str:
    try:
        return msgspec.msgpack.decode(body, type=_Named).request_id
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise Refused(400, "malformed turn", got=error) from error
