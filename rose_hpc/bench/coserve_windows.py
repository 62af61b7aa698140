"""One window of `rose-hpc bench coserve`: a mode over a segment, and what it cost whom.

switch ─▶ both loads begin together ─▶ users answered, and the span over ─▶ rollouts aborted, their tokens counted ─▶ rest
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from rose_hpc.bench.coserve_engines import ROLLOUT_CONCURRENCY, Bench
from rose_hpc.bench.coserve_load import Harvest, RolloutLoad, serve
from rose_hpc.bench.coserve_plan import GATED, Window
from rose_hpc.coserve.device import cpu_seconds
from rose_hpc.coserve.gate_stats import read_gate_stats
from rose_hpc.errors import RunFailed
from rose_hpc.traffic.record import Served
from rose_hpc.traffic.trace import Request

REST_S = 0.2  # between windows, for both engines to come to rest
LONGEST_WINDOW = 8.0  # times its span: users of an overloaded window wait


@dataclass(frozen=True)
class Measured:
    """What one window gave. begin_s, seconds: of CLOCK_MONOTONIC, until the rollouts were told to end.

    serving_cpu_s, rollout_cpu_s: of the device; the latter of both rollout engines, the idle one included. late_steps, reactions: what
    the gate's histograms gained (coserve/reaction.py); empty without a gate.
    """

    window: Window
    begin_s: float
    seconds: float
    served: Sequence[Served]
    serving_cpu_s: float
    rollout_cpu_s: float
    rollout_tokens: int
    late_steps: Sequence[int] = ()
    reactions: Sequence[int] = ()


async def measure(bench: Bench, window: Window, requests: Sequence[Request], span_s: float, scratch: Path, seed: int) -> Measured:
    """Run one window. scratch: a folder. Raises RunFailed when it takes longer than LONGEST_WINDOW spans, or an engine fails."""
    mode = window.mode
    serving, rollouts = bench.serving_pids, bench.rollout_pids()
    try:
        async with _load(bench, window, seed) as harvest:
            counted = _gate(bench, window)
            begin_s, marks = time.monotonic(), (cpu_seconds(serving), cpu_seconds(rollouts))
            async with asyncio.timeout(LONGEST_WINDOW * span_s + 60):
                users = serve(bench.url, requests if mode.serving else (), scratch / "segment.jsonl", seed)
                served, _ = await asyncio.gather(users, asyncio.sleep(span_s))
            seconds, ends = time.monotonic() - begin_s, (cpu_seconds(serving), cpu_seconds(rollouts))
            late_steps, reactions = (_gained(*pair) for pair in zip(counted, _gate(bench, window), strict=True))
    except TimeoutError as error:
        raise RunFailed(f"a window of mode {mode.name} did not end", expected=f"{span_s:g} s and the answers in flight") from error
    await asyncio.sleep(REST_S)
    return Measured(window, begin_s, seconds, served, ends[0] - marks[0], ends[1] - marks[1], harvest.tokens, late_steps, reactions)


def _gate(bench: Bench, window: Window) -> tuple[Sequence[int], Sequence[int]]:
    stats = read_gate_stats(bench.board) if window.mode.rollout == GATED else None
    return ((), ()) if stats is None else (stats.late_steps, stats.reactions)


def _gained(before: Sequence[int], after: Sequence[int]) -> list[int]:
    return [b - a for a, b in zip(before, after, strict=True)]


@asynccontextmanager
async def _load(bench: Bench, window: Window, seed: int) -> AsyncIterator[Harvest]:
    """Rollouts, where the mode has any."""
    mode = window.mode
    if not mode.rollout:
        yield Harvest()
        return
    load = RolloutLoad(bench.rollouts[mode.rollout], ROLLOUT_CONCURRENCY, mode.long_prompts, seed)
    async with load.flowing() as harvest:
        with bench.confined(mode.rollout) if mode.confined else nullcontext():
            yield harvest  # the requests' end must not have to wait for serving
