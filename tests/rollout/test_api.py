"""The control API over real HTTP: agents that cannot be used and polls that make no sense are refused with 400."""

import asyncio

import aiohttp
import pytest
from msgspec import structs

from rose_hpc.http_api import base_url, serving, tcp_site
from rose_hpc.messages import TOKEN_HEADER, AgentUp, ExecutorInfo, Fault, WorkerUp, decode, encode
from rose_hpc.rollout.api import control_app
from rose_hpc.rollout.workers import WorkerPool

HEADERS = {TOKEN_HEADER: "Bearer secret"}
EXECUTOR = ExecutorInfo("lent-0", "opportunistic", 4, -1)
AGENT = AgentUp("agent-0", "http://127.0.0.1:9", [EXECUTOR])


def ask(method, path, body=None):
    """Status and body of the answer, and what was put into the queue of agents."""

    async def scenario():
        agents, workers = asyncio.Queue(), WorkerPool()
        workers.greet("trainer-0", WorkerUp(world_size=1))
        async with (
            serving(control_app("secret", workers, agents, dict), tcp_site("127.0.0.1", 0)) as runner,
            aiohttp.ClientSession(base_url(runner), headers=HEADERS) as session,
            session.request(method, path, data=body) as response,
        ):
            return response.status, await response.read(), agents.qsize()

    return asyncio.run(scenario())


def offering(**changes):
    return structs.replace(AGENT, executors=[structs.replace(EXECUTOR, **changes)])


def test_an_agent_that_can_be_used_is_welcome():
    assert ask("POST", "/v1/agents", encode(AGENT)) == (204, b"", 1)


@pytest.mark.parametrize(
    ("agent", "why"),
    [
        (structs.replace(AGENT, url="ftp://127.0.0.1:9"), "reached"),
        (structs.replace(AGENT, url="127.0.0.1:9"), "reached"),
        (structs.replace(AGENT, url="http://"), "reached"),
        (structs.replace(AGENT, url="http://host:port"), "reached"),
        (structs.replace(AGENT, url="http://host:9/elsewhere?x=1"), "reached"),
        (structs.replace(AGENT, agent_id=""), "agent id"),
        (offering(max_concurrency=0), "no request"),
        (offering(kind="borrowed"), "no known kind"),
        (offering(executor_id="../stop"), "executor id"),
        (structs.replace(AGENT, executors=[EXECUTOR, EXECUTOR]), "twice"),
    ],
)
def test_an_agent_that_cannot_be_used_is_refused_and_told_why(agent, why):
    status, body, queued = ask("POST", "/v1/agents", encode(agent))
    assert (status, queued) == (400, 0) and why in decode(body, Fault).what


@pytest.mark.parametrize("wait_s", ["nan", "-nan", "soon"])
def test_a_poll_that_waits_for_no_number_of_seconds_is_refused(wait_s):
    status, body, _ = ask("GET", f"/v1/workers/trainer-0/next?wait_s={wait_s}")
    assert status == 400 and "not a number" in decode(body, Fault).what
