"""Tasks that run beside the training loop: none may fail unseen, and none may be cut short where it must not be.

    Background.spawn ─▶ task ──raises──▶ Background.beside raises RunFailed, whatever the loop is waiting for

A task that ends, or is cancelled by its owner, is nobody's concern. Owners cancel their tasks; this starts and watches only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

from rose_hpc.errors import RunFailed

T = TypeVar("T")


class Background:
    """One per run. The first task that raised is the one that is told."""

    def __init__(self) -> None:
        self._failure: RunFailed | None = None
        self._failed = asyncio.Event()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start it as a task. name: for the error, should it raise."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._ended)
        return task

    async def beside(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns or raises; RunFailed as soon as a task has raised, and `work` is cancelled."""
        main, alarm = asyncio.ensure_future(work), asyncio.create_task(self._failed.wait())
        try:
            await asyncio.wait((main, alarm), return_when=asyncio.FIRST_COMPLETED)
            self.raise_failure()
            return main.result()
        finally:
            for task in (main, alarm):
                task.cancel()
            await asyncio.gather(main, alarm, return_exceptions=True)

    def raise_failure(self) -> None:
        """Raises RunFailed when a task has raised."""
        if self._failure is not None:
            raise self._failure

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None or self._failure is not None:
            return
        self._failure = RunFailed(f"{task.get_name()} failed", got=f"{type(error).__name__}: {error}", remedy="see logs/ in the run folder")
        self._failure.__cause__ = error
        self._failed.set()


async def uninterrupted(work: Coroutine[Any, Any, None]) -> None:
    """Await a clean-up to its end, however often the caller is cancelled meanwhile. The work bounds its own waits.

    Such a cancellation is not raised afterwards: nothing is left to stop, and it would hide why the caller ends.
    """
    task = asyncio.ensure_future(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait((task,))  # unlike awaiting the task, this does not cancel it
    task.result()
