"""How fast the device comes back: a rollout engine under the quota, with work, beside serving under load, is revoked.

    t0: the idle class is lifted, its requests are aborted ──KILL_AFTER_S──▶ SIGKILL of its process group
        └─ revoke_to_idle_s: the last time that it used CPU time ─┘   └─ memory_back_s: its memory (PSS) is down to MEMORY_LEFT

CPU time is read in ticks of the kernel (10 ms), memory from /proc/PID/smaps_rollup (proc(5)).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rose_hpc.bench.coserve_engines import ROLLOUT_CONCURRENCY, Bench
from rose_hpc.bench.coserve_load import RolloutLoad, serve
from rose_hpc.bench.coserve_plan import GATED
from rose_hpc.coserve.device import cpu_seconds, workers_of
from rose_hpc.errors import RunFailed
from rose_hpc.traffic.trace import Request

BEFORE_S = 2.0  # of work before the revocation
KILL_AFTER_S = 0.5
WATCHED_S = 5.0  # after the revocation, at most
POLL_S = 0.01
MEMORY_LEFT = 0.02  # of what it held


async def revoke(bench: Bench, requests: Sequence[Request], scratch: Path, seed: int) -> dict[str, Any]:
    """Ends the gated engine. Raises RunFailed when its memory does not come back within WATCHED_S."""
    engine = bench.rollouts[GATED]
    workers, everything = workers_of(engine.pid), [engine.pid, *workers_of(engine.pid)]
    load = RolloutLoad(engine, ROLLOUT_CONCURRENCY, False, seed)
    users = asyncio.create_task(serve(bench.url, requests, scratch / "segment.jsonl", seed))
    try:
        async with load.flowing(to_the_end=False):
            with bench.confined(GATED) as quota:
                await asyncio.sleep(BEFORE_S)
                held_bytes, begin_s = pss_bytes(everything), time.monotonic()
                quota.release(workers)
                end = asyncio.create_task(_end(bench, load))
                times = await _until_gone(workers, everything, MEMORY_LEFT * held_bytes, begin_s)
                await end
        served = await users
    finally:
        users.cancel()
        await asyncio.gather(users, return_exceptions=True)
    return times | {"revoked_bytes": held_bytes, "revoke_failed_requests": sum(not s.ok for s in served)}


async def _end(bench: Bench, load: RolloutLoad) -> None:
    abort = asyncio.create_task(load.abort())
    await asyncio.sleep(KILL_AFTER_S)
    bench.kill(GATED)
    abort.cancel()
    await asyncio.gather(abort, return_exceptions=True)


async def _until_gone(workers: Sequence[int], everything: Sequence[int], left_bytes: float, begin_s: float) -> dict[str, float]:
    last_use_s, used = begin_s, {pid: cpu_seconds([pid]) for pid in workers}
    while time.monotonic() < begin_s + WATCHED_S:
        await asyncio.sleep(POLL_S)
        now_s, before = time.monotonic(), used
        used = {pid: cpu_seconds([pid]) for pid in workers}
        if any(used[pid] > before[pid] for pid in workers):
            last_use_s = now_s
        if pss_bytes(everything) <= left_bytes:
            return {"revoke_to_idle_s": last_use_s - begin_s, "memory_back_s": time.monotonic() - begin_s}
    raise RunFailed("a revoked rollout engine keeps its memory", got=f"{pss_bytes(everything)} bytes after {WATCHED_S:g} s")


def pss_bytes(pids: Iterable[int]) -> int:
    """Proportional set size of these processes; those that are gone hold nothing."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):  # gone, or about to be
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total
