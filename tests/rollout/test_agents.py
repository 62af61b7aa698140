"""Agents over real HTTP: they register, are renewed, fall silent, come again."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from rose_hpc.config import ControlConfig
from rose_hpc.http_api import authenticated_app, base_url, done, reply, serving, tcp_site
from rose_hpc.messages import AgentStatus, AgentUp, DeviceSample, ExecutorInfo
from rose_hpc.rollout.agents import AgentPool
from rose_hpc.rollout.fleet import Fleet
from rose_hpc.rollout.scheduler import RolloutScheduler

TOKEN = "secret"
CONTROL = ControlConfig(lease_ttl_s=0.4, heartbeat_s=0.05)
SAMPLE = DeviceSample("gpu", 0.2, 0.7, 0.1, "test")


@asynccontextmanager
async def agent_process(name="agent-0", kind="opportunistic"):
    """A real server that answers renewals; `seen` counts them, `offers` can be changed."""
    seen = {"renewals": 0, "stopped": 0, "offers": ["e0"]}

    async def lease(request: web.Request) -> web.Response:
        seen["renewals"] += 1
        return reply(AgentStatus([SAMPLE], seen["offers"]))

    async def stop(request: web.Request) -> web.Response:
        seen["stopped"] += 1
        return done()

    app = authenticated_app(TOKEN)
    app.add_routes([web.post("/v1/lease", lease), web.post("/v1/stop", stop)])
    async with serving(app, tcp_site("127.0.0.1", 0)) as runner:
        yield AgentUp(name, base_url(runner), [ExecutorInfo("e0", kind, 4, -1)]), seen


async def until(condition, deadline_s=5):
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.01)


def pool():
    events, statuses, joined = [], [], []
    fleet = Fleet(RolloutScheduler(), lambda *event: events.append(event))
    arrivals = asyncio.Queue()
    return fleet, arrivals, AgentPool(fleet, arrivals, TOKEN, CONTROL, joined.append, statuses.append), events, statuses, joined


def test_an_agent_joins_is_renewed_reports_its_device_and_is_stopped_at_the_end():
    async def scenario():
        fleet, arrivals, agents, _, statuses, joined = pool()
        async with agent_process() as (up, seen):
            async with agents:
                assert not await agents.wait_for("opportunistic", 1, 0.05)
                arrivals.put_nowait(up)
                assert await agents.wait_for("opportunistic", 1, 5)
                await until(lambda: seen["renewals"] >= 3)
                assert [e.executor_id for e in joined] == ["e0"] == list(fleet.executors)
                assert statuses[0].devices == [SAMPLE]
            assert seen["stopped"] == 1

    asyncio.run(scenario())


def test_an_agent_that_falls_silent_loses_its_executors_after_the_lease_and_may_come_again():
    async def scenario():
        fleet, arrivals, agents, events, _, joined = pool()
        async with agents:
            async with agent_process() as (up, _):
                arrivals.put_nowait(up)
                assert await agents.wait_for("opportunistic", 1, 5)
            await until(lambda: not fleet.executors)
            assert ("executor_lost", "e0", "agent-0 is silent") in events
            async with agent_process() as (up, _):
                arrivals.put_nowait(up)
                assert await agents.wait_for("opportunistic", 1, 5) and len(joined) == 2

    asyncio.run(scenario())


def test_an_executor_whose_engine_ended_leaves_at_the_next_renewal():
    async def scenario():
        fleet, arrivals, agents, events, _, _ = pool()
        async with agents, agent_process() as (up, seen):
            arrivals.put_nowait(up)
            assert await agents.wait_for("opportunistic", 1, 5)
            seen["offers"] = []
            await until(lambda: not fleet.executors)
            assert ("executor_lost", "e0", "its engine ended") in events

    asyncio.run(scenario())


@pytest.mark.parametrize("count", [1, 2])
def test_registering_again_replaces_the_earlier_life(count):
    async def scenario():
        fleet, arrivals, agents, _, _, joined = pool()
        async with agents, agent_process() as (up, seen):
            for _ in range(count):
                arrivals.put_nowait(up)
            await until(lambda: len(joined) == count)
            assert list(fleet.executors) == ["e0"]
            await until(lambda: seen["renewals"] >= 2)

    asyncio.run(scenario())
