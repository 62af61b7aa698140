"""Both loads of `rose-hpc bench coserve`: the serving engine's users, open-loop, and the rollouts, closed-loop.

A rollout window ends with an abort, which returns the tokens sampled so far: every token counts for the window it was made in.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rose_hpc.bench.coserve_policy import VOCABULARY
from rose_hpc.config import SloConfig, TrafficConfig
from rose_hpc.control import write_private
from rose_hpc.coserve.processes import EngineProcess
from rose_hpc.errors import RunFailed
from rose_hpc.messages import AbortRequest, GenerateRequest, GenerateResult, decode, encode
from rose_hpc.traffic.record import Recorder, Served
from rose_hpc.traffic.replay import Replay
from rose_hpc.traffic.spec import ReplaySpec
from rose_hpc.traffic.trace import Request

SHORT_PROMPTS, LONG_PROMPTS = (32, 128), (600, 900)  # tokens, both ends included
NEW_TOKENS = (32, 96)
ABORT_DEADLINE_S, ABORT_AGAIN_S = 60.0, 0.1  # a request that reaches the engine after an abort needs the next one
HTTP_OK = 200


class Rows(Recorder):
    """Keeps what became of each request."""

    def __init__(self) -> None:
        super().__init__(SloConfig(), None)
        self.served: list[Served] = []

    def add(self, served: Served) -> None:
        self.served.append(served)


async def serve(url: str, requests: Sequence[Request], scratch: Path, seed: int) -> list[Served]:
    """Send the requests when they are due; returns when all have ended. scratch: a file, overwritten."""
    if not requests:
        return []
    write_private(scratch, "".join(_line(r) for r in requests))
    rows = Rows()
    spec = ReplaySpec(url=url, traffic=TrafficConfig(trace=scratch, seed=seed))
    await Replay(spec, rows).run()
    return rows.served


def _line(request: Request) -> str:
    fields = {"timestamp": 1000 * request.arrival_s, "input_length": request.prompt_tokens, "output_length": request.output_tokens}
    return json.dumps(fields) + "\n"


@dataclass
class Harvest:
    """Tokens sampled so far."""

    tokens: int = 0
    answers: int = 0


class RolloutLoad:
    """So many requests in flight at any time, each followed by the next; prompts are random, so that none shares a prefix."""

    def __init__(self, engine: EngineProcess, concurrency: int, long_prompts: bool, seed: int) -> None:
        self._engine, self._concurrency = engine, concurrency
        self._span = LONG_PROMPTS if long_prompts else SHORT_PROMPTS
        self._rng = np.random.default_rng(seed)
        self._ids = (f"r{seed}-{number}" for number in itertools.count())
        self._flying: set[str] = set()
        self._ending = False
        self.harvest = Harvest()

    @asynccontextmanager
    async def flowing(self, to_the_end: bool = True) -> AsyncIterator[Harvest]:
        """Requests flow inside. to_the_end: all are aborted and counted after it, else forgotten. Raises RunFailed when one was refused."""
        clients = [asyncio.create_task(self._client()) for _ in range(self._concurrency)]
        try:
            yield self.harvest
            self._ending = True
            if to_the_end:
                await self._end(clients)
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)

    async def _end(self, clients: Sequence[asyncio.Task[None]]) -> None:
        """Abort what is in flight, until it has ended."""
        end_s = time.monotonic() + ABORT_DEADLINE_S
        while not all(client.done() for client in clients):
            if time.monotonic() > end_s:
                raise RunFailed(f"{self._engine.name} does not end its rollouts", expected=f"within {ABORT_DEADLINE_S:g} s of the abort")
            await self.abort()
            await asyncio.wait(clients, timeout=ABORT_AGAIN_S)
        for client in clients:
            client.result()

    async def abort(self) -> None:
        """End the requests in flight."""
        await self._engine.post("abort", encode(AbortRequest(sorted(self._flying))))

    async def _client(self) -> None:
        while not self._ending:
            request = self._next()
            self._flying.add(request.request_id)
            try:
                status, body = await self._engine.post("generate", encode(request))
            finally:
                self._flying.discard(request.request_id)
            if status != HTTP_OK:
                raise RunFailed(f"{self._engine.name} refuses a rollout", got=body)
            self.harvest.tokens += len(decode(body, GenerateResult).token_ids)
            self.harvest.answers += 1

    def _next(self) -> GenerateRequest:
        length = int(self._rng.integers(*self._span, endpoint=True))
        prompt = self._rng.integers(VOCABULARY, size=length).tolist()
        return GenerateRequest(next(self._ids), prompt, int(self._rng.integers(*NEW_TOKENS, endpoint=True)), 1.0, [])
