"""What only MPI has: worlds, their start and end, and what a killed rank does to the runtime of the others."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rose_hpc.launch.preflight import find_mpiexec
from rose_hpc.weights.transport.mpi_worlds import can_join_worlds

pytestmark = pytest.mark.mpi

RANK = Path(__file__).parents[2] / "mpi" / "rank.sh"
SURVIVE = ["-disable-auto-cleanup"]
ENV = {**os.environ, "HYDRA_LAUNCHER": "fork"}

PRELUDE = """
import os, signal, sys, time
from rose_hpc.errors import RoseError
from rose_hpc.weights.transport.base import Lost, Received
from rose_hpc.weights.transport.mpi import MpiTransport

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def until(transport, enough, deadline_s=20.0):
    events, ends_s = [], time.monotonic() + deadline_s
    while not enough(events):
        if time.monotonic() > ends_s:
            say("TIMEOUT", transport.name, events)
            sys.exit(3)
        events += transport.poll(0.05)
    return events
"""


def world(tmp_path, size, program, flags=(), wrapped=True, seconds=60):
    """Run a program as the ranks of one world: (exit status, output, seconds)."""
    file = tmp_path / "program.py"
    file.write_text(PRELUDE + textwrap.dedent(program))
    wrapper = [str(RANK)] if wrapped else []
    command = [find_mpiexec("mpiexec"), *flags, "-n", str(size), *wrapper, sys.executable, str(file), str(tmp_path)]
    begun = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENV, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output, time.monotonic() - begun


def segments():
    return {p.name for p in Path("/dev/shm").glob("mpich_shm_*")}


def test_importing_the_transport_starts_no_mpi():
    code = "import rose_hpc.weights.transport.mpi as m; assert not m.MPI.Is_initialized()"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("flags, wrapped", [(SURVIVE, True), ((), False)], ids=["survivable", "plain"])
def test_a_world_that_closes_together_ends_mpi_and_leaves_nothing(tmp_path, flags, wrapped):
    before = segments()
    status, output, took_s = world(
        tmp_path,
        3,
        """
        t = MpiTransport(["a", "b", "c"], 20)
        for peer in t.peers:
            t.send(peer, [t.name.encode()])
        until(t, lambda e: sum(isinstance(x, Received) for x in e) == 2 and not any(t.queued_bytes(p) for p in t.peers))
        time.sleep(0.2 * t.rank)
        t.close()
        from mpi4py import MPI
        say("finalized" if MPI.Is_finalized() else "not finalized")
        """,
        flags,
        wrapped,
    )
    assert (status, output.count("finalized"), output.count("not")) == (0, 3, 0), output
    assert segments() <= before and took_s < 30


def test_a_rank_that_closes_alone_does_not_wait_for_the_others_nor_take_them_along(tmp_path):
    status, output, _ = world(
        tmp_path,
        3,
        """
        t = MpiTransport(["a", "b", "c"], 20)
        begun = time.monotonic()
        if t.name == "b":
            t.close()
            say("closed", time.monotonic() - begun < 5)
            sys.exit(0)
        until(t, lambda e: any(isinstance(x, Lost) and x.peer == "b" for x in e))
        time.sleep(3)
        other = "c" if t.name == "a" else "a"
        t.send(other, [bytes(20 << 20)])
        until(t, lambda e: any(isinstance(x, Received) for x in e) and not t.queued_bytes(other))
        say("carried on")
        t.close()
        """,
        SURVIVE,
    )
    assert status == 0 and output.count("carried on") == 2 and "closed True" in output, output


def test_separate_worlds_are_reported_as_what_they_are(tmp_path):
    before = segments()
    code = PRELUDE + "\ntry:\n    MpiTransport(['a', 'b'], 5)\nexcept RoseError as e:\n    say(type(e).__name__, e)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=ENV)
    assert "EnvironmentFault" in done.stdout and "a world of 1" in done.stdout
    assert segments() <= before


def test_a_rank_that_never_starts_is_a_timeout(tmp_path):
    before = segments()
    status, output, _ = world(
        tmp_path,
        2,
        """
        from mpi4py import MPI
        MPI.Init_thread(MPI.THREAD_FUNNELED)
        if MPI.COMM_WORLD.Get_rank():
            time.sleep(3)
            sys.exit(0)
        try:
            MpiTransport(["a", "b"], 0.5)
        except RoseError as error:
            say(type(error).__name__)
        """,
        SURVIVE,
    )
    assert status == 0 and output.strip() == "TransferTimeout", output
    assert segments() <= before


@pytest.mark.parametrize("role", ["sender", "receiver"])
def test_a_rank_killed_inside_a_long_message_is_lost_and_the_others_exchange_what_they_like(tmp_path, role):
    before = segments()
    status, output, took_s = world(
        tmp_path,
        3,
        f"""
        t = MpiTransport(["a", "b", "c"], 20, max_message_bytes=100 << 20, stall_s=1.5)
        role, block = {role!r}, bytes(100 << 20)
        if t.name == "c":
            if role == "sender":
                for _ in range(10):
                    t.send("a", [block])
            ends_s = time.monotonic() + 0.05
            while time.monotonic() < ends_s:
                t.poll(0.001)
            os.kill(os.getpid(), signal.SIGKILL)
        if t.name == "a" and role == "receiver":
            for _ in range(10):
                t.send("c", [block])
        begun, events = time.monotonic(), []
        while time.monotonic() < begun + 1:
            events += t.poll(0.01)
        if t.name == "b" or role == "sender":
            for _ in range(200):
                if "c" in t.peers:
                    t.send("c", [bytes(100)])
        until(t, lambda e: events.extend(e) or e.clear() or any(isinstance(x, Lost) for x in events))
        say("lost", *[x.peer for x in events if isinstance(x, Lost)], time.monotonic() - begun < 6)
        other = "b" if t.name == "a" else "a"
        for size in (10, 50 << 20, 3):
            t.send(other, [bytes(size)])
        until(t, lambda e: sum(isinstance(x, Received) and x.peer == other for x in events + e) == 3 and not t.queued_bytes(other))
        say("carried on")
        t.close()
        """,
        SURVIVE,
    )
    assert output.count("lost c True") == output.count("carried on") == 2, (status, output)
    assert segments() <= before and took_s < 30


def test_ending_the_launcher_ends_the_ranks(tmp_path):
    file = tmp_path / "program.py"
    file.write_text(PRELUDE + "t = MpiTransport(['a', 'b'], 20)\nsay(os.getpid())\nwhile True:\n    t.poll(1)\n")
    for number in (signal.SIGTERM, signal.SIGKILL):
        before = segments()
        command = [find_mpiexec("mpiexec"), *SURVIVE, "-n", "2", str(RANK), sys.executable, str(file)]
        launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENV, start_new_session=True)
        pids = [int(launcher.stdout.readline()) for _ in range(2)]
        launcher.send_signal(number)
        launcher.wait(20)
        launcher.stdout.close()
        ends_s = time.monotonic() + 15
        while any(is_running(pid) for pid in pids):
            assert time.monotonic() < ends_s, number
            time.sleep(0.05)
        assert segments() <= before


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_worlds_can_be_joined_here_and_an_absent_launcher_cannot():
    assert can_join_worlds([find_mpiexec("mpiexec"), "-n", "1"], 20)
    assert not can_join_worlds(["/no/such/launcher"], 5)


def test_nobody_at_a_port_is_an_error_within_the_deadline(tmp_path):
    status, output, _ = world(
        tmp_path,
        1,
        """
        t = MpiTransport(["a"], 20)
        begun = time.monotonic()
        try:
            t.accept(t.open_port(), 1.0)
        except RoseError as error:
            say(type(error).__name__, time.monotonic() - begun < 5)
        """,
        SURVIVE,
    )
    assert (status, output.strip()) == (0, "WeightsError True"), output
