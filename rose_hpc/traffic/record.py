"""What became of each request: one row per request in an HDF5 file, and the figures over all of them.

The file is written by a process of its own (metrics/writer.py), so that a slow disk never delays a request, and so that SIGKILL of
the client loses at most its last second.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rose_hpc.config import SloConfig
from rose_hpc.errors import RunFailed
from rose_hpc.metrics.files import attempt_of
from rose_hpc.metrics.serving import percentile_or_none, percentiles
from rose_hpc.metrics.writer import MetricsClient
from rose_hpc.traffic.trace import Request

OK = "ok"
TIMEOUT = "timeout"
PERCENTS = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Served:
    """One request that ended, well or not. index: in the traffic. Times count from the scheduled arrival; NaN: there was no such token.

    outcome: OK, TIMEOUT, or what went wrong.
    """

    index: int
    request: Request
    arrived_unix_s: float
    new_tokens: int
    ttft_s: float
    tpot_s: float
    e2e_s: float
    send_lag_s: float
    outcome: str

    @property
    def ok(self) -> bool:
        return self.outcome == OK

    def violates(self, slo: SloConfig) -> bool:
        """A request that failed violates every objective."""
        return not self.ok or self.ttft_s > slo.ttft_s or self.tpot_s > slo.tpot_s


class Recorder:
    """Context manager: counts requests and writes them to `path` (None: counts only). Never blocks while requests are added."""

    def __init__(self, slo: SloConfig, path: Path | None) -> None:
        self._slo = slo
        self._writer = None if path is None else MetricsClient(path.parent, attempt_of(path), path)
        self._failed = self._cut = self._violations = self._new_tokens = 0
        self._ttft_s, self._tpot_s, self._send_lag_s = array("d"), array("d"), array("d")
        self._first_arrival_s, self._last_end_s = float("inf"), float("-inf")

    def __enter__(self) -> Recorder:
        """Raises UsageError where the file exists already."""
        if self._writer is not None:
            self._writer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._writer is not None:
            self._writer.close()

    @property
    def fault(self) -> str | None:
        """Why requests are missing from the file; None while none is."""
        if self._writer is None or not (self._writer.failed or self._writer.dropped):
            return None
        return self._writer.failed or f"{self._writer.dropped} requests came faster than they could be written"

    def refuse_losses(self) -> None:
        """Raises RunFailed where requests are missing from the file. Final once the recorder is closed."""
        if self.fault is not None:
            raise RunFailed("the record of the requests is incomplete", got=self.fault, expected="a row for every request")

    def add(self, served: Served) -> None:
        """One request ended."""
        self._count(served)
        if self._writer is not None:
            self._writer.record("serving_requests", **self._row(served))

    def _count(self, served: Served) -> None:
        self._failed += not served.ok
        self._cut += served.request.cut
        self._violations += served.violates(self._slo)
        self._new_tokens += served.new_tokens
        self._ttft_s.append(served.ttft_s)
        self._tpot_s.append(served.tpot_s)
        self._send_lag_s.append(served.send_lag_s)
        self._first_arrival_s = min(self._first_arrival_s, served.arrived_unix_s)
        self._last_end_s = max(self._last_end_s, served.arrived_unix_s + served.e2e_s)

    def _row(self, served: Served) -> dict[str, Any]:
        return {
            "time_s": served.arrived_unix_s,
            "request": served.index,
            "prompt_tokens": served.request.prompt_tokens,
            "output_tokens": served.request.output_tokens,
            "new_tokens": served.new_tokens,
            "ttft_s": served.ttft_s,
            "tpot_s": served.tpot_s,
            "e2e_s": served.e2e_s,
            "send_lag_s": served.send_lag_s,
            "ok": served.ok,
            "violates_slo": served.violates(self._slo),
            "outcome": served.outcome,
        }

    def summary(self) -> dict[str, Any]:
        """All requests in a few figures of plain Python types; None where no request has one. cut: they were too long for the model.

        tokens_per_s: tokens received, from the first arrival to the end of the last response.
        """
        requests, span_s = len(self._ttft_s), self._last_end_s - self._first_arrival_s
        return {
            "requests": requests,
            "failed": self._failed,
            "cut": self._cut,
            **percentiles("ttft", self._ttft_s, PERCENTS),
            **percentiles("tpot", self._tpot_s, PERCENTS),
            "violations": self._violations,
            "slo": self._slo.model_dump(),
            "send_lag_p99_s": percentile_or_none(self._send_lag_s, 99),
            "tokens_per_s": self._new_tokens / span_s if requests and span_s > 0 else None,
        }
