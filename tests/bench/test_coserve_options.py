from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rose_hpc.bench.cli import app
from rose_hpc.bench.coserve import CoserveOptions, read_requests
from rose_hpc.bench.coserve_calibration import BUSY_FRAC, Calibration
from rose_hpc.bench.coserve_engines import SERVING, choose_cores
from rose_hpc.config import SloConfig
from rose_hpc.errors import ConfigError, EnvironmentFault

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def test_the_help_has_an_example() -> None:
    shown = re.sub(r"\x1b\[[0-9;]*m", "", CliRunner().invoke(app, ["coserve", "--help"]).stdout)
    assert "Example: rose-hpc bench coserve --json" in shown and "--trace" in shown


def test_a_trace_that_is_not_there_is_refused() -> None:
    assert CliRunner().invoke(app, ["coserve", "--trace", "missing.csv"]).exit_code == 2


def test_lengths_of_a_trace_are_scaled_and_fit_the_model(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(f"{AZURE}2023-11-16 18:17:03,4000,40\n2023-11-16 18:17:04,40000,400\n")
    requests = read_requests(CoserveOptions(trace, None, 0))
    assert [(r.prompt_tokens, r.output_tokens) for r in requests] == [(1000, 10), (SERVING.max_model_len - 100, 100)]


def test_a_trace_of_one_request_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(f"{AZURE}2023-11-16 18:17:03,4000,40\n")
    with pytest.raises(ConfigError, match="too short"):
        read_requests(CoserveOptions(trace, None, 0))


def test_without_a_trace_the_requests_are_synthetic_and_seeded() -> None:
    first, again, other = (read_requests(CoserveOptions(None, None, seed)) for seed in (0, 0, 1))
    assert first == again != other


def test_a_calibration_turns_seconds_into_requests_and_back() -> None:
    calibration = Calibration(0.06, SloConfig())
    assert calibration.span_s(100) == pytest.approx(100 * 0.06 / BUSY_FRAC)
    assert calibration.requests(calibration.span_s(100)) == 100


def test_one_core_is_refused() -> None:
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(usable)})
    try:
        with pytest.raises(EnvironmentFault, match="one core"):
            choose_cores()
    finally:
        os.sched_setaffinity(0, usable)
