"""The serving engine's plug-in: a vLLM scheduler class that publishes on the board what the engine owes its requests.

    vllm serve MODEL … --scheduler-cls rose_hpc.coserve.serving_plugin.ServingScheduler
                       --additional-config '{"rose_board": "/dev/shm/rose/board-0"}'

One flag for both of vLLM's scheduling modes: the class makes itself an AsyncScheduler where async scheduling is on (the default
on GPUs; vLLM turns it off on CPUs). Without `rose_board` every call is the stock scheduler's. Keep the path the same from start
to start: additional_config is a part of the key of vLLM's compilation cache.

Invariants
- Scheduling decisions are the stock scheduler's; we only look at them.
- Nothing that goes wrong here reaches the serving engine. An unwritable board is logged once and tried again each second. If
  our reading of the scheduler itself fails, we say so on the board by an overdue request that stays: the gate stays shut.

The state is published when it changes: a request comes (add_request; where others run, the schedule that follows at once says so),
starts or is preempted (schedule), gets tokens (update_from_output) or is aborted (finish_requests). Only the last two can loosen the
gate, and wake it. Steps in which everybody only gets its next token are shown each REFRESH_S: a board that lags behind them shows less
slack than there is, and an engine whose steps take less than that would spend 2 % of its time on telling so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from rose_hpc.coserve.board import BoardWriter
from rose_hpc.coserve.slack import ServingState, StepTimes, StepTimesFit, WaitingRequest
from rose_hpc.errors import RoseError

CONFIG_KEY = "rose_board"
RETRY_S = 1.0  # between two tries at a board that cannot be written
REFRESH_S = 0.005  # between two records of the same requests: what the gate waits for in one decision (GateConfig.hold_cap_s)
OVERDUE = ServingState(waiting=(WaitingRequest(arrival_s=0.0, prompt_tokens=0),))  # since boot: no budget allows a step beside it

log = logging.getLogger(__name__)


class ServingScheduler(Scheduler):
    """The stock scheduler, watched."""

    def __new__(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> ServingScheduler:
        return super().__new__(AsyncServingScheduler if vllm_config.scheduler_config.async_scheduling else cls)

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        board = vllm_config.additional_config.get(CONFIG_KEY) if isinstance(vllm_config.additional_config, dict) else None
        self._rose = None if board is None else Watch(Path(board))
        self._tell(lambda rose: rose.publish(self))

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        self._tell(lambda rose: rose.came(self, request))

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        output = super().schedule(throttle_prefills)
        self._tell(lambda rose: rose.scheduled(self, output))
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._tell(lambda rose: rose.stepped(self, scheduler_output, outputs))
        return outputs

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        finished = super().finish_requests(request_ids, finished_status)
        self._tell(lambda rose: rose.finished(self, finished))
        return finished

    def shutdown(self) -> None:
        super().shutdown()
        self._tell(lambda rose: rose.close())

    def _tell(self, what: Callable[[Watch], None]) -> None:
        """The edge between our code and the serving engine: nothing of ours may end it."""
        if self._rose is None:
            return
        try:
            what(self._rose)
        except Exception:
            log.exception("the co-serving board stays shut: this vLLM's scheduler is not as expected; serving goes on")
            self._rose.give_up()
            self._rose = None


class AsyncServingScheduler(ServingScheduler, AsyncScheduler):
    """The same under async scheduling: the next step is scheduled while one is running."""


class Watch:
    """What we remember about a scheduler's requests, and the board it goes to."""

    def __init__(self, path: Path) -> None:
        self._link = BoardLink(path)
        self._fit = StepTimesFit(StepTimes(0.0, 0.0, 0.0))
        self._arrival_s: dict[str, float] = {}
        self._last_token_s: dict[str, float] = {}
        self._began_s: list[float] = []  # of the steps in flight, oldest first
        self._last_end_s = 0.0
        self._shown_s = 0.0  # when the board was published last
        self._shows_busy = False
        self._is_behind = False  # the board does not show somebody who came

    def came(self, scheduler: Scheduler, request: Request) -> None:
        """vLLM stamps arrivals with the wall clock, in another process."""
        age_s = max(0.0, time.time() - request.arrival_time)
        self._arrival_s[request.request_id] = time.monotonic() - age_s
        self._is_behind = True
        if not self._shows_busy:
            self.publish(scheduler, wake=False)

    def scheduled(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """A pure decode step changes nothing that the board shows."""
        if output.total_num_scheduled_tokens:
            self._began_s.append(time.monotonic())
        started = output.scheduled_new_reqs or output.scheduled_cached_reqs.resumed_req_ids
        if self._is_behind or started or output.preempted_req_ids:
            self.publish(scheduler, wake=False)

    def stepped(self, scheduler: Scheduler, output: SchedulerOutput, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Steps end in the order they began; one that began while another ran took from that one's end on."""
        now_s, scheduled = time.monotonic(), output.num_scheduled_tokens
        decoding = sum(map(self._last_token_s.__contains__, scheduled))
        is_news = decoding < len(scheduled) or now_s - self._shown_s >= REFRESH_S
        if output.total_num_scheduled_tokens:
            begin_s = max(self._began_s.pop(0), self._last_end_s)
            self._last_end_s = now_s
            if is_news:
                self._fit.observe(self._prompt_tokens(output, decoding), decoding, now_s - begin_s)
        for result in (o for of_client in outputs.values() for o in of_client.outputs):
            if result.finish_reason is not None:
                self._forget(result.request_id)
                is_news = True
            elif result.new_token_ids:
                self._last_token_s[result.request_id] = now_s
        if is_news:
            self.publish(scheduler)

    def _prompt_tokens(self, output: SchedulerOutput, decoding: int) -> int:
        """Of a step with so many decoding requests; most steps have no others."""
        scheduled = output.num_scheduled_tokens
        return 0 if decoding == len(scheduled) else sum(n for r, n in scheduled.items() if r not in self._last_token_s)

    def finished(self, scheduler: Scheduler, requests: Iterable[Request]) -> None:
        for request in requests:
            self._forget(request.request_id)
        self.publish(scheduler)

    def _forget(self, request_id: str) -> None:
        self._arrival_s.pop(request_id, None)
        self._last_token_s.pop(request_id, None)

    def publish(self, scheduler: Scheduler, wake: bool = True) -> None:
        self._shown_s = now_s = time.monotonic()
        state = self._state(scheduler, now_s)
        self._shows_busy, self._is_behind = state.busy, False
        self._link.publish(state, self._fit.times, now_s, wake)

    def _state(self, scheduler: Scheduler, now_s: float) -> ServingState:
        """A preempted request waits for its next token, not for its first, so it counts among those past their first token."""
        running, last_token_s = scheduler.running, self._last_token_s
        batch, kv_frac = len(running), scheduler.get_kv_cache_usage()
        queues = [queue for queue in (scheduler.waiting, scheduler.kv_holding_waiting) if queue]
        if not queues and batch == len(last_token_s) == len(self._arrival_s):  # all that came run, and have their first token
            return ServingState(last_token_s=tuple(last_token_s.values()), batch=batch, kv_frac=kv_frac)
        queued = [r for queue in queues for r in queue if owed(r)]
        started = tuple([last_token_s[i] for r in (*running, *queued) if (i := r.request_id) in last_token_s])
        return ServingState(self._owing(queued, now_s), self._owing(running, now_s), started, batch, kv_frac)

    def _owing(self, requests: Iterable[Request], now_s: float) -> tuple[WaitingRequest, ...]:
        """Those before their first token. Tokens of a step in flight remain: vLLM counts them as computed when it schedules them."""
        return tuple(
            [
                WaitingRequest(
                    self._arrival_s.get(r.request_id, now_s), max(0, r.num_prompt_tokens - r.num_computed_tokens + r.num_in_flight_tokens)
                )
                for r in requests
                if r.request_id not in self._last_token_s
            ]
        )

    def give_up(self) -> None:
        """Leave the board in a state that shuts the gate for as long as this engine lives."""
        self._link.publish(OVERDUE, self._fit.times, time.monotonic(), wake=False)

    def close(self) -> None:
        """The engine shuts down in good order: it owes nothing any more."""
        self._link.publish(ServingState(), self._fit.times, time.monotonic(), wake=True)


def owed(request: Request) -> bool:
    """Whether a queued request waits for us, not for its client's next input."""
    return request.status != RequestStatus.WAITING_FOR_STREAMING_REQ


class BoardLink:
    """The board, whatever becomes of its file: while it cannot be written, the engine serves without."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: BoardWriter | None = None
        self._next_try_s = 0.0
        self._complained = False

    def publish(self, state: ServingState, times: StepTimes, now_s: float, wake: bool) -> None:
        """Publish, or try again later. Raises nothing that the file system may answer."""
        if self._writer is None and now_s < self._next_try_s:
            return
        try:
            if self._writer is None:
                self._writer = BoardWriter(self._path, now_s)
            self._writer.publish(state, times, now_s, wake)
        except (OSError, RoseError) as error:
            self._drop(error, now_s)

    def _drop(self, error: Exception, now_s: float) -> None:
        if not self._complained:
            log.warning("the co-serving board cannot be written; serving goes on without, trying again every %g s: %s", RETRY_S, error)
        self._complained = True
        self._next_try_s = now_s + RETRY_S
        if self._writer is not None:
            self._writer.close()
        self._writer = None
