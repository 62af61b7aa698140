"""Whoever starts serving on a GPU: the MPS daemon comes first and goes last, and what becomes of the rollout side ends nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from mps_place import Place, SmallServer, operator
from small_engine import SmallEngine, StubbornEngine

from rose_hpc.control import make_token
from rose_hpc.coserve.agent import Agent
from rose_hpc.coserve.device import Device
from rose_hpc.coserve.lender import Lender
from rose_hpc.coserve.quota.mps_control import MpsFolders
from rose_hpc.coserve.quota.mps_node import gone, running_daemon, until
from rose_hpc.coserve.specs import AgentSpec, EngineOffer, ServeSpec

pytestmark = pytest.mark.processes

START_S = 30


def daemon_of(place: Place) -> psutil.Process:
    daemon = running_daemon(MpsFolders(place.node.root))
    assert daemon is not None
    return daemon


# ── rose-hpc serve ───────────────────────────────────────────────────────────────────────────────────────────────────


class Serve:
    """`rose-hpc serve` as a process."""

    def __init__(self, place: Place, spec: ServeSpec) -> None:
        self._place, self.log = place, place.folder / "serve.log"
        (place.folder / "spec.json").write_text(spec.model_dump_json())
        (place.folder / "home").mkdir(mode=0o700, exist_ok=True)
        words = [str(Path(__file__).with_name("fake_serve.py")), str(place.folder / "spec.json"), str(place.folder / "home")]
        paths = [path for path in sys.path if path]
        with self.log.open("wb") as log:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
            self.process = subprocess.Popen([sys.executable, *words], stdout=log, stderr=log, env=environment)

    def server(self) -> psutil.Process:
        (server,) = (p for p in psutil.Process(self.process.pid).children() if any(w.endswith("fake_server.py") for w in p.cmdline()))
        return server

    def await_server(self) -> None:
        assert until(lambda: self.process.poll() is not None or self._place.spec.serving.socket.exists(), START_S)
        assert self.process.poll() is None, self.log.read_text()

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


@contextlib.contextmanager
def serve(place: Place, **gpu: object) -> Iterator[Serve]:
    running = Serve(place, place.told(**gpu).model_copy(update={"attach": None}))
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait(10)


def test_the_daemon_outlives_agents_and_ends_with_serving(place: Place) -> None:
    async def scene(running: Serve) -> None:
        first = await place.entry()
        server, daemon = running.server(), daemon_of(place)
        assert server.environ()["CUDA_MPS_CLIENT_PRIORITY"] == "0" and server.environ()["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "100"
        os.kill(first.pid, signal.SIGKILL)
        second = await place.entry(not_pid=first.pid)
        assert (await operator(second)).quota.startswith("MPS")
        assert not gone(server) and not gone(daemon)
        assert await asyncio.to_thread(running.end) == 0
        assert gone(server) and gone(daemon) and not (place.node.root / "pipe").exists()

    with serve(place) as running:
        asyncio.run(asyncio.wait_for(scene(running), 60))


def test_what_a_killed_owner_left_is_taken_over_by_the_next(place: Place) -> None:
    with serve(place) as running:
        first = asyncio.run(place.entry())
        daemon = daemon_of(place)
        family = psutil.Process(running.process.pid).children(recursive=True)
        running.end(signal.SIGKILL)
        assert until(lambda: all(map(gone, family)), 10)
    place.spec.serving.socket.unlink(missing_ok=True)
    assert not gone(daemon)
    with serve(place) as running:
        asyncio.run(place.entry(not_pid=first.pid))
        assert daemon_of(place) == daemon
        assert running.end() == 0
    assert gone(daemon)


def no_executable(place: Place) -> dict[str, object]:
    return {"mps_control": place.folder / "absent"}


def no_lock(place: Place) -> dict[str, object]:
    """As on a full disk: what has to be opened cannot be."""
    (place.node.root / "owner.lock").mkdir(parents=True)
    return {}


MISSING = pytest.mark.parametrize(("missing", "told"), [(no_executable, "MPS is not installed"), (no_lock, "owner.lock")])


@MISSING
def test_where_mps_cannot_be_had_users_are_served_and_nothing_is_lent(
    place: Place, missing: Callable[[Place], dict[str, object]], told: str
) -> None:
    with serve(place, **missing(place)) as running:
        running.await_server()
        assert until(lambda: "serving model at" in running.log.read_text(), START_S)
        (line,) = (line for line in running.log.read_text().splitlines() if "nothing is lent, serving goes on: " in line)
        assert told in line
        assert "CUDA_MPS_PIPE_DIRECTORY" not in running.server().environ()
        assert len(psutil.Process(running.process.pid).children()) == 1  # no agent
        assert running.end() == 0


# ── the lender of a run ──────────────────────────────────────────────────────────────────────────────────────────────


class Stays:
    """Rollout sides that go on until they are told to end."""

    def __init__(self) -> None:
        self.environments: list[dict[str, str]] = []
        self.ended = 0

    def __call__(self, spec: AgentSpec, folder: Path, device: Device) -> Stays:
        self.environments.append(device.rollout_starts(1.0))
        return self

    async def run(self, stop: asyncio.Event) -> int:
        try:
            await asyncio.sleep(START_S)
            raise AssertionError("nobody has ended it")
        finally:
            self.ended += 1


def lender_spec(place: Place, **gpu: object) -> AgentSpec:
    offer = EngineOffer(executor_id="lent-0", model_dir=place.model, arena=place.folder)
    serving = place.spec.serving
    values = {"agent_id": "lender-0", "kind": "opportunistic", "serving": serving, "control_dir": place.folder, "logs_dir": place.folder}
    return AgentSpec(**values, engines=[offer], gpu=place.told(**gpu).gpu)  # type: ignore[arg-type]


def test_a_lender_takes_the_device_back_when_the_daemon_dies_and_serving_goes_on(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    stays = Stays()

    async def scene() -> None:
        lending = asyncio.create_task(Lender(lender_spec(place), place.folder, stays, SmallServer).run())
        async with asyncio.timeout(START_S):
            while not stays.environments:
                await asyncio.sleep(0.05)
            daemon_of(place).kill()
            while not stays.ended:
                await asyncio.sleep(0.05)
        await asyncio.sleep(3.0)  # longer than it takes to look again
        assert not lending.done() and len(stays.environments) == 1
        lending.cancel()
        await asyncio.gather(lending, return_exceptions=True)

    asyncio.run(asyncio.wait_for(scene(), 60))
    assert stays.environments[0]["CUDA_MPS_CLIENT_PRIORITY"] == "1"
    said = capfd.readouterr().err
    assert "confined by MPS" in said and "serving is not protected any more" in said


@MISSING
def test_a_lender_without_mps_lends_nothing_and_serves(
    place: Place, missing: Callable[[Place], dict[str, object]], told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    stays = Stays()

    async def scene() -> None:
        spec = lender_spec(place, **missing(place))
        lending = asyncio.create_task(Lender(spec, place.folder, stays, SmallServer).run())
        async with asyncio.timeout(START_S):
            while not spec.serving or not spec.serving.socket.exists():
                await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        assert not lending.done() and not stays.environments
        lending.cancel()
        await asyncio.gather(lending, return_exceptions=True)

    asyncio.run(asyncio.wait_for(scene(), 60))
    (line,) = (line for line in capfd.readouterr().err.splitlines() if "the device is not lent, serving goes on: " in line)
    assert told in line


# ── the agent of a run ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", [SmallEngine, StubbornEngine])
def test_an_agent_that_ends_takes_the_contexts_before_the_engine_ends_them_or_is_killed(place: Place, kind: type[SmallEngine]) -> None:
    offer = EngineOffer(executor_id="lent-0", model_dir=place.model, arena=place.folder)
    make_token(place.folder)
    spec = AgentSpec(agent_id="a0", control_dir=place.folder, logs_dir=place.folder, engines=[offer], start_deadline_s=START_S)
    engine = type("GpuEngine", (kind,), {"worker": (str(place.node.executable), "client")})
    quota = place.node.quota(place.uuid)

    async def scene() -> int:
        agent = asyncio.create_task(
            Agent(spec, place.folder, Device("gpu", [], quota, place.folder / "board"), engine).run(asyncio.Event())
        )
        async with asyncio.timeout(START_S):
            while not (joined := [e for e in place.events() if e.startswith("joined")]):
                await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)  # it waits for a controller now
        agent.cancel()
        await asyncio.gather(agent, return_exceptions=True)
        return int(joined[0].split()[1])

    worker = asyncio.run(asyncio.wait_for(scene(), 60))
    assert until(lambda: f"left {worker}" in place.events(), 5)
    events = place.events()
    (ended,) = (i for i, event in enumerate(events) if event.startswith("terminate_client") and event.endswith(f" {worker}"))
    assert ended < events.index(f"left {worker}")
