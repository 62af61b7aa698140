"""An engine without vLLM around toy workers: what is asked of it, and what the workers make of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from toy_node import Node


class ToyEngine:
    """As much of AsyncLLM as updates and activity need, around the workers of a node.

    calls: what was asked, in order; arguments: keywords of the last call of each name. on_update: happens after the workers have applied.
    """

    def __init__(self, node: Node) -> None:
        self.node, self.calls, self.arguments = node, list[str](), dict[str, dict[str, Any]]()
        self.engine_core = SimpleNamespace(pause_scheduler_async=self._noted("pause"))
        self.start_weight_update, self.finish_weight_update = self._noted("start"), self._noted("finish")
        self.reset_prefix_cache, self.resume_generation = self._noted("reset", True), self._noted("resume")
        self.pause_generation, self.sleep, self.wake_up = self._noted("pause"), self._noted("sleep"), self._noted("wake up")
        self.model_config = SimpleNamespace(enable_sleep_mode=True)
        self.on_update: Callable[[], Awaitable[None]] | None = None
        self._answers: list[Any] = []

    def _noted(self, name: str, answer: Any = None) -> Callable[..., Any]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            self.arguments[name] = kwargs
            return answer

        return call

    async def update_weights(self, request: Any) -> None:
        self.calls.append("update")
        self.node.apply()
        if self.on_update is not None:
            await self.on_update()

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == "rose_answer":
            answers, self._answers = self._answers, [answer for answer in self._answers if answer is not None] or self._answers
            return answers
        if method == "rose_give_back":
            self.calls.append("give back")
            return [{"fault": None, "bytes": 0}] * len(self.node.workers)
        name, given = args
        self.calls.append(name)
        self._answers = [self._answer(worker, rank, name, given) for rank, worker in enumerate(self.node.workers)]
        return [{"fault": None}] * len(self.node.workers)

    @staticmethod
    def _answer(worker: Any, rank: int, name: str, given: list[Any]) -> Any:
        if name == "share":
            return worker.share(np.frombuffer(given[0][rank], np.int64))
        if name == "prove" and worker.is_probed:
            return next(answer for answer in worker.probing() if answer is not None)
        return getattr(worker, name)(*given)
