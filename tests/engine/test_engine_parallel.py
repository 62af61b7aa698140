"""One real engine, two tensor-parallel workers: each takes what it needs, and together they prove that they hold the policy."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_harness import Policies, RunningEngine, alive, family, make_policy, turn, wait_until

from rose_hpc.coserve.engine import is_cpu_build
from rose_hpc.messages import UpdateRequest
from rose_hpc.weights.vllm_leftovers import remove_shared_memory

pytestmark = pytest.mark.engine

TOLERANCE = 1e-4
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    return Policies(tmp_path_factory.mktemp("policies"), lambda seed: make_policy(seed, tied=False))


@pytest.fixture(scope="module")
def engine(policies: Policies, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    running = RunningEngine(tmp_path_factory.mktemp("engine"), policies, tensor_parallel=2)
    yield running
    running.close()


def test_two_workers_agree_with_the_policy_over_versions_refusals_and_damage(engine: RunningEngine, policies: Policies) -> None:
    for density, keyframe, how in ((1.0, False, "dense"), (0.02, False, "sparse"), (0.02, True, "dense"), (0.02, False, "sparse")):
        wanted = policies.publish(density, keyframe)
        assert engine.post("/update", UpdateRequest(wanted.version, wanted.digest ^ 1)).status_code == 409
        if how == "sparse":
            lane = int(policies.changed_lanes(wanted.version)[0])
            policies.flip(lane)
            assert engine.post("/update", wanted).status_code == 409
            policies.flip(lane)
        updated = engine.update(wanted)
        assert (updated.digest, updated.how, updated.proof) == (wanted.digest, how, "digest")
        result = engine.generate(turn("parity", PROMPT, 64))
        assert set(result.policy_versions) == {wanted.version}
        assert policies.worst_error(PROMPT, result) < TOLERANCE


def test_sigkill_of_the_engine_leaves_no_child(engine: RunningEngine) -> None:
    children = family(engine.process.pid)
    assert len(children) >= 3  # the core and two workers
    engine.process.send_signal(signal.SIGKILL)
    engine.process.wait(5)
    wait_until(lambda: not alive(children), 5, "the children's end")


@pytest.mark.skipif(not is_cpu_build(), reason="only vLLM's CPU workers reduce through /dev/shm")
def test_what_dead_workers_leave_in_shared_memory_can_be_removed(engine: RunningEngine) -> None:
    def left() -> list[Path]:
        return [path for group in engine.groups for path in Path("/dev/shm").glob(f"{group}*")]

    assert left()  # if vLLM cleans up by itself one day, the removal can go
    remove_shared_memory(engine.groups)
    assert not left()
