"""The controller's side of the workers (trainer ranks, relays): who is up, one command at a time each, replies gathered.

A worker polls. It is handed its outstanding command at every poll until it has replied to it, so a command or a poll that got
lost is delivered again; a worker is sequential, so a second delivery means that the first never arrived. A reply to anything
but the outstanding command is ignored.

Knows no HTTP (api.py) and does not decide what to command (controller.py).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Collection
from typing import TypeVar

from rose_hpc.errors import RoseError, RunFailed, UsageError
from rose_hpc.messages import Command, Reply, Stop, WorkerFailed, WorkerUp

R = TypeVar("R")


class NoReply(RunFailed):
    """A worker did not answer within the deadline; it may be dead, or be restarted and greet again."""


class _Worker:
    """One worker: its greeting, the command it has yet to answer, and the wake-up of its poll."""

    def __init__(self, hello: WorkerUp) -> None:
        self.hello = hello
        self.outstanding: Command | None = None
        self.answer: asyncio.Future[Reply] | None = None
        self.changed = asyncio.Event()
        self.heard_s = time.monotonic()


class WorkerPool:
    """All workers of one run."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._ids = itertools.count(1)
        self._arrived = asyncio.Event()
        self._failure: RoseError | None = None

    # ── called by the API ──

    def greet(self, worker_id: str, hello: WorkerUp) -> None:
        """A worker is up. Greeting again (its first greeting got no answer) takes nothing away: its command is still outstanding."""
        if (known := self._workers.get(worker_id)) is not None:
            known.hello, known.heard_s = hello, time.monotonic()
        else:
            self._workers[worker_id] = _Worker(hello)
        self._arrived.set()

    async def next_command(self, worker_id: str, wait_s: float) -> Command | None:
        """The worker's outstanding command, waiting up to wait_s for one. KeyError: the worker has not greeted."""
        worker = self._workers[worker_id]
        worker.heard_s = time.monotonic()
        if worker.outstanding is None:
            worker.changed.clear()
            try:
                await asyncio.wait_for(worker.changed.wait(), wait_s)
            except TimeoutError:
                return None
        return worker.outstanding

    def take_reply(self, worker_id: str, call_id: int, reply: Reply) -> None:
        """Resolve the outstanding call; a reply to anything else is ignored, a failure outside any call fails the run."""
        if call_id < 0:
            self._fail(_failure(worker_id, reply))
            return
        worker = self._workers.get(worker_id)
        if worker is None or worker.outstanding is None or worker.outstanding.call_id != call_id or worker.answer is None:
            return
        worker.outstanding = None
        if worker.answer.done():
            return
        if isinstance(reply, WorkerFailed):
            worker.answer.set_exception(_failure(worker_id, reply))
        else:
            worker.answer.set_result(reply)

    # ── called by the controller ──

    async def wait_for(self, worker_ids: Collection[str], deadline_s: float) -> dict[str, WorkerUp]:
        """Greetings of all these workers. Raises RunFailed naming who is missing; whatever a worker reported before its greeting."""
        try:
            async with asyncio.timeout(deadline_s):
                while not set(worker_ids) <= self._workers.keys():
                    self._raise_failure()
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            missing = sorted(set(worker_ids) - self._workers.keys())
            raise RunFailed(
                "workers did not start",
                got=f"nothing from {', '.join(missing)} after {deadline_s:g} s",
                remedy="see logs/ in the run folder",
            ) from None
        self._raise_failure()
        return {worker_id: self._workers[worker_id].hello for worker_id in worker_ids}

    def greeting(self, worker_id: str) -> WorkerUp | None:
        """The worker's latest greeting; a restarted worker has given a new one. None while it has not said hello."""
        worker = self._workers.get(worker_id)
        return None if worker is None else worker.hello

    def forget(self, worker_id: str, silent_s: float = 0.0) -> None:
        """The worker is gone for good, unless it has been heard within silent_s: whoever waits for its answer gets NoReply now."""
        worker = self._workers.get(worker_id)
        if worker is None or time.monotonic() - worker.heard_s < silent_s:
            return
        del self._workers[worker_id]
        if worker.answer is not None and not worker.answer.done():
            worker.answer.set_exception(NoReply(f"{worker_id} is gone"))
            worker.answer.exception()  # retrieved: its caller may be gone, too

    async def call(
        self, worker_ids: Collection[str], command: Callable[[int], Command], reply_type: type[R], deadline_s: float
    ) -> dict[str, R]:
        """Give each worker the command and gather the replies.

        command: call id → message. Raises NoReply: deadline passed, or a worker is gone; RunFailed: a worker failed, now or since the
        last call (UsageError where it says so).
        """
        self._raise_failure()
        if unknown := [w for w in worker_ids if w not in self._workers]:
            raise NoReply("workers are gone", got=", ".join(unknown))
        futures = {w: self._send(w, command(next(self._ids))) for w in worker_ids}
        done, pending = await asyncio.wait(futures.values(), timeout=deadline_s, return_when=asyncio.FIRST_EXCEPTION)
        for error in [f.exception() for f in done]:
            if error is not None:
                raise error
        if pending:
            late = sorted(w for w, f in futures.items() if f in pending)
            raise NoReply(
                "workers did not reply", got=f"nothing from {', '.join(late)} in {deadline_s:g} s", remedy="see logs/ in the run folder"
            )
        return {w: _typed(w, f.result(), reply_type) for w, f in futures.items()}

    def stop_all(self) -> None:
        """Tell every worker to finish; do not wait (their owner reaps them)."""
        for worker_id in self._workers:
            self._send(worker_id, Stop(next(self._ids)))

    async def drained(self, deadline_s: float) -> None:
        """Wait until every worker has taken and answered its last command, or the deadline."""
        pending = [w.answer for w in self._workers.values() if w.answer is not None and not w.answer.done()]
        if pending:
            await asyncio.wait(pending, timeout=deadline_s)

    def _send(self, worker_id: str, command: Command) -> asyncio.Future[Reply]:
        worker = self._workers[worker_id]
        worker.outstanding, worker.answer = command, asyncio.get_running_loop().create_future()
        worker.changed.set()
        return worker.answer

    def _fail(self, error: RoseError) -> None:
        self._failure = error
        self._arrived.set()
        for worker in self._workers.values():
            if worker.answer is not None and not worker.answer.done():
                worker.answer.set_exception(error)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _failure(worker_id: str, reply: Reply) -> RoseError:
    what = reply.what if isinstance(reply, WorkerFailed) else repr(reply)
    kind = UsageError if isinstance(reply, WorkerFailed) and reply.usage else RunFailed
    return kind(f"{worker_id}: {what}")


def _typed(worker_id: str, reply: Reply, kind: type[R]) -> R:
    if not isinstance(reply, kind):
        raise RunFailed(f"{worker_id} gave another answer than asked for", got=type(reply).__name__, expected=kind.__name__)
    return reply
