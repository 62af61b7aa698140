"""The rollout engine's plug-in: a vLLM scheduler class that asks the gate before each step.

    scheduler_cls = "rose_hpc.coserve.rollout_plugin.GatedScheduler"
    additional_config = {"rose_gate": {"board": PATH, "ttft_s": …, "tpot_s": …, "hold_cap_s": …, "stale_s": …, "headroom_frac": …}}

A held step is an empty schedule: vLLM's core then looks for new requests and aborts, and asks again. It holds only while there
are unfinished requests: the step that tells the workers which requests have finished runs no model and must not wait.

The class makes itself an AsyncScheduler where async scheduling is on. There a step is decided while another runs: both must
fit, and a held decision returns at once, so that the output of the running one is not kept waiting. Without `rose_gate` every
call is the stock scheduler's.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput

from rose_hpc.coserve.gate import Gate, gate_settings

CONFIG_KEY = "rose_gate"
SCHEDULER_CLASS = "rose_hpc.coserve.rollout_plugin.GatedScheduler"


class GatedScheduler(Scheduler):
    """The stock scheduler behind a gate. Raises ConfigError for settings that cannot be used, which ends the engine's start."""

    def __new__(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> GatedScheduler:
        return super().__new__(AsyncGatedScheduler if vllm_config.scheduler_config.async_scheduling else cls)

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        tree = vllm_config.additional_config.get(CONFIG_KEY) if isinstance(vllm_config.additional_config, dict) else None
        self._gate = None if tree is None else Gate(gate_settings(tree))
        self._flying: list[tuple[bool, float]] = []  # steps in flight, oldest first: has prompt tokens, when it began
        self._last_end_s = 0.0

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if self._gate is None:
            return super().schedule(throttle_prefills)
        if self.get_num_unfinished_requests() and not self._admitted(self._gate):
            return SchedulerOutput.make_empty()
        began_s = time.monotonic()
        output = super().schedule(throttle_prefills)
        if output.total_num_scheduled_tokens:
            self._flying.append((output.total_num_scheduled_tokens > len(output.num_scheduled_tokens), began_s))
        return output

    def _admitted(self, gate: Gate) -> bool:
        ahead_s = sum(gate.step_s(prefill) for prefill, _ in self._flying)
        prefill = self._next_prefills()
        return gate.admit(ahead_s + gate.step_s(prefill), may_wait=not self._flying, prefill=prefill)

    def _next_prefills(self) -> bool:
        """Whether the next step is likely to have prompt tokens: somebody waits for a place that there is, or has more prompt to go."""
        waits = bool(self.waiting or self.kv_holding_waiting) and len(self.running) < self.max_num_active_reqs
        return waits or any(r.num_tokens - r.num_computed_tokens > 1 for r in self.running)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._gate is not None and scheduler_output.total_num_scheduled_tokens:
            prefill, began_s = self._flying.pop(0)
            self._gate.finished(prefill, max(began_s, self._last_end_s))
            self._last_end_s = time.monotonic()
        return outputs

    def shutdown(self) -> None:
        super().shutdown()
        if self._gate is not None:
            self._gate.close()


class AsyncGatedScheduler(GatedScheduler, AsyncScheduler):
    """The same under async scheduling."""
