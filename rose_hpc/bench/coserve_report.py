"""The figures of `rose-hpc bench coserve` from its windows, pooled per mode. Pure.

    harvested_frac  = rollout tok/s ÷ (rollout alone tok/s with the same prompts × (1 − serving's share of the device))
    slo_violations  = requests that failed, or took over 2 × the P99 of alone to their first token, or per token after it
    alone_max       = of each latency the larger of the two halves of the alone windows, which met the same requests

Times to the first token count from the scheduled arrival. TPOT is the mean per request, of those with two tokens or more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rose_hpc.bench.coserve_plan import ALONE, ALONE_HALVES, GATED, MODES, Mode
from rose_hpc.bench.coserve_windows import Measured
from rose_hpc.coserve.reaction import EDGES_S, quantile
from rose_hpc.metrics.serving import percentile_or_none, percentiles
from rose_hpc.traffic.record import Served

PERCENTS = (50, 95, 99)
VIOLATION = 2.0  # times the P99 of alone


def summarize(measured: Sequence[Measured]) -> dict[str, Any]:
    """One object per mode, and `alone_max`."""
    by_mode = {mode: [m for m in measured if m.window.mode == mode] for mode in MODES}
    alone = _served(by_mode[ALONE])
    limits = _times_p99([s.ttft_s for s in alone]), _times_p99([s.tpot_s for s in alone])
    base = {mode.long_prompts: _token_rate(found) for mode, found in by_mode.items() if not mode.serving}
    report: dict[str, Any] = {mode.name: _mode(mode, found, limits, base) for mode, found in by_mode.items() if found}
    halves = [_latencies(_served(m for m in by_mode[ALONE] if m.window.half == half)) for half in range(ALONE_HALVES)]
    report["alone_max"] = {name: _larger([half[name] for half in halves]) for name in halves[0]}
    for mode, found in by_mode.items():
        if mode.serving and mode.rollout == GATED and found:
            report[mode.name] |= reaction(found)
    return report


def _mode(mode: Mode, found: Sequence[Measured], limits: tuple[float, float], base: dict[bool, float]) -> dict[str, Any]:
    seconds = sum(m.seconds for m in found)
    served, share = _served(found), sum(m.serving_cpu_s for m in found) / seconds
    row: dict[str, Any] = {"seconds": seconds, "windows": len(found), "requests": len(served)}
    row["failed_requests"] = sum(not s.ok for s in served)
    if mode.serving:
        row |= _latencies(served)
        row["slo_violations"] = sum(_violates(s, limits) for s in served)
    row |= {"serving_cpu_share": share, "rollout_cpu_share": sum(m.rollout_cpu_s for m in found) / seconds}
    if mode.rollout:
        rate, alone_rate = _token_rate(found), base.get(mode.long_prompts, 0.0)
        row["rollout_tokens_per_s"] = rate
        if mode.serving and alone_rate > 0 and share < 1:
            row["harvested_frac"] = rate / (alone_rate * (1 - share))
    return row


def _served(found: Iterable[Measured]) -> list[Served]:
    return [s for m in found for s in m.served]


def _latencies(served: Sequence[Served]) -> dict[str, float | None]:
    ttft, tpot = [s.ttft_s for s in served], [s.tpot_s for s in served]
    return percentiles("ttft", ttft, PERCENTS) | percentiles("tpot", tpot, PERCENTS)


def _times_p99(values: Sequence[float]) -> float:
    p99 = percentile_or_none(values, 99)
    return float("inf") if p99 is None else VIOLATION * p99


def _violates(served: Served, limits: tuple[float, float]) -> bool:
    return not served.ok or served.ttft_s > limits[0] or served.tpot_s > limits[1]


def _token_rate(found: Sequence[Measured]) -> float:
    seconds = sum(m.seconds for m in found)
    return sum(m.rollout_tokens for m in found) / seconds if seconds > 0 else 0.0


def _larger(values: Sequence[float | None]) -> float | None:
    return max((v for v in values if v is not None), default=None)


def reaction(found: Sequence[Measured]) -> dict[str, Any]:
    """Over the bursts at which the gate closed beside a step. reaction_p99_s: upper edge of its bucket; None: there is none."""
    late = [sum(counts) for counts in zip(*(m.late_steps for m in found), strict=True)]
    times = [sum(counts) for counts in zip(*(m.reactions for m in found), strict=True)]
    bucket = quantile(times, 0.99)
    return {
        "closings": sum(late),
        "late_steps": late,
        "reaction_steps_p99": quantile(late, 0.99),
        "reaction_p99_s": EDGES_S[bucket] if any(times) and bucket < len(EDGES_S) else None,
    }
