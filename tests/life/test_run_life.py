"""The life of a run: it ends well, it is stopped, it is killed, it goes on; nothing is left behind."""

import os
import signal
import time
from pathlib import Path

import pytest
from running import Launched, shared_memory, small_run, summary, wait_for_checkpoint

from rose_hpc.metrics.run import Run

pytestmark = [pytest.mark.life, pytest.mark.engine, pytest.mark.mpi]

STEPS = 4


def test_a_run_ends_well_with_every_version_verified_and_leaves_nothing(run_dir, launched):
    before = shared_memory()
    run = launched(small_run, run_dir)
    assert run.finish(180) == 0, run.output
    assert run.wait_gone(5) == {} and shared_memory() <= before
    found = summary(run_dir)
    assert found["steps"] == STEPS and found["complete"]
    weights = found["weights"]
    assert weights["versions"] == weights["verified"] >= 2
    assert weights["image_bytes"] > 0 and weights["wire_bytes"] > 0
    assert found["rollout_tokens"]["total"] == found["rollout_tokens"]["dedicated"] > 0
    frames = Run(run_dir)
    assert (frames.steps["logprob_diff_mean"].dropna() < 1e-4).all()
    assert len(frames.trajectories) == STEPS * 4 * 8 and set(frames.trajectories["outcome"]) == {"done"}
    assert not frames.trajectories.duplicated(["step", "trajectory"]).any()
    assert (run_dir / "control").stat().st_mode & 0o777 == 0o700
    assert (run_dir / "control" / "token").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("number", "status"),
    [pytest.param(signal.SIGINT, 130, id="SIGINT"), pytest.param(signal.SIGTERM, 143, id="SIGTERM", marks=pytest.mark.chaos)],
)
def test_a_stopped_run_cleans_up_and_resume_ends_it_with_the_same_number_of_steps(run_dir, launched, number, status):
    before = shared_memory()
    run = launched(small_run, run_dir, "steps=6")
    wait_for_checkpoint(run_dir, 2)
    run.process.send_signal(number)
    assert run.finish(40) == status, run.output
    assert "rose-hpc resume" in run.output
    assert run.wait_gone(2) == {} and shared_memory() <= before
    resumed = launched(Launched, "resume", run_dir)
    assert resumed.finish(180) == 0, resumed.output
    steps = Run(run_dir).steps
    assert list(steps["step"]) == list(range(6)) and set(steps["attempt"]) == {0, 1}


def test_a_run_killed_at_step_k_leaves_no_process_and_resumes_from_its_checkpoint(run_dir, launched):
    run = launched(small_run, run_dir)
    wait_for_checkpoint(run_dir, 2)
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait(10)
    assert run.wait_gone(30) == {}
    found = summary(run_dir)
    assert 2 <= found["steps"] <= STEPS and not found["complete"]
    before = {name for name in shared_memory() if name.startswith("rose_hpc-")}  # left by the kill, taken away by the next run
    resumed = launched(Launched, "resume", run_dir)
    assert resumed.finish(180) == 0, resumed.output
    assert not before & shared_memory()
    found = summary(run_dir)
    assert found["steps"] == STEPS and found["complete"]
    assert found["weights"]["verified"] == found["weights"]["versions"]
    first_of_second = Run(run_dir).steps.query("attempt == 1")["step"].min()
    assert first_of_second >= 2  # it went on, it did not start again


@pytest.mark.chaos
@pytest.mark.parametrize(
    "victim",
    [
        "rose_hpc.launch.controller_process",
        "rose_hpc.train.trainer",
        "rose_hpc.coserve.agent_process",
        "rose_hpc.coserve.engine",
        "rose_hpc.metrics.writer",
        "mpiexec",
    ],
)
def test_a_killed_process_ends_the_run_with_a_reason_and_no_orphan(run_dir, launched, victim):
    before = shared_memory()
    run = launched(small_run, run_dir, "steps=200")
    wait_for_checkpoint(run_dir, 3)  # a writer that is killed loses at most its last second: not the first step's row
    os.kill(run.pids_of(victim)[0], signal.SIGKILL)
    killed_s = time.monotonic()
    assert run.finish(60) == 1, run.output
    assert "error:" in run.output and "remedy: logs are in" in run.output
    assert time.monotonic() - killed_s < 45
    assert run.wait_gone(2) == {} and shared_memory() <= before
    assert summary(run_dir)["steps"] >= 1


@pytest.mark.chaos
@pytest.mark.parametrize("relay", ["relay-0", "relay-1"])
def test_a_killed_relay_comes_back_and_the_run_goes_on(run_dir, launched, relay):
    before = shared_memory()
    run = launched(small_run, run_dir, "steps=12")
    wait_for_checkpoint(run_dir, 2)
    relays = [pid for pid in run.pids_of("rose_hpc.weights.relay ") if f"PMI_RANK={relay[-1]}" in environment_of(pid)]
    os.kill(relays[0], signal.SIGKILL)
    assert run.finish(180) == 0, run.output
    assert run.wait_gone(2) == {} and shared_memory() <= before
    found = summary(run_dir)
    assert found["steps"] == 12 and found["complete"] and found["weights"]["verified"] == found["weights"]["versions"]
    assert f"{relay} was ended by signal 9" in (run_dir / "logs" / "relays.log").read_text()


def environment_of(pid):
    return Path(f"/proc/{pid}/environ").read_bytes().replace(b"\0", b"\n").decode(errors="replace").splitlines()
