"""The open-loop client: every request is sent when it is due, whatever became of the others.

    waiting for the server ──healthy──▶ sending ──limit, or end of the trace──▶ finishing ──▶ done
                 │                         └──────────── stop ───────────────▶ draining ───┘ ▲
                 └──────────────────────────────────────── stop ─────────────────────────────┘

finishing: requests in flight have their own deadlines. draining: and none has longer than the drain deadline.

Invariants
- Times count from the scheduled arrival, not from the sending: a client that is late, or a server that does not accept, is not
  allowed to hide the wait. How late the client was is recorded beside it.
- Every request that was sent is recorded exactly once; those that fail or take too long too.
- No request finds its prompt, or the beginning of it, in the server's prefix cache: prompts are random, each with a salt of its own.

    python -m rose_hpc.traffic.replay SPEC.json       for a launcher; dies with it
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from rose_hpc.config import read_spec
from rose_hpc.errors import RoseError
from rose_hpc.lifeline import die_with_parent, report_failure
from rose_hpc.traffic.client import (
    RequestFailed,
    ServedModel,
    TokenTimes,
    await_model,
    complete,
    completion_body,
    describe,
    open_session,
    parse_target,
)
from rose_hpc.traffic.record import OK, TIMEOUT, Recorder, Served
from rose_hpc.traffic.spec import ReplaySpec
from rose_hpc.traffic.trace import Request, read_traffic


class Replay:
    """One replay. `run` it once; `stop` may be called at any time, from the event loop's thread."""

    def __init__(self, spec: ReplaySpec, recorder: Recorder) -> None:
        """Reads the trace. Raises ConfigError: no such trace, or an address that cannot be used."""
        self._spec, self._recorder = spec, recorder
        self._target, self._fit = parse_target(spec.url), read_traffic(spec.traffic)
        self._stopped = asyncio.Event()
        self._drain_end_s = math.inf
        self._deadlines: set[asyncio.Timeout] = set()
        self._salt = secrets.token_hex(8)  # not seeded: a second replay of the same seed must not profit from the first
        self._session: aiohttp.ClientSession
        self._start_s = self._start_unix_s = math.nan

    def stop(self) -> None:
        """Send nothing more; what is in flight has the drain deadline to finish."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._drain_end_s = asyncio.get_running_loop().time() + self._spec.drain_deadline_s
        for deadline in self._deadlines:
            when_s = deadline.when()
            if when_s is not None and not deadline.expired():
                deadline.reschedule(min(when_s, self._drain_end_s))

    async def run(self) -> None:
        """Wait for the server, send, wait for the answers. Raises EnvironmentFault where the server is not healthy in time."""
        async with open_session(self._target) as self._session:
            model = await self._model()
            if model is not None:
                await self._send_all(model)

    async def _model(self) -> ServedModel | None:
        """What is served, once it is; None where we are told to stop before."""
        answer = asyncio.create_task(await_model(self._session, self._spec.start_deadline_s))
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait((answer, stopped), return_when=asyncio.FIRST_COMPLETED)
        finally:  # a wait that is cancelled leaves its tasks alone
            answer.cancel()
            stopped.cancel()
            await asyncio.gather(answer, stopped, return_exceptions=True)
        return None if answer.cancelled() else answer.result()

    async def _send_all(self, model: ServedModel) -> None:
        requests = self._within_limits(self._fit(model.max_total_tokens))
        self._start_s, self._start_unix_s = asyncio.get_running_loop().time(), time.time()
        async with asyncio.TaskGroup() as flights:
            for index, request in requests:
                body = self._body(model, index, request)  # before it is due: a long prompt takes milliseconds
                if await self._stopped_before(self._start_s + request.arrival_s):
                    return
                flights.create_task(self._send(index, request, body))

    def _within_limits(self, requests: Iterable[Request]) -> Iterator[tuple[int, Request]]:
        for index, request in enumerate(requests):
            if index == self._spec.requests or (self._spec.duration_s is not None and request.arrival_s > self._spec.duration_s):
                return
            yield index, request

    def _body(self, model: ServedModel, index: int, request: Request) -> bytes:
        rng = np.random.default_rng((self._spec.traffic.seed, index))
        prompt = rng.integers(self._spec.prompt_ids, size=request.prompt_tokens).tolist()
        return completion_body(model.name, prompt, request.output_tokens, f"{self._salt}-{index}")

    async def _stopped_before(self, due_s: float) -> bool:
        """Wait until due_s; whether we were told to stop instead, or the record was lost, without which sending is in vain."""
        if self._recorder.fault is not None:
            self.stop()
        try:
            async with asyncio.timeout_at(due_s):
                await self._stopped.wait()
        except TimeoutError:
            return False
        return True

    async def _send(self, index: int, request: Request, body: bytes) -> None:
        loop, times = asyncio.get_running_loop(), TokenTimes()
        due_s = self._start_s + request.arrival_s
        send_lag_s = loop.time() - due_s
        outcome = await self._outcome(request, body, times, due_s + self._spec.request_deadline_s)
        self._recorder.add(
            Served(
                index,
                request,
                arrived_unix_s=self._start_unix_s + request.arrival_s,
                new_tokens=times.count,
                ttft_s=times.first_s - due_s,
                tpot_s=times.tpot_s,
                e2e_s=loop.time() - due_s,
                send_lag_s=send_lag_s,
                outcome=outcome,
            )
        )

    async def _outcome(self, request: Request, body: bytes, times: TokenTimes, deadline_s: float) -> str:
        deadline = asyncio.timeout_at(min(deadline_s, self._drain_end_s))
        try:
            async with deadline:
                self._deadlines.add(deadline)
                await complete(self._session, body, times)
        except TimeoutError:
            return TIMEOUT
        except (RequestFailed, aiohttp.ClientError, OSError, ValueError) as error:
            return describe(error)
        finally:
            self._deadlines.discard(deadline)
        return OK if times.count == request.output_tokens else f"{times.count} of {request.output_tokens} tokens"


async def run_replay(spec: ReplaySpec) -> dict[str, Any]:
    """Run one replay until its limit, its end, SIGINT or SIGTERM; the summary of its requests.

    Raises UsageError before anything is sent (address, trace, file that exists, server not healthy), RunFailed where the record is
    incomplete.
    """
    recorder = Recorder(spec.slo, spec.out)
    replay = Replay(spec, recorder)
    with recorder, _stopping_on_signals(replay.stop):
        await replay.run()
    recorder.refuse_losses()
    return recorder.summary()


@contextmanager
def _stopping_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def main() -> int:
    """Entry point of the process; the exit status."""
    die_with_parent()
    try:
        print(json.dumps(asyncio.run(run_replay(read_spec(Path(sys.argv[1]), ReplaySpec)))), flush=True)
    except RoseError as error:
        return report_failure(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
