"""The serving plug-in with a clock around it: what its calls cost the engine's process, told in a file beside the board (BOARD.probe).

The clock is the thread's CPU time: what other processes take from the core counts neither for the plug-in nor for the engine. Reading
it is a system call, whose time counts for the plug-in.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput

from rose_hpc.coserve.serving_plugin import CONFIG_KEY, ServingScheduler, Watch

WRITE_EVERY = 20  # steps


class ProbedScheduler(ServingScheduler):
    """Counts since the engine's start; the file is written outside of what is measured, and its own time is taken off the thread's."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        self._file = Path(f"{vllm_config.additional_config[CONFIG_KEY]}.probe")
        self._spent_ns = self._written_ns = self._calls = self._steps = 0
        super().__init__(vllm_config, *args, **kwargs)

    def _tell(self, what: Callable[[Watch], None]) -> None:
        begin_ns = time.thread_time_ns()
        super()._tell(what)
        self._spent_ns += time.thread_time_ns() - begin_ns
        self._calls += 1

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._steps += scheduler_output.total_num_scheduled_tokens > 0
        if self._steps % WRITE_EVERY == 0:
            self._write()
        return outputs

    def _write(self) -> None:
        begin_ns = time.thread_time_ns()
        counts = {
            "plugin_ns": self._spent_ns,
            "thread_ns": begin_ns - self._written_ns,
            "process_ns": time.process_time_ns() - self._written_ns,
            "calls": self._calls,
            "steps": self._steps,
        }
        temporary = self._file.with_suffix(".new")
        temporary.write_text(json.dumps(counts))
        temporary.replace(self._file)
        self._written_ns += time.thread_time_ns() - begin_ns
