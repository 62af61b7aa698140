"""The report of `rose-hpc bench coserve` as text: one row per mode, latencies over those of serving alone."""

from __future__ import annotations

from typing import Any

from rose_hpc.bench.coserve_plan import MODES
from rose_hpc.bench.table import aligned

HEAD = ["mode", "requests", "failed", "TTFT P50", "P95", "P99", "TPOT P50", "P99", "violations", "serving", "rollout tok/s", "harvested"]
LATENCIES = ("ttft_p50_s", "ttft_p95_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s")


def render(report: dict[str, Any]) -> str:
    """Plain text, at most 140 columns."""
    rows = [_row(mode.name, report[mode.name], report["alone_max"]) for mode in MODES if mode.name in report]
    alone, full, gate = report["alone_max"], report["full"], report["gate_only"]
    milliseconds = ", ".join(f"{name.removesuffix('_s')} {_ms(alone[name])}" for name in LATENCIES)
    return "\n".join(
        [
            "Both engines on one core; latencies over the larger of the two halves of alone; serving: its share of the core",
            aligned([HEAD, *rows]),
            f"alone: {milliseconds}",
            f"gate only: {gate['closings']} closings, P99 {gate['reaction_steps_p99']} late steps",
            f"revoked: idle after {full['revoke_to_idle_s']:.2f} s, memory back after {full['memory_back_s']:.2f} s",
            f"{report['wall_s']:.0f} s",
        ]
    )


def _row(name: str, row: dict[str, Any], alone: dict[str, float | None]) -> list[str]:
    ratios = [_over(row.get(field), alone[field]) for field in LATENCIES]
    counts = [str(row["requests"]), str(row["failed_requests"])] if row["requests"] else ["", ""]
    rate = f"{row['rollout_tokens_per_s']:.0f}" if "rollout_tokens_per_s" in row else ""
    harvested = f"{row['harvested_frac']:.2f}" if "harvested_frac" in row else ""
    return [name, *counts, *ratios, str(row.get("slo_violations", "")), f"{100 * row['serving_cpu_share']:.0f} %", rate, harvested]


def _over(value: float | None, base: float | None) -> str:
    return "" if value is None or not base else f"× {value / base:.2f}"


def _ms(value: float | None) -> str:
    return "none" if value is None else f"{1000 * value:.1f} ms"
