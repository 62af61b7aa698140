"""vLLM plug-in of a test: async scheduling on a CPU, where vLLM turns it off because it gains nothing there.

What is real: the scheduler class, the batch queue of two steps, the worker in a process of its own that runs one step while the next is
scheduled, and the worker's handling of tokens that it has not sent yet. What is not: CUDA's streams and events, of which a CPU has none;
copies are done when they are asked for.

vLLM finds it as it finds any plug-in: an entry point of a distribution on the path, which `distribution` makes.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

NAME = "async_cpu"
SAYS = "async scheduling is on"  # to the log, by the scheduler that has it


def distribution(folder: Path) -> str:
    """PYTHONPATH under which vLLM's processes load this module as a plug-in. folder: empty, ours."""
    info = folder / f"{NAME}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{NAME} = {NAME}:register\n")
    return os.pathsep.join([str(folder), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])


class NoEvent:
    """Everything has happened already."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.record = self.synchronize = lambda *_: None


def register() -> None:
    """In every vLLM process: keep async scheduling on, and give its workers streams that do nothing."""
    import torch
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    stock, made = CpuPlatform.check_and_update_config.__func__, AsyncScheduler.__init__

    def check_and_update_config(cls: type[CpuPlatform], vllm_config: Any) -> None:
        stock(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True
        vllm_config.parallel_config.distributed_executor_backend = "mp"

    def announced(self: AsyncScheduler, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        print(f"{type(self).__name__}: {SAYS}", file=sys.stderr, flush=True)

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)  # type: ignore[method-assign, assignment]
    AsyncScheduler.__init__ = announced  # type: ignore[method-assign]
    torch.cuda.Event = NoEvent  # type: ignore[misc, assignment]
    torch.cuda.current_stream = lambda *_: None  # type: ignore[assignment]
    torch.cuda.stream = lambda *_: contextlib.nullcontext()  # type: ignore[assignment]
