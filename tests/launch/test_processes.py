"""The supervisor leaves nothing running: not a child that ignores SIGTERM, not a grandchild, not when it is killed itself."""

import os
import signal
import subprocess
import sys
import time

import pytest

from rose_hpc.launch import processes
from rose_hpc.launch.processes import Supervisor

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid, flush=True)
time.sleep(60)
"""


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, deadline_s=10):
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(processes, "TERM_DEADLINE_S", 0.3)


def test_a_stubborn_child_and_its_children_are_killed(tmp_path, quick):
    with Supervisor(tmp_path) as supervisor:
        child = supervisor.start("stubborn", [sys.executable, "-c", STUBBORN])
        wait_until(lambda: child.log.read_text().strip())
        grandchild = int(child.log.read_text())
        assert alive(grandchild)
    assert child.process.returncode == -signal.SIGKILL
    wait_until(lambda: not alive(grandchild))


def test_the_last_words_of_a_child_are_told_and_only_this_attempts(tmp_path):
    (tmp_path / "c.log").write_text('{"error": "an older story", "exit": 1}\n')
    program = """
import sys
from rose_hpc.errors import ConfigError
from rose_hpc.lifeline import report_failure
print("noise")
sys.exit(report_failure(ConfigError("no such key", got="x")))
"""
    with Supervisor(tmp_path) as supervisor:
        child = supervisor.start("c", [sys.executable, "-c", program])
        other = supervisor.start("d", [sys.executable, "-c", "import sys; print('just text'); sys.exit(1)"])
        assert supervisor.wait_ended(20)
        assert child.failure() == "no such key\n  got: x" and other.failure() == "just text"
        assert [c.name for c in supervisor.failed()] == ["c", "d"]  # what the user can put right comes first


def test_children_die_with_a_killed_supervisor(tmp_path):
    program = f"""
import sys, time
from pathlib import Path
from rose_hpc.launch.processes import Supervisor
with Supervisor(Path({str(tmp_path)!r})) as s:
    sleeper = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
    c = s.start("child", [sys.executable, "-m", "rose_hpc.lifeline", *sleeper])
    print(c.process.pid, flush=True)
    time.sleep(60)
"""
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    child = int(owner.stdout.readline())
    try:
        wait_until(lambda: (tmp_path / "child.log").read_text().strip() == "up")
    finally:
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait(10)
        owner.stdout.close()
    wait_until(lambda: not alive(child))


def test_a_child_whose_parent_died_before_it_could_ask_for_the_signal_ends_by_itself(tmp_path):
    """The supervisor is killed while the child still imports: PR_SET_PDEATHSIG alone would come too late."""
    child_program = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(1); "
    child_program += "from rose_hpc.lifeline import die_with_parent; die_with_parent(); open('survived', 'w').write(''); time.sleep(60)"
    program = f"""
import sys, time
from pathlib import Path
from rose_hpc.launch.processes import Supervisor
with Supervisor(Path({str(tmp_path)!r})) as s:
    s.start("child", [sys.executable, "-c", {child_program!r}])
    time.sleep(60)
"""
    owner = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path)
    try:
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    finally:
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait(10)
    wait_until(lambda: not alive(int((tmp_path / "pid").read_text())))
    assert not (tmp_path / "survived").exists()


def test_what_goes_first_when_memory_runs_out_says_so_to_the_kernel_and_so_do_its_children() -> None:
    code = "from rose_hpc.lifeline import first_to_go; first_to_go(); import os; os.execvp('cat', ['cat', '/proc/self/oom_score_adj'])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout.strip() == "1000"
