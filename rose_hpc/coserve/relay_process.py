"""The weight relay of a lent node as a child of the operator's agent: started, kept alive, ended with the lease."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from rose_hpc.control import write_private
from rose_hpc.coserve.processes import OwnedProcess
from rose_hpc.errors import RunFailed
from rose_hpc.lifeline import first_to_go
from rose_hpc.weights.relay_spec import RelaySpec

RESTARTS = 10
PAUSE_S = 0.2
OUTLIVES = 2  # leases: when the controller falls silent the agent's own lease ends the relay, which must not be taken for a failure before


class RelayProcess(OwnedProcess):
    """Async context manager: the relay lives inside of it. It has one node, and no MPI. off_cpus: cores of the device, not for it."""

    def __init__(self, spec: RelaySpec, folder: Path, logs_dir: Path, off_cpus: Collection[int] = ()) -> None:
        self._relay_spec = spec.model_copy(update={"lease_ttl_s": OUTLIVES * spec.lease_ttl_s})
        self._spec_path, self._off_cpus = folder / "relay.json", set(off_cpus)
        super().__init__(spec.nodes[0].name, logs_dir / f"{spec.nodes[0].name}.log", folder)

    async def __aenter__(self) -> RelayProcess:
        write_private(self._spec_path, self._relay_spec.model_dump_json())
        await self._start_relay()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.stop()

    async def kept_alive(self) -> None:
        """Starts it again whenever it was killed. Raises RunFailed when it ends by itself, or has been killed RESTARTS times."""
        for left in range(RESTARTS, -1, -1):
            status = await self._process.wait()
            if status >= 0 or left == 0:
                raise self.failure(f"ended with status {status}")
            await asyncio.sleep(PAUSE_S)
            await self._start_relay()
        raise RunFailed(f"{self.name} cannot be kept alive")

    async def _start_relay(self) -> None:
        await self.start([sys.executable, "-m", "rose_hpc.weights.relay", str(self._spec_path), self.name], {"OMP_NUM_THREADS": "1"})
        first_to_go(self.pid)
        if rest := os.sched_getaffinity(0) - self._off_cpus:
            with suppress(ProcessLookupError):
                os.sched_setaffinity(self.pid, rest)  # before it has threads, which inherit it
