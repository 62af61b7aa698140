"""The lender's loop without engines: whatever happens on the rollout side, serving goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import psutil
import pytest
from mps_harness import gpu_uuid
from serving_specs import serving_spec

from rose_hpc.config import GpuConfig
from rose_hpc.coserve.board import BoardWriter
from rose_hpc.coserve.device import Device
from rose_hpc.coserve.lender import RESTARTS, Lender
from rose_hpc.coserve.protection import until_protected
from rose_hpc.coserve.quota import GateOnly
from rose_hpc.coserve.serve import protected
from rose_hpc.coserve.specs import AgentSpec, EngineOffer, ServeSpec
from rose_hpc.errors import ConfigError, RunFailed

DEADLINE_S = 30


class Stays:
    """Rollout sides that end as told, one outcome a stay; the last one goes on for all that follow."""

    def __init__(self, *outcomes: int | Exception) -> None:
        self._outcomes, self.count = outcomes, 0
        self.all_over = asyncio.Event()

    def __call__(self, spec: AgentSpec, folder: Path, device: Device) -> Stays:
        return self

    async def run(self, stop: asyncio.Event) -> int:
        outcome = self._outcomes[min(self.count, len(self._outcomes) - 1)]
        self.count += 1
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


@pytest.fixture
def spec(tmp_path: Path) -> AgentSpec:
    serving = serving_spec(tmp_path)
    offer = EngineOffer(executor_id="lent-0", model_dir=tmp_path, arena=tmp_path)
    return AgentSpec(agent_id="lender-0", kind="opportunistic", serving=serving, control_dir=tmp_path, logs_dir=tmp_path, engines=[offer])


@pytest.fixture
def board(tmp_path: Path) -> Iterator[BoardWriter]:
    board = BoardWriter(tmp_path / "board", 0.0)
    yield board
    board.close()


def lend(spec: AgentSpec, stays: Stays, board_deadline_s: float = DEADLINE_S) -> None:
    """Lends until the stays are over, sees that the lender then waits for the operator, and stops it."""

    async def life() -> None:
        assert spec.serving is not None
        device, stop = Device("lent", [], GateOnly(), spec.serving.board), asyncio.Event()
        lending = asyncio.create_task(Lender(spec, spec.logs_dir, stays).lend(device, stop, board_deadline_s))
        await asyncio.sleep(0.5)
        assert not lending.done(), "serving ended although the operator has not asked for it"
        stop.set()
        await asyncio.wait_for(lending, DEADLINE_S)

    asyncio.run(life())


@pytest.mark.parametrize(
    "failure",
    [
        RunFailed("an engine ended"),
        FileNotFoundError("no token"),
        OSError(28, "No space left on device"),
        aiohttp.ServerDisconnectedError(),
        TimeoutError(),
        KeyError("lent-0"),
    ],
    ids=repr,
)
def test_no_failure_of_the_rollout_side_ends_serving(
    spec: AgentSpec, board: BoardWriter, failure: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    stays = Stays(failure)
    lend(spec, stays)
    assert stays.count == 1 + RESTARTS
    said = capsys.readouterr().err
    assert said.count("the rollout side failed, serving goes on") == 1 + RESTARTS
    assert "the device is given back; serving goes on alone" in said


def test_a_rollout_side_that_failed_once_is_lent_to_again_and_one_that_is_over_is_not(spec: AgentSpec, board: BoardWriter) -> None:
    stays = Stays(OSError("once"), 0)
    lend(spec, stays)
    assert stays.count == 2


def test_a_serving_engine_without_a_board_is_not_lent(spec: AgentSpec, capsys: pytest.CaptureFixture[str]) -> None:
    stays = Stays(0)
    lend(spec, stays, board_deadline_s=0.2)
    assert stays.count == 0
    assert "the device is not lent, serving goes on: nothing on the board" in capsys.readouterr().err


def test_a_board_that_cannot_be_read_is_no_board(spec: AgentSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "board").mkdir()
    stays = Stays(0)
    lend(spec, stays)
    assert stays.count == 0
    assert "the device is not lent, serving goes on: the board cannot be read" in capsys.readouterr().err


# ── what protects serving ────────────────────────────────────────────────────────────────────────────────────────────


class Unhealthy(GateOnly):
    """Faulty for so many questions."""

    def __init__(self, questions: int) -> None:
        self.asked, self._questions = 0, questions

    def fault(self) -> str | None:
        self.asked += 1
        return "the daemon is silent" if self.asked <= self._questions else None


def test_waiting_for_protection_says_once_what_it_waits_for(tmp_path: Path) -> None:
    quota, told = Unhealthy(5), list[str]()
    asyncio.run(asyncio.wait_for(until_protected(Device("lent", [], quota, tmp_path / "board"), told.append, 0.01), DEADLINE_S))
    assert quota.asked == 6 and told == ["the daemon is silent"]


def test_a_device_that_is_unprotected_from_the_start_is_not_lent_and_the_log_says_why(
    spec: AgentSpec, board: BoardWriter, capsys: pytest.CaptureFixture[str]
) -> None:
    stays = Stays(0)

    async def life() -> None:
        assert spec.serving is not None
        device = Device("lent", [], Unhealthy(1000), spec.serving.board)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(Lender(spec, spec.logs_dir, stays).lend(device, asyncio.Event()), 0.5)

    asyncio.run(life())
    assert stays.count == 0
    assert capsys.readouterr().err.count("nothing is lent until serving is protected, serving goes on: the daemon is silent") == 1


class Server:
    """A serving engine that answers at once and never ends."""

    def __init__(self) -> None:
        self.is_up = asyncio.Event()

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *error: object) -> None:
        """Nothing to end."""

    async def healthy(self) -> None:
        self.is_up.set()

    async def ended(self) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), psutil.NoSuchProcess(4001)], ids=repr)
def test_no_failure_to_find_protection_keeps_serving_from_starting(
    spec: AgentSpec, failure: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*words: object) -> GateOnly:
        raise failure

    servers: list[Server] = []

    def server(*words: object) -> Server:
        servers.append(Server())
        return servers[-1]

    async def life() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(Lender(spec, spec.logs_dir, Stays(0), server).run(), 0.5)  # type: ignore[arg-type]

    for module in ("lender", "serve"):
        monkeypatch.setattr(f"rose_hpc.coserve.{module}.choose_quota", refuse)
    asyncio.run(life())
    assert [each.is_up.is_set() for each in servers] == [True]
    assert f"the device is not lent, serving goes on: {failure}" in capsys.readouterr().err

    folder = spec.logs_dir
    gpu = GpuConfig(uuids=[gpu_uuid()], mps_folder=folder)
    told = ServeSpec(name="op", serving=serving_spec(folder), registry=folder, logs_dir=folder, gpu=gpu)
    assert asyncio.run(protected(told)) == (told, None)
    assert f"nothing is lent, serving goes on: {failure}" in capsys.readouterr().err


def test_without_serving_there_is_nothing_to_lend(spec: AgentSpec) -> None:
    with pytest.raises(ConfigError, match="needs a serving engine"):
        Lender(spec.model_copy(update={"serving": None}), spec.logs_dir)
