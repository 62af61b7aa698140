"""`rose-hpc bench coserve`: what serving notices of rollouts on its device, and what the rollouts harvest, under each mechanism.

    serving engine ─▶ calibration ─▶ rollout engines ─▶ warm-up ─▶ windows of all modes, shuffled ─▶ revocation ─▶ report

Everything runs in one go on this machine, so that the ratios are of one run; single windows are noisy, the pooled ones less so. The
names of the report's fields are an interface. Whatever ends it, its processes, groups and files go with it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rose_hpc.bench.coserve_calibration import Calibration, calibrate
from rose_hpc.bench.coserve_engines import SERVING, Bench, Cores, choose_cores, rollout_engines, serving_engine
from rose_hpc.bench.coserve_plan import MODES, Window, cut, fit_load, windows
from rose_hpc.bench.coserve_profile import profile
from rose_hpc.bench.coserve_report import summarize
from rose_hpc.bench.coserve_revoke import revoke
from rose_hpc.bench.coserve_windows import Measured, measure
from rose_hpc.config import TrafficConfig
from rose_hpc.errors import ConfigError
from rose_hpc.traffic.trace import Request, read_traffic
from rose_hpc.weights.arena_home import ArenaHome

ARENA_ROOT = Path("/dev/shm")
LENGTH_SCALE = 0.25  # of a trace's prompts and outputs: its longest request then fits the small model
MOST_REQUESTS = 8000  # of a trace
REQUESTS = 1050  # per mode, without --seconds
SEGMENT_S = 15.0
ROLLOUTS_ALONE_FRAC = 0.5  # of a segment: a rate without users is measured sooner
WARM_UP_S, WARM_UP_REQUESTS = 3.0, 12
PROFILE_S, PROFILE_REQUESTS = 5.0, 40  # of users, for interference


@dataclass(frozen=True)
class CoserveOptions:
    """trace: file, or None for synthetic bursts; seconds: of each mode, None: as long as REQUESTS take; seed: of all that is drawn.

    profile: measure step times, not modes.
    """

    trace: Path | None
    seconds: float | None
    seed: int
    profile: bool = False


def run(options: CoserveOptions) -> dict[str, Any]:
    """The report. Raises EnvironmentFault where the machine lacks something, ConfigError for the trace, before anything has started."""
    requests, cores, everywhere = read_requests(options), choose_cores(), os.sched_getaffinity(0)
    started_s = time.monotonic()
    os.sched_setaffinity(0, cores.others)
    try:
        with ArenaHome(ARENA_ROOT) as home:
            report = asyncio.run(_main(options, requests, cores, home.path))
    except asyncio.CancelledError:  # by SIGTERM
        sys.exit(128 + signal.SIGTERM)
    finally:
        os.sched_setaffinity(0, everywhere)
    return report | {"wall_s": time.monotonic() - started_s}


def read_requests(options: CoserveOptions) -> list[Request]:
    """The trace, lengths scaled and cut to the model's context. Raises ConfigError: fewer than two requests."""
    traffic = TrafficConfig(trace=options.trace, length_scale=LENGTH_SCALE, seed=options.seed)
    requests = list(islice(read_traffic(traffic)(SERVING.max_model_len), MOST_REQUESTS))
    if len(requests) < 2:
        raise ConfigError("the trace is too short to be scaled to a load", got=f"{len(requests)} requests", expected="two or more")
    return requests


async def _main(options: CoserveOptions, requests: list[Request], cores: Cores, folder: Path) -> dict[str, Any]:
    """SIGTERM unwinds as SIGINT does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await _measure(options, requests, cores, folder)


async def _measure(options: CoserveOptions, requests: list[Request], cores: Cores, folder: Path) -> dict[str, Any]:
    say("starting the serving engine")
    async with serving_engine(folder, cores, options.seed) as bench:
        say("calibrating: serving alone")
        calibration = await calibrate(bench, requests, folder, options.seed)
        if options.profile:
            return await _profile(bench, calibration, requests, folder, options.seed)
        segments, segment_s = _segments(options, requests, calibration)
        say(f"{1000 * calibration.request_cpu_s:.0f} ms of the device per request; starting the rollout engines")
        async with rollout_engines(bench, folder, calibration.slo, options.seed):
            measured = await _windows(bench, segments, segment_s, folder, options.seed)
            say("revoking")
            revoked = await revoke(bench, fit_load(segments[0], WARM_UP_S), folder, options.seed)
    report = summarize(measured)
    report["full"] |= revoked
    return report | {"conditions": _conditions(options, calibration, segments, segment_s) | {"quota": bench.quota}}


async def _profile(bench: Bench, calibration: Calibration, requests: list[Request], folder: Path, seed: int) -> dict[str, Any]:
    say("starting the rollout engines")
    async with rollout_engines(bench, folder, calibration.slo, seed):
        say("measuring steps")
        return {"profile": await profile(bench, fit_load(requests[:PROFILE_REQUESTS], PROFILE_S), folder, seed)}


def _segments(options: CoserveOptions, requests: list[Request], calibration: Calibration) -> tuple[list[list[Request]], float]:
    """As many of the trace's first requests as the time is for, or as there are, at the rate of the wanted load; and a segment's span."""
    wanted = REQUESTS if options.seconds is None else calibration.requests(options.seconds)
    chosen = requests[:wanted]
    span_s = calibration.span_s(len(chosen))
    count = max(1, round(span_s / SEGMENT_S))
    return cut(fit_load(chosen, span_s), span_s / count, count), span_s / count


async def _windows(bench: Bench, segments: Sequence[Sequence[Request]], segment_s: float, folder: Path, seed: int) -> list[Measured]:
    """All windows, after one of each kind of load that does not count."""
    for mode in MODES:
        warm_up = fit_load(segments[0][:WARM_UP_REQUESTS], WARM_UP_S)
        await measure(bench, Window(mode, 0), warm_up, WARM_UP_S, folder, seed)
    found, plan = [], windows(len(segments), seed)
    for number, window in enumerate(plan, 1):
        span_s = segment_s if window.mode.serving else ROLLOUTS_ALONE_FRAC * segment_s
        measured = await measure(bench, window, segments[window.segment], span_s, folder, seed + number)
        found.append(measured)
        say(f"{number} of {len(plan)}: {window.mode.name}, {len(measured.served)} requests, {measured.rollout_tokens} rollout tokens")
    return found


def _conditions(
    options: CoserveOptions, calibration: Calibration, segments: Sequence[Sequence[Request]], segment_s: float
) -> dict[str, Any]:
    return {
        "trace": "synthetic" if options.trace is None else options.trace.name,
        "seed": options.seed,
        "length_scale": LENGTH_SCALE if options.trace is not None else 1.0,
        "requests": sum(len(s) for s in segments),
        "segments": len(segments),
        "segment_s": segment_s,
        "request_cpu_s": calibration.request_cpu_s,
        "slo": calibration.slo.model_dump(),
    }


def say(text: str) -> None:
    """A line of progress."""
    print(f"{text} …", file=sys.stderr, flush=True)
