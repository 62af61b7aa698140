"""Agents over real HTTP: they register, are renewed, fall silent, come again."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from rose_hpc.config import ControlConfig
from rose_hpc.errors import RunFailed
from rose_hpc.http_api import Refused, authenticated_app, base_url, done, received, reply, serving, tcp_site
from rose_hpc.messages import AgentStatus, AgentUp, DeviceSample, ExecutorInfo, LeaseRenewal
from rose_hpc.rollout.agents import MAX_REJOINS, Absences, AgentPool
from rose_hpc.rollout.background import Background
from rose_hpc.rollout.fleet import Fleet
from rose_hpc.rollout.scheduler import RolloutScheduler

TOKEN = "secret"
CONTROL = ControlConfig(lease_ttl_s=0.4, heartbeat_s=0.05)
SAMPLE = DeviceSample("gpu", 0.2, 0.7, 0.1, "test")


@asynccontextmanager
async def agent_process(name="agent-0", kind="opportunistic"):
    """A real server that answers renewals; `seen` counts; `offers`, `hangs` (renewals to leave unanswered), `over` can be changed."""
    seen = {"renewals": 0, "stopped": 0, "offers": ["e0"], "hangs": 0, "over": False, "ttl_s": 0.0}

    async def lease(request: web.Request) -> web.Response:
        seen["renewals"] += 1
        seen["ttl_s"] = (await received(request, LeaseRenewal)).ttl_s
        if seen["over"]:
            raise Refused(410, "lease 7 is over: pressure", remedy="ask for a new lease")
        if seen["hangs"] > 0:
            seen["hangs"] -= 1
            await asyncio.sleep(60)
        return reply(AgentStatus([SAMPLE], seen["offers"]))

    async def stop(request: web.Request) -> web.Response:
        seen["stopped"] += 1
        return done()

    app = authenticated_app(TOKEN)
    app.add_routes([web.post("/v1/lease", lease), web.post("/v1/stop", stop)])
    async with serving(app, tcp_site("127.0.0.1", 0)) as runner:
        yield AgentUp(name, base_url(runner), [ExecutorInfo("e0", kind, 4, -1, "relay-9")]), seen


async def until(condition, deadline_s=5):
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.01)


def pool(control=CONTROL, on_join=None, on_lost=lambda relay: None):
    events, statuses, joined = [], [], []
    fleet = Fleet(RolloutScheduler(), lambda *event: events.append(event))
    arrivals = asyncio.Queue()
    agents = AgentPool(fleet, arrivals, TOKEN, control, Background(), on_join or joined.append, statuses.append, on_lost, rejoin_s=0.1)
    return fleet, arrivals, agents, events, statuses, joined


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


@pytest.mark.parametrize("how", ["registered again", "given back"])
def test_no_executor_is_left_when_its_agents_client_is_closed(how):
    async def scenario():
        fleet, arrivals, agents, *_ = pool()
        async with agents, agent_process() as (up, seen):
            holding = asyncio.create_task(agents.hold(up, ttl_s=2.5))
            await until(lambda: seen["renewals"] >= 1)
            client, there = agents._held[up.agent_id].client, []
            close = client.close

            async def closing():
                there.append(list(fleet.executors))
                await close()

            client.close = closing
            if how == "given back":
                holding.cancel()
            else:
                arrivals.put_nowait(up)
            await until(lambda: bool(there))
            assert there == [[]]
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)

    asyncio.run(scenario())


def test_an_opportunistic_executor_that_was_taken_out_joins_again_after_a_pause_while_its_agent_lists_it():
    async def scenario():
        fleet, arrivals, agents, events, _, joined = pool()
        async with agents, agent_process() as (up, _):
            arrivals.put_nowait(up)
            assert await agents.wait_for("opportunistic", 1, 5)
            fleet.leave("e0", "lost too many turns")
            await asyncio.sleep(0.06)
            assert not fleet.executors
            await until(lambda: list(fleet.executors) == ["e0"])
            assert len(joined) == 2 and [kind for kind, *_ in events] == ["executor_up", "executor_lost", "executor_up"]

    asyncio.run(scenario())


@pytest.mark.parametrize(("kind", "offers"), [("dedicated", ["e0"]), ("opportunistic", [])])
def test_a_dedicated_executor_or_one_that_its_agent_lost_does_not_join_again(kind, offers):
    async def scenario():
        fleet, arrivals, agents, _, _, joined = pool()
        async with agents, agent_process(kind=kind) as (up, seen):
            arrivals.put_nowait(up)
            assert await agents.wait_for(kind, 1, 5)
            seen["offers"] = offers
            fleet.leave("e0", "taken out")
            before = seen["renewals"]
            await until(lambda: seen["renewals"] >= before + 5)
            assert len(joined) == 1 and not fleet.executors

    asyncio.run(scenario())


def test_joining_again_has_a_pause_and_an_end():
    absences, now_s, times_s = Absences(10.0), 0.0, []
    while now_s < 500:
        if absences.is_due("e0", now_s):
            times_s.append(now_s)
        now_s += 1.0
    assert len(times_s) == MAX_REJOINS and times_s[0] == 10
    assert not absences.is_due("e1", now_s) and absences.is_due("e1", now_s + 10)  # each for itself


def test_one_renewal_that_hangs_does_not_cost_the_lease():
    async def scenario():
        fleet, arrivals, agents, events, _, _ = pool(ControlConfig(lease_ttl_s=4.0, heartbeat_s=0.05))
        async with agents, agent_process() as (up, seen):
            seen["hangs"] = 1
            arrivals.put_nowait(up)
            await until(lambda: seen["renewals"] >= 3)
            assert list(fleet.executors) == ["e0"] and ("executor_lost", "e0", "agent-0 is silent") not in events

    asyncio.run(scenario())


def test_whoever_waits_for_agents_hears_at_once_that_none_can_register_any_more():
    def broken(executor):
        raise ValueError("a bug")

    async def scenario():
        _, arrivals, agents, *_ = pool(on_join=broken)
        async with agents, agent_process() as (up, _):
            arrivals.put_nowait(up)
            with pytest.raises(RunFailed, match="welcoming agents failed"):
                await asyncio.wait_for(agents.wait_for("opportunistic", 2, 60), 5)

    asyncio.run(scenario())


def test_a_lease_is_renewed_for_what_it_is_worth_until_it_is_over_and_its_holder_hears_why():
    async def scenario():
        lost = []
        fleet, _, agents, events, _, _ = pool(on_lost=lost.append)
        async with agents, agent_process() as (up, seen):
            holding = asyncio.create_task(agents.hold(up, ttl_s=2.5))
            await until(lambda: seen["renewals"] >= 3)
            assert list(fleet.executors) == ["e0"] and seen["ttl_s"] == 2.5
            seen["over"] = True
            assert await asyncio.wait_for(holding, 2) == "lease 7 is over: pressure"
            assert not fleet.executors and events[-1] == ("executor_lost", "e0", "lease 7 is over: pressure")
            assert lost == ["relay-9"]
            renewals = seen["renewals"]
            await asyncio.sleep(0.2)
            assert seen["renewals"] == renewals
        assert seen["stopped"] == 0  # it is the borrower's to release

    asyncio.run(scenario())


def test_whoever_holds_a_lease_and_is_cancelled_leaves_no_executor_and_no_renewal():
    async def scenario():
        fleet, _, agents, *_ = pool()
        async with agents, agent_process() as (up, seen):
            holding = asyncio.create_task(agents.hold(up, ttl_s=2.5))
            await until(lambda: seen["renewals"] >= 1)
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
            renewals = seen["renewals"]
            await asyncio.sleep(0.2)
            assert not fleet.executors and seen["renewals"] == renewals

    asyncio.run(scenario())


def test_what_a_device_has_shown_is_remembered_from_lease_to_lease():
    async def scenario():
        fleet, _, agents, *_ = pool()
        known = fleet.scheduler._learned._known
        async with agents:
            for name in ("borrowed-0", "borrowed-1"):
                async with agent_process() as (up, seen):
                    seen["offers"] = [name]
                    lease = AgentUp(name, up.url, [ExecutorInfo(name, "opportunistic", 4, -1, "relay-9")])
                    holding = asyncio.create_task(agents.hold(lease, 2.5, device="a0"))
                    await until(lambda: name in fleet.executors)  # noqa: B023
                    assert list(known) == [("a0", "opportunistic")]
                    holding.cancel()
                    await asyncio.gather(holding, return_exceptions=True)

    asyncio.run(scenario())


def test_a_short_lease_is_renewed_more_often_than_the_heartbeat():
    async def scenario():
        _, _, agents, *_ = pool(ControlConfig(lease_ttl_s=100, heartbeat_s=50))
        async with agents, agent_process() as (up, seen):
            holding = asyncio.create_task(agents.hold(up, ttl_s=0.4))
            await until(lambda: seen["renewals"] >= 5, deadline_s=3)
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)

    asyncio.run(scenario())


def test_an_agent_whose_executors_are_taken_out_again_and_again_is_renewed_no_more():
    async def scenario():
        fleet, _, agents, *_ = pool()
        async with agents, agent_process() as (up, _):
            holding = asyncio.create_task(agents.hold(up, ttl_s=5.0))
            for _ in range(1 + MAX_REJOINS):
                await until(lambda: "e0" in fleet.executors)
                fleet.leave("e0", "lost too many turns")
            assert "is of no use" in await asyncio.wait_for(holding, 5)

    asyncio.run(scenario())
