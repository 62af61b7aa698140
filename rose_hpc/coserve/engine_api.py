"""The engine's HTTP routes, on a Unix socket that only the agent reaches.

POST /generate  GenerateRequest → GenerateResult       POST /update  UpdateRequest → UpdateResult
POST /abort     AbortRequest → 204                     POST /pause, /resume → 204
POST /deactivate → Deactivated                         POST /activate  ActivateRequest → UpdateResult
GET  /health    → EngineHealth
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from rose_hpc.coserve.vllm_engine import RolloutEngine
from rose_hpc.http_api import authenticated_app, done, received, reply
from rose_hpc.messages import AbortRequest, ActivateRequest, EngineHealth, GenerateRequest, UpdateRequest


def engine_app(engine: RolloutEngine, executor_id: str, token: str) -> web.Application:
    """The application; see the module's docstring for its routes."""
    routes = EngineRoutes(engine, executor_id)
    app = authenticated_app(token)
    for name in ("generate", "abort", "pause", "resume", "update", "deactivate", "activate"):
        app.router.add_post(f"/{name}", getattr(routes, name))
    app.router.add_get("/health", routes.health)
    return app


class EngineRoutes:
    """One method per route."""

    def __init__(self, engine: RolloutEngine, executor_id: str) -> None:
        self._engine, self._executor_id = engine, executor_id

    async def generate(self, request: web.Request) -> web.Response:
        return reply(await self._engine.generate(await received(request, GenerateRequest)))

    async def abort(self, request: web.Request) -> web.Response:
        message = await received(request, AbortRequest)
        await self._engine.abort(message.request_ids, message.reason)
        return done()

    async def pause(self, request: web.Request) -> web.Response:
        await asyncio.shield(self._engine.policy.pause())
        return done()

    async def resume(self, request: web.Request) -> web.Response:
        await asyncio.shield(self._engine.policy.resume())
        return done()

    async def update(self, request: web.Request) -> web.Response:
        """Shielded: a caller that hangs up must not leave the model half loaded."""
        return reply(await asyncio.shield(self._engine.policy.update(await received(request, UpdateRequest))))

    async def deactivate(self, request: web.Request) -> web.Response:
        return reply(await asyncio.shield(self._engine.policy.deactivate()))

    async def activate(self, request: web.Request) -> web.Response:
        return reply(await asyncio.shield(self._engine.policy.activate(await received(request, ActivateRequest))))

    async def health(self, request: web.Request) -> web.Response:
        policy = self._engine.policy
        return reply(EngineHealth(self._executor_id, policy.version, self._engine.running, policy.paused, policy.active))
