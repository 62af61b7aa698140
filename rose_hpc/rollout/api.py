"""The controller's control API: workers poll and reply, agents register, anyone with the token reads the status.

POST /v1/workers/ID/hello              WorkerUp
GET  /v1/workers/ID/next?wait_s=2      Command, or 204
POST /v1/workers/ID/replies/CALL       Reply
POST /v1/agents                        AgentUp
GET  /v1/status                        JSON: phase, step, …
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

from aiohttp import web

from rose_hpc.http_api import Refused, authenticated_app, done, received, reply
from rose_hpc.messages import MAX_BODY_BYTES, AgentUp, Reply, WorkerUp
from rose_hpc.rollout.workers import WorkerPool

LONGEST_POLL_S = 30.0
_WORKER_ID = re.compile(r"[a-z]+-\d{1,9}")


def control_app(token: str, workers: WorkerPool, agents: asyncio.Queue[AgentUp], status: Callable[[], dict[str, Any]]) -> web.Application:
    """The application; greetings of agents go into the queue."""

    async def hello(request: web.Request) -> web.Response:
        workers.greet(_worker_id(request), await received(request, WorkerUp))
        return done()

    async def next_command(request: web.Request) -> web.Response:
        try:
            command = await workers.next_command(_worker_id(request), _wait_s(request))
        except KeyError:
            raise Refused(409, "say hello first") from None
        return done() if command is None else reply(command)

    async def replies(request: web.Request) -> web.Response:
        call_id = request.match_info["call"]
        if not re.fullmatch(r"-?\d{1,18}", call_id):
            raise Refused(400, "not a call id", got=call_id[:40])
        workers.take_reply(_worker_id(request), int(call_id), await received(request, Reply))  # type: ignore[arg-type]
        return done()

    async def register(request: web.Request) -> web.Response:
        agents.put_nowait(await received(request, AgentUp))
        return done()

    async def show(request: web.Request) -> web.Response:
        return web.json_response(status())

    app = authenticated_app(token, MAX_BODY_BYTES)
    app.add_routes(
        [
            web.post("/v1/workers/{id}/hello", hello),
            web.get("/v1/workers/{id}/next", next_command),
            web.post("/v1/workers/{id}/replies/{call}", replies),
            web.post("/v1/agents", register),
            web.get("/v1/status", show),
        ]
    )
    return app


def _worker_id(request: web.Request) -> str:
    worker_id = request.match_info["id"]
    if not _WORKER_ID.fullmatch(worker_id):
        raise Refused(400, "not a worker id", got=worker_id[:80], expected="for example trainer-0")
    return worker_id


def _wait_s(request: web.Request) -> float:
    try:
        return min(max(float(request.query.get("wait_s", "0")), 0.0), LONGEST_POLL_S)
    except ValueError:
        raise Refused(400, "wait_s is not a number", got=request.query["wait_s"][:40]) from None
