"""A rollout engine without vLLM, as the agent's child: the process is fake_engine.py."""

from __future__ import annotations

import sys
from pathlib import Path

import aiohttp

from rose_hpc.control import write_private
from rose_hpc.coserve.processes import EngineProcess
from rose_hpc.messages import TOKEN_HEADER

WORKER = (sys.executable, "-c", "while True: pass")


class SmallEngine(EngineProcess):
    """worker: the command of what computes for it."""

    mode = "obedient"
    worker: tuple[str, ...] = WORKER

    async def __aenter__(self) -> SmallEngine:
        path = self.spec.socket.with_suffix(".json")
        write_private(path, self.spec.model_dump_json())
        await self.start([sys.executable, str(Path(__file__).with_name("fake_engine.py")), str(path), self.mode, *self.worker])
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path=str(self.spec.socket), limit=0), headers={TOKEN_HEADER: f"Bearer {self._token}"}
        )
        return self


class StubbornEngine(SmallEngine):
    mode = "stubborn"


class StillbornEngine(SmallEngine):
    mode = "stillborn"
