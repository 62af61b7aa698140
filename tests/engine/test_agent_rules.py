"""The agent without engines: what it answers to a renewal, and what it says when its engines fall silent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType

import aiohttp
import pytest
from aiohttp import web

from rose_hpc.control import make_token, publish_address
from rose_hpc.coserve.agent import LEASE_EXPIRED_EXIT, Agent
from rose_hpc.coserve.device import Device
from rose_hpc.coserve.processes import EngineProcess
from rose_hpc.coserve.quota import GateOnly
from rose_hpc.coserve.specs import AgentSpec, EngineOffer
from rose_hpc.errors import RunFailed
from rose_hpc.http_api import base_url, done, serving, tcp_site
from rose_hpc.messages import TOKEN_HEADER, AgentStatus, AgentUp, EngineHealth, LeaseRenewal, decode, encode

DEADLINE_S = 30
LEASE_TTL_S = 1.0


class QuietEngine(EngineProcess):
    """An engine without a process: always there."""

    pid = 0
    is_running = True

    async def __aenter__(self) -> QuietEngine:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Nothing to end."""

    async def healthy(self) -> None:
        """It is."""

    async def ended(self) -> None:
        await asyncio.sleep(DEADLINE_S)

    async def health(self) -> EngineHealth:
        return EngineHealth(self.spec.executor_id, -1, 0, False)


class SilentEngine(QuietEngine):
    """It was healthy, and then does not answer in time."""

    async def health(self) -> EngineHealth:
        raise TimeoutError


class UnmeasurableDevice(Device):
    """Its counters cannot be read."""

    def rollout_spawned(self, engine_pid: int) -> None:
        """There is no process."""

    def rollout_up(self, engine_pid: int) -> None:
        """There is no process."""

    def sample(self) -> None:  # type: ignore[override]
        raise OSError("the counters' file is torn")


@pytest.fixture
def spec(tmp_path: Path) -> AgentSpec:
    offer = EngineOffer(executor_id="e0", model_dir=tmp_path, arena=tmp_path)
    return AgentSpec(
        agent_id="a0",
        control_dir=tmp_path / "control",
        logs_dir=tmp_path,
        engines=[offer],
        lease_ttl_s=LEASE_TTL_S,
        start_deadline_s=DEADLINE_S,
    )


Talk = Callable[[aiohttp.ClientSession, str], Awaitable[None]]


def run(spec: AgentSpec, talk: Talk, engine: type[EngineProcess] = QuietEngine, device: Device | None = None) -> int:
    """Runs an agent with a controller that takes its registration and then talks to it; the agent's exit status."""
    token = make_token(spec.control_dir)
    up: asyncio.Queue[AgentUp] = asyncio.Queue()

    async def registered(request: web.Request) -> web.Response:
        await up.put(decode(await request.read(), AgentUp))
        return done()

    async def life() -> int:
        app = web.Application()
        app.router.add_post("/v1/agents", registered)
        async with serving(app, tcp_site("127.0.0.1", 0)) as runner:
            publish_address(spec.control_dir, base_url(runner))
            agent = asyncio.create_task(Agent(spec, spec.logs_dir, device, engine).run(asyncio.Event()))
            waiting = asyncio.create_task(up.get())
            await asyncio.wait({agent, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                async with aiohttp.ClientSession(headers={TOKEN_HEADER: f"Bearer {token}"}) as session:
                    await talk(session, waiting.result().url)
            waiting.cancel()
            return await agent

    async def bounded() -> int:
        return await asyncio.wait_for(life(), DEADLINE_S)

    return asyncio.run(bounded())


async def renew(session: aiohttp.ClientSession, url: str, ttl_s: float) -> tuple[int, bytes]:
    async with session.post(f"{url}/v1/lease", data=encode(LeaseRenewal(ttl_s))) as response:
        return response.status, await response.read()


async def nothing(session: aiohttp.ClientSession, url: str) -> None:
    """The controller falls silent at once."""


def test_no_renewal_keeps_the_agent_for_longer_than_the_operator_allows(spec: AgentSpec) -> None:
    renewed_s: list[float] = []

    async def talk(session: aiohttp.ClientSession, url: str) -> None:
        assert (await renew(session, url, float("nan")))[0] == 400
        assert (await renew(session, url, float("inf")))[0] == 400
        assert (await renew(session, url, 1e9))[0] == 200
        renewed_s.append(time.monotonic())

    assert run(spec, talk) == LEASE_EXPIRED_EXIT
    assert time.monotonic() - renewed_s[0] < 10 * LEASE_TTL_S


def test_a_device_that_cannot_be_measured_does_not_turn_a_renewal_into_a_failure(spec: AgentSpec, tmp_path: Path) -> None:
    async def talk(session: aiohttp.ClientSession, url: str) -> None:
        status, body = await renew(session, url, LEASE_TTL_S)
        assert status == 200 and decode(body, AgentStatus) == AgentStatus([], ["e0"])

    device = UnmeasurableDevice("lent", [], GateOnly(), tmp_path / "board")
    assert run(spec, talk, device=device) == LEASE_EXPIRED_EXIT


def test_an_engine_that_falls_silent_is_not_taken_for_a_missing_controller(spec: AgentSpec) -> None:
    with pytest.raises(RunFailed, match="an engine that was healthy does not answer"):
        run(spec, nothing, engine=SilentEngine)
