"""Lending a GPU under MPS, from the operator's command to the end of a lease, against a stand-in of the control daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp
import psutil
import pytest
from mps_harness import as_root, process_of_another_user
from mps_place import Place, borrowed, engine_of, operator, until_state
from small_engine import SmallEngine

from rose_hpc.coserve.lease_client import LeaseClient, Refusal
from rose_hpc.coserve.lease_messages import LendChange
from rose_hpc.coserve.quota.mps_control import MpsFolders
from rose_hpc.coserve.quota.mps_node import EXECUTABLE, PID_FILE, make_private, running_daemon
from rose_hpc.coserve.registry import AgentEntry
from rose_hpc.coserve.specs import ServeSpec
from rose_hpc.errors import EnvironmentFault
from rose_hpc.messages import TOKEN_HEADER, GenerateRequest, GenerateResult, decode, encode

pytestmark = pytest.mark.processes

DEADLINE_S = 60
FOREVER = 1_000_000  # tokens


Scene = Callable[[AgentEntry], Awaitable[None]]


def play(place: Place, scene: Scene, spec: ServeSpec | None = None, engine: type[SmallEngine] | None = None) -> None:
    """A scene with an agent; nothing of an engine may be left afterwards."""

    async def life() -> None:
        async with place.agent(spec, engine) as entry:
            await scene(entry)

    before = set(psutil.Process().children(recursive=True))
    asyncio.run(asyncio.wait_for(life(), DEADLINE_S))
    left = [p for p in set(psutil.Process().children(recursive=True)) - before if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not left


async def cut_turn(client: LeaseClient) -> GenerateResult:
    """A turn that goes on until something ends it."""
    body, headers = encode(GenerateRequest("turn-0", [1, 2], FOREVER, 1.0, [])), {TOKEN_HEADER: f"Bearer {client._token}"}
    url = f"{client.url}/v1/executors/lent-0/generate"
    async with aiohttp.ClientSession(headers=headers) as session, session.post(url, data=body) as response:
        assert response.status == 200, await response.read()
        return decode(await response.read(), GenerateResult)


def test_a_lent_engine_runs_under_mps_within_the_ceiling_of_its_lease(place: Place) -> None:
    async def scene(entry: AgentEntry) -> None:
        assert entry.quota.startswith("MPS")
        async with borrowed(place, entry, ceiling_frac=0.3):
            engine = engine_of(place)
            (worker,) = engine.children()
            for process in (engine, worker):
                told = {name: value for name, value in process.environ().items() if name.startswith("CUDA_")}
                assert told == {
                    "CUDA_MPS_PIPE_DIRECTORY": str(place.node.root / "pipe"),
                    "CUDA_MPS_LOG_DIRECTORY": str(place.node.root / "log"),
                    "CUDA_VISIBLE_DEVICES": place.uuid,
                    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30",
                    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"{place.uuid}=4096M",
                    "CUDA_MPS_CLIENT_PRIORITY": "1",
                }
            assert f"joined {worker.pid}" in place.events()
            assert "at most 30 % of the threads and 4096 MiB" in (await operator(entry)).quota

    with place.served():
        play(place, scene)


def test_a_revoked_turn_returns_then_the_contexts_end_and_only_then_the_process(place: Place) -> None:
    async def scene(entry: AgentEntry) -> None:
        async with borrowed(place, entry) as client:
            (worker,) = engine_of(place).children()
            turn = asyncio.create_task(cut_turn(client))
            await asyncio.sleep(0.5)
            status = await operator(entry, LendChange(lending=False))
            assert status.state == "off" and status.freed_s is not None and status.freed_s <= 1.0
            result = await turn
            assert result.finish_reason == "abort" and len(result.token_ids) > 5
        events = place.events()
        (ended,) = (i for i, event in enumerate(events) if event.startswith("terminate_client") and event.endswith(f" {worker.pid}"))
        async with asyncio.timeout(5):
            while f"left {worker.pid}" not in (events := place.events()):
                await asyncio.sleep(0.02)
        assert ended < events.index(f"left {worker.pid}")

    with place.served() as server:
        (cuda,) = psutil.Process(server.pid).children()
        play(place, scene)
        assert cuda.is_running() and not any(event.endswith(f" {cuda.pid}") for event in place.events() if event.startswith("terminate"))


def test_a_dead_daemon_ends_the_lease_and_nothing_is_lent_any_more_but_serving_goes_on(place: Place) -> None:
    async def scene(entry: AgentEntry) -> None:
        async with borrowed(place, entry) as client:
            daemon = running_daemon(MpsFolders(place.node.root))
            assert daemon is not None
            daemon.kill()
            status = await until_state(entry, "faulty")
            assert status.last.endswith("fault") and "MPS control daemon" in status.quota  # has died, or does not answer: who looks first
            with pytest.raises(Refusal, match="is over: fault"):
                await client.renew(5.0)
            with pytest.raises(Refusal, match="cannot be lent now"):
                await client.ask(entry.key, place.ask())
            assert (await operator(entry, LendChange(lending=True))).state == "faulty"

    with place.served() as server:
        play(place, scene)
        assert psutil.Process(server.pid).is_running()


def test_after_a_fault_that_is_put_right_the_device_is_lent_again(place: Place) -> None:
    async def scene(entry: AgentEntry) -> None:
        async with borrowed(place, entry):
            place.node.fault("faulted")
            assert "has faulted" in (await until_state(entry, "faulty")).quota
            place.node.fault()
            assert "faulty" not in (await until_state(entry, "free")).quota
        async with borrowed(place, entry):
            assert (await operator(entry)).state == "held"

    with place.served():
        play(place, scene)


def test_an_engine_that_computes_outside_mps_loses_the_lease(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    async def scene(entry: AgentEntry) -> None:
        async with LeaseClient(entry.url) as client:
            await client.ask(entry.key, place.ask())
            with pytest.raises(Refusal, match="engine_lost"):
                await client.until_up(30)

    outside = place.small_engine("env", f"CUDA_MPS_PIPE_DIRECTORY={place.folder}", str(place.node.executable), "client")
    with place.served():
        play(place, scene, engine=outside)
    assert "an engine runs outside MPS" in capfd.readouterr().err


def test_an_engine_whose_contexts_cannot_be_ended_gets_the_time_to_end_by_itself(place: Place) -> None:
    async def scene(entry: AgentEntry) -> None:
        async with borrowed(place, entry):
            engine = engine_of(place)
            place.node.fault("terminate_fails")
            status = await operator(entry, LendChange(lending=False))
            assert status.freed_s is not None and status.freed_s < 2.0 and not engine.is_running()
        (log,) = place.spec.logs_dir.glob("leases/*/engine.log")
        assert "ended in good order" in log.read_text()

    with place.served():
        play(place, scene)


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────────


def refused(place: Place, spec: ServeSpec | None = None) -> EnvironmentFault:
    """What the agent says instead of lending."""

    async def nothing(entry: AgentEntry) -> None:
        raise AssertionError("it lends")

    with pytest.raises(EnvironmentFault) as fault:
        play(place, nothing, spec)
    return fault.value


def test_a_server_that_runs_outside_mps_is_refused_with_the_variables_it_would_need(place: Place) -> None:
    with place.served({"CUDA_MPS_PIPE_DIRECTORY": str(place.folder), "CUDA_VISIBLE_DEVICES": place.uuid}):
        fault = refused(place)
    assert "does not run under the MPS daemon" in fault.what and f"CUDA_MPS_PIPE_DIRECTORY={place.node.root}/pipe" in str(fault.remedy)


def test_without_the_control_daemons_program_nothing_is_lent_but_by_the_gate_alone_where_the_operator_says_so(place: Place) -> None:
    async def scene(entry: AgentEntry) -> None:
        async with borrowed(place, entry, ceiling_frac=0.3):
            assert (await operator(entry)).quota == "the gate alone, which does not hold the ceiling of 0.3"
            assert "CUDA_MPS_CLIENT_PRIORITY" not in engine_of(place).environ()

    missing = place.folder / "absent"
    with place.served():
        fault = refused(place, place.told(mps_control=missing))
        assert fault.what == "MPS is not installed" and "--gate-only" in str(fault.remedy)
        play(place, scene, place.told(mps_control=missing, gate_only=True))


def test_a_daemon_of_another_user_is_refused(place: Place) -> None:
    as_root()
    with place.served({"CUDA_VISIBLE_DEVICES": place.uuid}), process_of_another_user(EXECUTABLE) as pid:
        root = place.folder / "others"
        for folder in (root, root / "pipe"):
            make_private(folder)
        (root / "pipe" / PID_FILE).write_text(f"{pid}\n")
        assert "belongs to another user" in refused(place, place.told(mps_folder=root)).what


def test_where_no_daemon_runs_none_is_started_for_a_server_that_runs_already(place: Place) -> None:
    with place.served():
        fault = refused(place, place.told(mps_folder=place.folder / "empty"))
    assert fault.what == "no MPS control daemon runs there" and "rose-hpc serve" in str(fault.remedy)
    assert not (place.folder / "empty").exists()
