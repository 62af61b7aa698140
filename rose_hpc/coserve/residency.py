"""Where the weights and the KV cache of a rollout engine are: in memory, or given back while the engine is inactive.

    CPU    leave: workers give pages back (weights/host_pages.py)     come back: nothing, a write brings its page
    CUDA   leave: vLLM's sleep mode, level 2                          come back: wake up            [not yet verified on a GPU]

Both leave the model without weights: who comes back loads all of them before anything runs. What stays is the process: interpreter,
libraries, and what vLLM holds besides. The arena is the node's, not the engine's.

It decides nothing, and does not look at requests: nothing may run from before `leave` until the weights are there again.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol

from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from rose_hpc.coserve.weight_update import WeightUpdate
from rose_hpc.http_api import Refused
from rose_hpc.messages import UpdateRequest
from rose_hpc.weights.arena_folder import StateFile
from rose_hpc.weights.worker_update import EXPECTED_FAULTS

LEAVE_DEADLINE_S = 60.0  # beside a busy serving engine the workers may hardly run
SLEEP_LEVEL = 2  # weights and KV cache are discarded, not copied to the host


class Residency(Protocol):
    """How the memory of one engine goes and comes back."""

    async def leave(self) -> int:
        """Give back what can be given back; bytes, where they are known. Again: what is left. Raises Refused 409 where it cannot."""

    async def come_back(self) -> None:
        """There is memory again. Raises what vLLM raises; then the engine is not usable any more."""


class HostResidency:
    """Of an engine on CPUs."""

    def __init__(self, llm: AsyncLLM, update: WeightUpdate) -> None:
        self._llm, self._update = llm, update

    async def leave(self) -> int:
        weights = await self._update.vacate()
        async with asyncio.timeout(LEAVE_DEADLINE_S):
            answers = await self._llm.collective_rpc("rose_give_back", args=(None,))
        for fault in (a["fault"] for a in answers if a["fault"] is not None):
            raise Refused(409, "memory of the KV cache was not given back", got=fault, remedy="deactivate again")
        return weights + sum(int(a["bytes"]) for a in answers)

    async def come_back(self) -> None:
        return


class SleepResidency:
    """Of an engine on GPUs. Not yet verified on a GPU."""

    def __init__(self, llm: AsyncLLM, update: WeightUpdate) -> None:
        self._llm, self._update = llm, update

    async def leave(self) -> int:
        await self._update.vacate()  # so that the workers know that they hold nothing whole
        async with asyncio.timeout(LEAVE_DEADLINE_S):
            await self._llm.sleep(level=SLEEP_LEVEL, mode="keep")
        return 0

    async def come_back(self) -> None:
        await self._llm.wake_up()


def residency_of(llm: AsyncLLM, update: WeightUpdate) -> Residency | None:
    """What this engine can do; None: nothing, it was started without sleep mode (vllm_engine.engine_args)."""
    if current_platform.is_cpu():
        return HostResidency(llm, update)
    return SleepResidency(llm, update) if llm.model_config.enable_sleep_mode else None


def newest_in(arena: Path) -> UpdateRequest:
    """The version that an arena holds now, verified. Raises Refused 409: it holds none, or cannot be read."""
    try:
        state, _ = StateFile(arena).read()
    except EXPECTED_FAULTS as error:
        raise Refused(409, f"{arena} does not tell its version", got=error, remedy="transfer a keyframe") from error
    if state.version < 0 or not state.verified:
        raise Refused(409, f"{arena} holds no verified version", got=state, remedy="transfer a version first")
    return UpdateRequest(state.version, state.digest)
