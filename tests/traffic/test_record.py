from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from rose_hpc.config import SloConfig
from rose_hpc.errors import RunFailed
from rose_hpc.metrics import Run
from rose_hpc.traffic.record import Recorder, Served
from rose_hpc.traffic.trace import Request

SLO = SloConfig(ttft_s=0.5, tpot_s=0.1)
WAIT_S = 20.0


def served(index: int = 0, **changes: Any) -> Served:
    values: dict[str, Any] = {"new_tokens": 5, "ttft_s": 0.1, "tpot_s": 0.05, "e2e_s": 0.3, "send_lag_s": 0.001, "outcome": "ok"}
    return Served(**{"index": index, "request": Request(0, 10, 5), "arrived_unix_s": 100.0, **values, **changes})


@pytest.mark.parametrize(
    ("changes", "violates"),
    [
        ({}, False),
        ({"ttft_s": 0.5, "tpot_s": 0.1}, False),
        ({"ttft_s": 0.51}, True),
        ({"tpot_s": 0.11}, True),
        ({"tpot_s": math.nan}, False),
        ({"outcome": "timeout"}, True),
    ],
)
def test_an_objective_is_violated_beyond_its_limit_or_by_failure(changes: dict[str, Any], violates: bool) -> None:
    assert served(**changes).violates(SLO) == violates


def test_the_summary_is_what_one_would_work_out_by_hand() -> None:
    recorder = Recorder(SLO, None)
    for i in range(5):
        recorder.add(served(i, arrived_unix_s=100.0 + i, ttft_s=0.1 * (i + 1), e2e_s=1.0))
    recorder.add(
        served(5, request=Request(0, 1, 1, cut=True), new_tokens=0, ttft_s=math.nan, tpot_s=math.nan, outcome="timeout", e2e_s=0.5)
    )
    summary = recorder.summary()
    assert (summary["requests"], summary["failed"], summary["cut"], summary["violations"]) == (6, 1, 1, 1)
    # Of 0.1 … 0.5, the P95 lies at rank 0.95 · 4 = 3.8: 0.4 + 0.8 · 0.1.
    assert [summary[f"ttft_p{p}_s"] for p in (50, 95, 99)] == pytest.approx([0.3, 0.48, 0.496])
    assert [summary[f"tpot_p{p}_s"] for p in (50, 95, 99)] == pytest.approx([0.05] * 3)
    assert summary["tokens_per_s"] == pytest.approx(25 / 5)
    assert summary["slo"] == {"ttft_s": 0.5, "tpot_s": 0.1}


def test_the_figures_of_no_request_are_none() -> None:
    summary = Recorder(SLO, None).summary()
    assert (summary["requests"], summary["ttft_p50_s"], summary["send_lag_p99_s"], summary["tokens_per_s"]) == (0, None, None, None)


def test_what_is_added_is_what_is_read(tmp_path: Path) -> None:
    with Recorder(SLO, tmp_path / "serving.2.h5") as recorder:
        recorder.add(served(3, outcome="HTTP 500: " + "x" * 99, new_tokens=2, tpot_s=math.nan))
    recorder.refuse_losses()
    row = Run(tmp_path / "serving.2.h5").serving_requests.iloc[0]
    assert (row["request"], row["prompt_tokens"], row["output_tokens"], row["new_tokens"]) == (3, 10, 5, 2)
    assert (row["time_s"], row["ttft_s"], row["e2e_s"], row["send_lag_s"]) == (100.0, 0.1, 0.3, 0.001)
    assert math.isnan(row["tpot_s"]) and row["violates_slo"] and not row["ok"]
    assert row["outcome"].startswith("HTTP 500: xxx") and row["outcome"].endswith("…")
    assert row["attempt"] == 2


def test_a_record_that_lost_requests_is_not_passed_off_as_whole(tmp_path: Path) -> None:
    with Recorder(SLO, tmp_path / "out.h5") as recorder:
        (writer,) = (child for child in psutil.Process().children() if "rose_hpc.metrics.writer" in child.cmdline())
        writer.kill()
        end_s = time.monotonic() + WAIT_S
        while recorder.fault is None and time.monotonic() < end_s:
            time.sleep(0.02)
        recorder.add(served())
    with pytest.raises(RunFailed, match="incomplete"):
        recorder.refuse_losses()
