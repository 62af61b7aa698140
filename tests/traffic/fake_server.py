"""A serving engine that answers as a test says: OpenAI's routes over HTTP, without a model. It runs in the test's own event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

MAX_MODEL_LEN = 64


@dataclass
class Received:
    """One completion request. at_s: by the event loop's clock."""

    at_s: float
    body: dict[str, Any]


@dataclass
class Stream:
    """The answer to one request, event by event."""

    response: web.StreamResponse

    async def tokens(self, *ids: int) -> None:
        await self.event({"choices": [{"index": 0, "text": "x" * len(ids), "token_ids": list(ids)}]})

    async def event(self, message: dict[str, Any]) -> None:
        await self.raw(b"data: " + json.dumps(message).encode() + b"\n\n")

    async def raw(self, piece: bytes) -> None:
        await self.response.write(piece)


Answer = Callable[[int, dict[str, Any], Stream], Awaitable[None]]


async def all_at_once(index: int, body: dict[str, Any], stream: Stream) -> None:
    await stream.tokens(*range(body["max_tokens"]))


@dataclass
class FakeServer:
    """`answer(index, body, stream)` is called per completion. healthy: set it later to be a server that is still starting."""

    answer: Answer = all_at_once
    healthy: bool = True
    refuse: dict[int, int] = field(default_factory=dict)  # index of a request to the status that it gets
    received: list[Received] = field(default_factory=list)

    @asynccontextmanager
    async def on(self, socket: Path) -> AsyncIterator[str]:
        """Serve on a Unix socket; yields its URL."""
        async with self._running(lambda runner: web.UnixSite(runner, str(socket))):
            yield f"unix:{socket}"

    @asynccontextmanager
    async def on_tcp(self) -> AsyncIterator[str]:
        """Serve on a free port of the loopback; yields its URL."""
        async with self._running(lambda runner: web.TCPSite(runner, "127.0.0.1", 0)) as runner:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"

    @asynccontextmanager
    async def _running(self, make_site: Callable[[web.AppRunner], web.BaseSite]) -> AsyncIterator[web.AppRunner]:
        app = web.Application(client_max_size=1 << 24)
        app.add_routes([web.get("/health", self._health), web.get("/v1/models", self._models), web.post("/v1/completions", self._complete)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await make_site(runner).start()
        try:
            yield runner
        finally:
            await runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake", "max_model_len": MAX_MODEL_LEN}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        index, body = len(self.received), await request.json()
        self.received.append(Received(asyncio.get_running_loop().time(), body))
        if index in self.refuse:
            return web.json_response({"error": {"message": "no room"}}, status=self.refuse[index])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self.answer(index, body, Stream(response))
        await response.write(b"data: [DONE]\n\n")
        return response
