"""Has an engine's workers give back the memory of the KV blocks that the scheduler holds: after each cut of the budget.

    scheduler holds more blocks ─▶ the gate's counters show it ─▶ seen within POLL_S ─▶ collective call ─▶ pages go back (kv_pages.py)

In the engine's own process: the scheduler cannot call the workers. It looks at a file of 1 kB four times a second, and calls only
when there is something to give back. What goes wrong here is logged: memory stays where it is, and rollouts go on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM

from rose_hpc.coserve.gate import read_gate_stats
from rose_hpc.errors import RoseError

WORKER_EXTENSION = "rose_hpc.coserve.worker_extension.RolloutWorkerExtension"  # what the engine's workers need for it
POLL_S = 0.25
CALL_DEADLINE_S = 30.0  # the engine may hold, and the workers be idle-class: seconds without an answer are normal

log = logging.getLogger(__name__)


class MemoryReturn:
    """One engine's. `watch` runs for as long as the engine does."""

    def __init__(self, llm: AsyncLLM, board: Path) -> None:
        self._llm, self._board = llm, board
        self._held = 0

    async def watch(self) -> None:
        """Returns never; raises nothing."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self._look()
            except (RoseError, OSError, TimeoutError) as error:
                log.warning("memory of held KV blocks was not given back: %r", error)
            except Exception:  # the edge to vLLM: an engine that dies is noticed elsewhere
                log.exception("memory of held KV blocks was not given back")

    async def _look(self) -> None:
        stats = read_gate_stats(self._board)
        before, self._held = self._held, 0 if stats is None else stats.kv_held_blocks
        if self._held > before:
            await self._give_back()

    async def _give_back(self) -> None:
        begin_s = time.monotonic()
        async with asyncio.timeout(CALL_DEADLINE_S):
            answers = await self._llm.collective_rpc("rose_give_back", args=(str(self._board),))
        for fault in (a["fault"] for a in answers if a["fault"] is not None):
            log.warning("memory of held KV blocks was not given back: %s", fault)
        log.info("%d bytes of held KV blocks given back in %.3f s", sum(a["bytes"] for a in answers), time.monotonic() - begin_s)


def watching(llm: AsyncLLM, gate: Mapping[str, Any] | None) -> asyncio.Task[None] | None:
    """The watch over an engine with these gate settings; None: it has no gate, and nothing is ever held."""
    return None if gate is None else asyncio.create_task(MemoryReturn(llm, Path(gate["board"])).watch())
