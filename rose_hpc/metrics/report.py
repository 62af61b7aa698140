"""How a run's summary is shown: a rich renderable for terminals, the summary itself for programs. It computes no figure of its own
but the shares of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rose_hpc.metrics.run import Run

CURVE_CELLS = 60  # a longer run is averaged into this many cells
_BARS = "▁▂▃▄▅▆▇█"
_GAP = "·"  # a cell without any value


def report_json(run: Run) -> dict[str, Any]:
    """The summary, for `--json`."""
    return run.summary()


def render_text(run: Run) -> RenderableType:
    """Summary of the training and of the serving side, learning curve and shares of time."""
    parts: list[RenderableType] = [_summary_table(run)]
    if len(run.steps):
        parts.append(Text(f"success by step  {sparkline(run.steps['success_frac'].to_numpy())}"))
        parts.append(Text("time  " + " · ".join(f"{name} {share:.0%}" for name, share in time_shares(run.steps).items())))
    return Group(*parts)


def sparkline(values: Sequence[float] | np.ndarray[Any, Any], cells: int = CURVE_CELLS) -> str:
    """One character per cell for fractions in [0, 1]: the mean of the cell's values, NaN left out."""
    chunks = np.array_split(np.asarray(values, float), min(cells, len(values))) if len(values) else []
    return "".join(_bar(chunk[~np.isnan(chunk)]) for chunk in chunks)


def _bar(known: np.ndarray[Any, Any]) -> str:
    return _BARS[round(float(np.clip(known.mean(), 0, 1)) * (len(_BARS) - 1))] if len(known) else _GAP


def time_shares(steps: pd.DataFrame) -> dict[str, float]:
    """Fractions of the steps' time; "other" is what no column accounts for. Empty where no time was recorded."""
    total_s = float(steps["step_s"].sum())
    if total_s <= 0:
        return {}
    shares = {name: float(steps[f"{name}_s"].sum()) / total_s for name in ("rollout", "train", "sync")}
    return {**shares, "other": max(0.0, 1 - sum(shares.values()))}


def _summary_table(run: Run) -> Table:
    table = Table(title=f"run {run.name}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    summary = run.summary()
    lines = _training_lines(summary) if run.trains else []
    if run.has_serving:
        lines += _serving_lines(summary["serving"]) + _device_lines(run.device_means())
    for label, value in lines:
        table.add_row(label, value)
    return table


def _training_lines(summary: dict[str, Any]) -> list[tuple[str, str]]:
    tokens, weights = summary["rollout_tokens"], summary["weights"]
    steps = f"{summary['steps']}, of which {summary['skipped_steps']} skipped"
    return [
        ("steps", steps if summary["complete"] else f"{steps}; not complete"),
        ("success", f"{_percent(summary['success_first10'])} → {_percent(summary['success_last10'])} (first and last 10 steps)"),
        ("rollout tokens", f"{tokens['dedicated']:,} dedicated, {tokens['opportunistic']:,} opportunistic"),
        ("weights", _verdict(weights)),
        ("on the wire", _wire(weights["wire_bytes"], weights["image_bytes"])),
        ("|trainer − engine|", "–" if (diff := summary["logprob_diff_mean"]) is None else f"{diff:.2e} nat per token"),
        ("wall time", f"{summary['wall_s']:,.1f} s"),
    ]


def _serving_lines(serving: dict[str, Any]) -> list[tuple[str, str]]:
    counts = f"{serving['requests']:,}, of which {serving['failed_requests']:,} failed and {serving['slo_violations']:,} violated the SLO"
    times = [(kind, _milliseconds(serving[f"{kind}_p50_s"]), _milliseconds(serving[f"{kind}_p99_s"])) for kind in ("ttft", "tpot")]
    return [("serving requests", counts), *((f"serving {kind.upper()}", f"{p50} median, {p99} P99") for kind, p50, p99 in times)]


def _device_lines(means: pd.DataFrame) -> list[tuple[str, str]]:
    return [(f"device {row.Index}", _device_line(row)) for row in means.itertuples()]


def _device_line(row: Any) -> str:
    shares = (
        f"serving {_percent(row.serving_busy_frac)}, rollouts {_percent(row.rollout_busy_frac)}, gate held {_percent(row.gate_held_frac)}"
    )
    return f"{shares}; {row.quota}" if row.quota else shares


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:,.1f} ms"


def _percent(fraction: float | None) -> str:
    return "–" if fraction is None or np.isnan(fraction) else f"{fraction:.1%}"


def _verdict(weights: dict[str, int]) -> str:
    text = f"{weights['verified']} of {weights['versions']} versions verified at every receiver"
    return f"{text}, {weights['probed']} only probed: packed weights" if weights["probed"] else text


def _wire(wire_bytes: int, image_bytes: int) -> str:
    text = f"{wire_bytes / 1e6:,.1f} MB for {image_bytes / 1e6:,.1f} MB of weights"
    return f"{text} ({wire_bytes / image_bytes:.1%})" if image_bytes else text
