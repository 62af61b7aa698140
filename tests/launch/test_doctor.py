from __future__ import annotations

import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rose_hpc.cli import app
from rose_hpc.launch import doctor
from rose_hpc.launch.doctor import DEGRADED, MISSING, OK, examine

pytestmark = pytest.mark.processes


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    every = doctor._checks
    monkeypatch.setattr(doctor, "_checks", lambda root: {name: every(root)[name] for name in names})


def executable(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_this_machine_has_what_these_tests_need(tmp_path: Path) -> None:
    told: list[str] = []
    found = examine(tmp_path, told.append)
    assert told == list(found)
    assert {name: found[name].status for name in ("python", "torch", "vllm", "mpi", "hdf5")} == dict.fromkeys(
        ("python", "torch", "vllm", "mpi", "hdf5"), OK
    )
    assert not list(tmp_path.iterdir())
    assert "does not isolate faults" in found["mps"].found and "MIG" in found["mps"].found


def test_a_launcher_of_another_mpi_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "mpi")
    launcher = executable(tmp_path / "mpiexec", 'shift 2; "$@"')  # one rank, whatever it is asked for
    monkeypatch.setattr(doctor.preflight, "find_mpiexec", lambda command: str(launcher))
    found = examine(tmp_path)["mpi"]
    assert found.status == MISSING and "separate worlds" in found.found and "mpi4py" in found.remedy


def test_what_hangs_is_ended_at_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "slurm")
    executable(tmp_path / "srun", "sleep 60 & sleep 60")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(doctor, "PROCESS_DEADLINE_S", 0.3)
    begin_s = time.monotonic()
    found = examine(tmp_path)["slurm"]
    assert found.status == DEGRADED and "controller" in found.remedy
    assert time.monotonic() - begin_s < 10


def test_a_folder_that_cannot_be_written_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "hdf5")
    found = examine(tmp_path / "absent")["hdf5"]
    assert found.status == MISSING and "absent" in found.found and "--runs" in found.remedy


def test_the_command_fails_where_something_needed_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, ["doctor", "--runs", str(tmp_path / "absent"), "--json"])
    assert result.exit_code == 1 and '"hdf5": {\n      "status": "missing"' in result.stdout
