"""The serving engine alone, before anything is compared: how fast its requests must come for the wanted load, and what it promises.

requests spread over the trace, none in a burst ──▶ median TTFT and TPOT ──▶ the SLO that the gate protects
the trace's first requests, as they come ────────▶ device time per request (a burst shares its steps) ──▶ requests per second
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rose_hpc.bench.coserve_engines import Bench
from rose_hpc.bench.coserve_plan import ALONE, Window, fit_load
from rose_hpc.bench.coserve_windows import Measured, measure
from rose_hpc.config import SloConfig
from rose_hpc.errors import RunFailed
from rose_hpc.metrics.serving import percentile_or_none
from rose_hpc.traffic.trace import Request

BUSY_FRAC = 0.3  # of the device, by serving
SAMPLE = 100  # requests
FIRST_GUESS_S = 0.05  # of the device per request
LEAST_CPU_S = 0.001
SLO_PERCENT = 50  # the gate protects what the median request has that meets no burst and no rollout


@dataclass(frozen=True)
class Calibration:
    """request_cpu_s: device time of a request in the mix; slo: what the gate is told to protect."""

    request_cpu_s: float
    slo: SloConfig

    def span_s(self, requests: int) -> float:
        """In which so many requests keep the device BUSY_FRAC busy."""
        return requests * self.request_cpu_s / BUSY_FRAC

    def requests(self, span_s: float) -> int:
        """How many requests keep the device BUSY_FRAC busy for so long."""
        return max(1, round(span_s * BUSY_FRAC / self.request_cpu_s))


async def calibrate(bench: Bench, requests: Sequence[Request], scratch: Path, seed: int) -> Calibration:
    """Takes about a minute. Raises RunFailed when serving alone fails a request."""
    spread = requests[:: max(1, len(requests) // SAMPLE)][:SAMPLE]
    gap_s = FIRST_GUESS_S / BUSY_FRAC
    evenly = [replace(request, arrival_s=i * gap_s) for i, request in enumerate(spread)]
    calm = await _alone(bench, evenly, len(evenly) * gap_s, scratch, seed)
    span_s = SAMPLE * calm.serving_cpu_s / len(evenly) / BUSY_FRAC
    first = fit_load(requests[:SAMPLE], span_s)
    bursty = await _alone(bench, first, span_s, scratch, seed)
    return Calibration(max(bursty.serving_cpu_s / len(first), LEAST_CPU_S), _slo(calm))


async def _alone(bench: Bench, requests: Sequence[Request], span_s: float, scratch: Path, seed: int) -> Measured:
    return await measure(bench, Window(ALONE, 0), requests, span_s, scratch, seed)


def _slo(measured: Measured) -> SloConfig:
    failed = [s.outcome for s in measured.served if not s.ok]
    if failed:
        raise RunFailed("the serving engine alone fails requests", got=failed[0], expected="an answer to each")
    ttft_s = percentile_or_none([s.ttft_s for s in measured.served], SLO_PERCENT)
    tpot_s = percentile_or_none([s.tpot_s for s in measured.served], SLO_PERCENT)
    if ttft_s is None or tpot_s is None:
        raise RunFailed("no request of the sample has two tokens", expected="a trace with longer outputs")
    return SloConfig(ttft_s=ttft_s, tpot_s=tpot_s)
