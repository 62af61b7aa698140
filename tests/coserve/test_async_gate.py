"""The gate under async scheduling, where each step is decided while another runs: a real rollout engine beside a busy serving engine.

vLLM schedules so on GPUs; async_cpu.py makes it do so here. The step gate is alone: no priority of the kernel helps.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from async_cpu import SAYS, distribution
from closed_loop import Traffic
from engine_harness import wait_until
from real_serving import LONG, SharedCore, prompt

from rose_hpc.config import GateConfig, SloConfig
from rose_hpc.messages import UpdateResult, decode, encode

pytestmark = pytest.mark.engine

SLO = SloConfig(ttft_s=0.001, tpot_s=0.001)  # nothing fits: a busy serving engine must shut the gate
GATE = GateConfig(stale_s=0.5)
TOLERANCE = 1e-4
MOST_LATE = 2  # steps per closing: the one that runs, and the one decided before the board showed the request
BURSTS = 25


@pytest.fixture(scope="module")
def engines() -> Iterator[SharedCore]:
    with tempfile.TemporaryDirectory(prefix="rose-test-") as name, pytest.MonkeyPatch.context() as patch:  # short: AF_UNIX: 107 bytes
        patch.setenv("PYTHONPATH", distribution(Path(name) / "plugin"))
        pair = SharedCore(Path(name), SLO, GATE)
        try:
            yield pair
        finally:
            pair.close()


def test_the_rollout_engine_schedules_asynchronously(engines: SharedCore) -> None:
    assert f"AsyncGatedScheduler: {SAYS}" in engines.rollout_log.read_text()


def test_tokens_are_the_policys_and_arrive_beside_a_busy_engine(engines: SharedCore) -> None:
    with Traffic(engines.serving, clients=2, output_tokens=20, pause_s=0.2) as users:
        results = [future.result(60) for future in engines.ask("beside", 4, 300)]
        wait_until(lambda: users.done > 5, 30, "users' requests")
    assert not users.failures
    for i, result in enumerate(results):
        assert (result.finish_reason, len(result.token_ids)) == ("length", 300)
        assert engines.policies.worst_error(prompt(i), result) < TOLERANCE


def test_a_closing_lets_at_most_two_steps_through(engines: SharedCore) -> None:
    before = engines.stats
    with (
        engines.rolling("closings", 8) as asked,
        Traffic(engines.serving, clients=1, output_tokens=10, pause_s=0.1) as users,
    ):
        wait_until(lambda: users.done >= BURSTS, 60, "the bursts")
    after = engines.stats
    late = [b - a for a, b in zip(before.late_steps, after.late_steps, strict=True)]
    print(f"\nlate steps per closing (0, 1, 2, more): {late}; longest reaction {1000 * after.reaction_max_s:.1f} ms")
    assert not users.failures
    assert sum(late) > BURSTS / 2
    assert sum(late[MOST_LATE + 1 :]) == 0
    results = [future.result() for future in asked]
    assert all(0 < len(r.token_ids) == len(r.logprobs) <= LONG for r in results)


def test_a_shut_gate_lets_nothing_through_and_still_hears_aborts(engines: SharedCore) -> None:
    asked = engines.ask("shut", 4, LONG)
    with Traffic(engines.serving, clients=4, output_tokens=900) as users:
        held = engines.stats.held_steps
        wait_until(lambda: engines.stats.held_steps > held + 10, 10, "a shut gate")
        steps = engines.stats.steps
        time.sleep(1.0)
        passed = engines.stats.steps - steps
        begin_s = time.monotonic()
        engines.abort("shut", 4)
        results = [future.result(20) for future in asked]
        answered_s = time.monotonic() - begin_s
    assert not users.failures
    assert passed <= MOST_LATE  # in a gap between the users' requests
    assert answered_s < 2.0
    assert {r.finish_reason for r in results} == {"abort"}
    for i, result in enumerate(results):
        assert result.token_ids and engines.policies.worst_error(prompt(i), result) < TOLERANCE


def test_weights_change_under_turns_in_flight(engines: SharedCore) -> None:
    with Traffic(engines.serving, clients=1, output_tokens=10, pause_s=0.1) as users:
        asked = engines.ask("update", 4, 1200)
        wanted = engines.policies.publish()
        answer = engines.rollout.http.post("/update", content=encode(wanted))
        results = [future.result(90) for future in asked]
    assert answer.status_code == 200, answer.text
    updated = decode(answer.content, UpdateResult)
    assert (updated.version, updated.proof) == (wanted.version, "digest")
    assert not users.failures
    assert {v for r in results for v in r.policy_versions} == {wanted.version - 1, wanted.version}
    for i, result in enumerate(results):
        assert engines.policies.worst_error(prompt(i), result) < TOLERANCE
