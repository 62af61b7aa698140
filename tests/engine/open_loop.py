"""Users of a serving engine who send when they are due, whatever becomes of the others: the replay of rose_hpc/traffic, in a thread.

with OpenLoop(url, traffic) as users: …        users.between(begin, end): what became of the requests that arrived then
"""

from __future__ import annotations

import asyncio
import threading
import time

from rose_hpc.bench.coserve_load import Rows
from rose_hpc.config import TrafficConfig
from rose_hpc.metrics.serving import percentile_or_none
from rose_hpc.traffic.record import Served
from rose_hpc.traffic.replay import Replay
from rose_hpc.traffic.spec import ReplaySpec

CALM = TrafficConfig(requests_per_s=4.0, burstiness_cv=1.5, prompt_tokens=(30, 150), output_tokens=(10, 40), seed=1)
JOIN_S = 90.0


class OpenLoop:
    """Context manager: sends inside of it; leaving waits for what is in flight. Raises what the replay raised."""

    def __init__(self, url: str, traffic: TrafficConfig = CALM) -> None:
        self._spec = ReplaySpec(url=url, traffic=traffic, request_deadline_s=60)
        self._rows = Rows()
        self._loop = asyncio.new_event_loop()
        self._replay: Replay | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._send())
        except BaseException as error:  # the edge of the thread: told by __exit__
            self._failure = error
        finally:
            self._loop.close()

    async def _send(self) -> None:
        self._replay = Replay(self._spec, self._rows)
        await self._replay.run()

    def __enter__(self) -> OpenLoop:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive() and self._replay is not None:
            self._loop.call_soon_threadsafe(self._replay.stop)
        self._thread.join(JOIN_S)
        assert not self._thread.is_alive(), "requests are still in flight"
        if self._failure is not None:
            raise self._failure

    @property
    def served(self) -> list[Served]:
        """Every request that has ended so far."""
        return list(self._rows.served)

    def between(self, begin_unix_s: float, end_unix_s: float) -> list[Served]:
        """Those that arrived in this span, by time.time(), and have ended."""
        return [s for s in self.served if begin_unix_s <= s.arrived_unix_s < end_unix_s]

    def during(self, seconds: float) -> list[Served]:
        """Those that arrive in the next so many seconds; returns once all of them have ended."""
        begin_s = time.time()
        time.sleep(seconds)
        end_s = time.time()
        deadline_s = time.monotonic() + JOIN_S
        while self._owes(end_s) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return self.between(begin_s, end_s)

    def _owes(self, end_unix_s: float) -> bool:
        """Whether a request that arrived before may be in flight: they are numbered as they come, so that a gap is one."""
        served = self.served
        known = {s.index for s in served}
        after = [s.index for s in served if s.arrived_unix_s >= end_unix_s]
        return not after or any(index not in known for index in range(min(after)))


def p99s(served: list[Served]) -> tuple[float, float]:
    """P99 of TTFT and of TPOT, seconds."""
    ttft, tpot = percentile_or_none([s.ttft_s for s in served], 99), percentile_or_none([s.tpot_s for s in served], 99)
    assert ttft is not None and tpot is not None, "no request of the span has two tokens"
    return ttft, tpot
