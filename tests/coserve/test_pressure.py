"""A real rollout engine beside a board that the test writes: what serving's shortage of memory, a revocation and slack do to it."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from coserve_harness import Rollout
from engine_harness import CONFIG, CONTEXT, Policies, turn, wait_until

from rose_hpc.config import GateConfig, SloConfig
from rose_hpc.coserve.board import BoardWriter
from rose_hpc.coserve.gate import GateStats, read_gate_stats
from rose_hpc.coserve.slack import ServingState, StepTimes
from rose_hpc.messages import GenerateResult, encode

pytestmark = pytest.mark.engine

TIMES = StepTimes(0.0, 0.001, 0.0)
PROMPT_TOKENS, MANY = 1500, 2000
REQUESTS = 8
SETTLING_S = 5.0


class Beside:
    """The rollout engine, its requests and the board."""

    def __init__(self, folder: Path) -> None:
        self.policies, self.path = Policies(folder), folder / "board"
        self.board = BoardWriter(self.path, time.monotonic())
        self.update = self.policies.publish()
        self.rollout = Rollout(folder / "rollout", self.policies, self.path, SloConfig(ttft_s=5, tpot_s=5), GateConfig(stale_s=60))
        self.rollout.await_health()
        self.rollout.http.post("/update", content=encode(self.update)).raise_for_status()
        self._threads = ThreadPoolExecutor(REQUESTS)
        self._asked = 0

    def ask(self, prompt_tokens: int = PROMPT_TOKENS, tokens: int = MANY) -> list[Future[GenerateResult]]:
        """Requests whose prompts share nothing."""
        self._asked += 1
        requests = [
            turn(f"{self._asked}-{i}", [(7 * i + self._asked + j * (i + 1)) % 64 for j in range(prompt_tokens)], tokens)
            for i in range(REQUESTS)
        ]
        return [self._threads.submit(self.rollout.generate, request) for request in requests]

    def resident_bytes(self) -> int:
        """Of the workers."""
        return sum(psutil.Process(pid).memory_info().rss for pid in self.rollout.workers())

    def show(self, state: ServingState) -> None:
        self.board.publish(state, TIMES, time.monotonic())

    @property
    def stats(self) -> GateStats:
        found = read_gate_stats(self.path)
        assert found is not None
        return found

    def close(self) -> None:
        self.rollout.close()
        self._threads.shutdown()
        self.board.close()


@pytest.fixture(scope="module")
def beside() -> Iterator[Beside]:
    with tempfile.TemporaryDirectory(prefix="rose-test-") as folder:
        beside = Beside(Path(folder))
        try:
            yield beside
        finally:
            beside.close()


def stays(condition: Callable[[], bool], for_s: float) -> bool:
    end_s = time.monotonic() + for_s
    while time.monotonic() < end_s:
        if not condition():
            return False
        time.sleep(0.05)
    return True


def test_pressure_cuts_the_budget_once_and_its_victims_keep_their_tokens(beside: Beside) -> None:
    asked = beside.ask()
    wait_until(lambda: beside.stats.kv_used_blocks > beside.stats.kv_blocks * 0.97, 60, "a cache that fills")
    before, resident = beside.stats, beside.resident_bytes()
    assert (before.kv_budget_blocks, before.kv_cuts) == (before.kv_blocks, 0)
    beside.show(ServingState(kv_frac=0.95))
    wait_until(lambda: beside.stats.kv_cuts == 1, SETTLING_S, "the cut")
    wait_until(lambda: any(f.done() for f in asked), SETTLING_S, "the victims' answers")
    half = before.kv_blocks // 2
    assert beside.stats.kv_budget_blocks == half and 0 < beside.stats.kv_aborted < REQUESTS
    assert beside.stats.kv_held_blocks == before.kv_blocks - half
    wait_until(
        lambda: resident - beside.resident_bytes() > 0.8 * CONFIG.kv_cache_bytes / 2, 2.0, "half of the cache back in the kernel's hands"
    )
    beside.show(ServingState(kv_frac=0.1))
    assert stays(lambda: beside.stats.kv_used_blocks <= half and beside.stats.kv_budget_blocks == half, 1.0)
    results = [f.result(120) for f in asked]
    aborted = [r for r in results if r.finish_reason == "abort"]
    assert len(aborted) == beside.stats.kv_aborted and beside.stats.kv_cuts == 1
    assert {r.abort_reason for r in aborted} == {"pressure"} and {r.abort_reason for r in results if r not in aborted} == {""}
    assert all(len(r.token_ids) == MANY for r in results if r.finish_reason == "length")
    assert all(len(r.token_ids) == len(r.logprobs) == len(r.policy_versions) < MANY for r in aborted)


def test_a_new_policy_version_opens_the_budget_again(beside: Beside) -> None:
    beside.show(ServingState(kv_frac=0.95))
    [f.result(60) for f in beside.ask(16, 4)]
    assert beside.stats.kv_budget_blocks < beside.stats.kv_blocks
    beside.show(ServingState(kv_frac=0.1))
    asked = beside.ask(16, 3000)
    wait_until(lambda: beside.stats.kv_used_blocks > 0, 20, "running requests")
    beside.rollout.http.post("/update", content=encode(beside.policies.publish())).raise_for_status()
    wait_until(lambda: beside.stats.kv_budget_blocks == beside.stats.kv_blocks, SETTLING_S, "the next step's budget")
    assert [f.result(120).finish_reason for f in asked] == ["length"] * REQUESTS


def test_a_little_slack_lets_a_part_of_the_prompts_run(beside: Beside) -> None:
    before = beside.stats
    asked = beside.ask(CONTEXT - 100, 4)
    end_s = time.monotonic() + 60
    while not all(f.done() for f in asked) and time.monotonic() < end_s:
        beside.show(ServingState(last_token_s=(time.monotonic() - 4.97,), batch=1))
        time.sleep(0.01)
    beside.show(ServingState())
    assert [f.result(60).finish_reason for f in asked] == ["length"] * REQUESTS
    assert beside.stats.squeezed_steps > before.squeezed_steps


def test_a_revoked_engine_answers_with_the_tokens_it_has_and_ends(beside: Beside) -> None:
    asked = beside.ask(16, 4000)
    wait_until(lambda: beside.stats.kv_used_blocks > REQUESTS, 20, "running requests")
    time.sleep(0.5)
    begin_s = time.monotonic()
    beside.rollout.process.send_signal(signal.SIGTERM)
    results = [f.result(10) for f in asked]
    answered_s = time.monotonic() - begin_s
    beside.rollout.process.wait(10)
    assert all(r.finish_reason == "abort" and 0 < len(r.token_ids) == len(r.logprobs) < 4000 for r in results)
    assert {r.abort_reason for r in results} == {"revoked"}
    assert answered_s < 1.0
    with pytest.raises(httpx.TransportError):
        beside.rollout.generate(turn("after", [1], 1))
