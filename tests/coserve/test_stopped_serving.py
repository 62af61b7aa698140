"""A serving engine that stands still, or runs out of memory, beside a real rollout engine, with the step gate alone."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from closed_loop import Traffic
from engine_harness import wait_until
from real_serving import SharedCore

from rose_hpc.config import GateConfig, SloConfig
from rose_hpc.coserve.board import BoardReading, last_reading
from rose_hpc.messages import encode

pytestmark = pytest.mark.engine

SLO = SloConfig(ttft_s=30, tpot_s=30)  # everything fits: what shuts the gate here is not the slack
GATE = GateConfig(stale_s=0.5)
STOPPED_S = 3.0
SEEN_LATE_S = 0.1  # after the start of the last step: its own length (some 5 ms), and this test's looking
KV_BYTES = 4 << 20  # 8192 tokens of the serving model: eight users with a thousand each fill it
KV_PROMPT = 900


@pytest.fixture(scope="module")
def engines() -> Iterator[SharedCore]:
    with tempfile.TemporaryDirectory(prefix="rose-test-") as folder:  # short: AF_UNIX allows 107 bytes
        pair = SharedCore(Path(folder), SLO, GATE, KV_BYTES)
        try:
            yield pair
        finally:
            pair.close()


def reading(engines: SharedCore) -> BoardReading:
    found = last_reading(engines.board)
    assert found is not None
    return found


def last_step_seen_s(engines: SharedCore, until_s: float) -> float:
    """When the count of steps was last seen to grow, of time.monotonic()."""
    steps, seen_s = engines.stats.steps, time.monotonic()
    while (now_s := time.monotonic()) < until_s:
        if engines.stats.steps != steps:
            steps, seen_s = engines.stats.steps, now_s
        time.sleep(0.002)
    return seen_s


def test_the_gate_holds_while_a_busy_serving_engine_stands_still_and_both_go_on_after(engines: SharedCore) -> None:
    with engines.rolling("stopped", 2), Traffic(engines.serving, clients=3, output_tokens=200) as users:
        wait_until(lambda: users.done > 3 and reading(engines).decoding_total == 3, 30, "busy users")
        core = reading(engines).writer.pid
        os.kill(core, signal.SIGSTOP)
        try:
            time.sleep(0.05)  # what the kernel had under way
            stamp_s = reading(engines).stamp_s
            assert reading(engines).state.busy
            last_s = last_step_seen_s(engines, stamp_s + STOPPED_S)
            done = users.done
        finally:
            os.kill(core, signal.SIGCONT)
        steps = engines.stats.steps
        wait_until(lambda: users.done >= done + 6, 30, "the users' answers")
        wait_until(lambda: engines.stats.steps > steps + 20, 20, "rollout steps")
    print(f"\nlast step seen {last_s - stamp_s:.3f} s after the board's last record, of {GATE.stale_s:g} s allowed")
    assert last_s - stamp_s < GATE.stale_s + SEEN_LATE_S
    assert last_s - stamp_s > 0.5 * GATE.stale_s  # until then the slack let steps through: it is the record's age that shut it
    assert not users.failures


def test_serving_that_fills_its_cache_cuts_the_rollouts_budget_until_the_next_policy_version(engines: SharedCore) -> None:
    before = engines.stats
    assert (before.kv_budget_blocks, before.kv_cuts) == (before.kv_blocks, 0)
    with engines.rolling("before", 2):
        with Traffic(engines.serving, clients=8, prompt_tokens=KV_PROMPT, output_tokens=100) as users:
            wait_until(lambda: engines.stats.kv_cuts == 1, 30, "the cut")
            half = engines.stats.kv_budget_blocks
            wait_until(lambda: users.done >= 16, 60, "more of the users")
        assert half == before.kv_blocks // 2 and not users.failures
        wait_until(lambda: reading(engines).state.kv_frac < 0.1, 10, "a serving engine at rest")
        with engines.rolling("after", 6, prompt_tokens=1500):  # they would grow beyond it
            largest, cuts = grows_to(engines, 3.0)
        print(f"\nbudget cut to {half} of {before.kv_blocks} blocks; most used after it: {largest}")
        assert 0.8 * half < largest <= half and cuts == 1 and engines.stats.kv_budget_blocks == half
        engines.rollout.http.post("/update", content=encode(engines.policies.publish())).raise_for_status()
        wait_until(lambda: engines.stats.kv_budget_blocks == before.kv_blocks, 10, "the next step's budget")


def grows_to(engines: SharedCore, for_s: float) -> tuple[int, int]:
    """Most blocks that the rollout engine used within this time, and its cuts."""
    end_s, most = time.monotonic() + for_s, 0
    while time.monotonic() < end_s:
        most = max(most, engines.stats.kv_used_blocks)
        time.sleep(0.02)
    return most, engines.stats.kv_cuts
