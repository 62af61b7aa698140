"""The controller process: assembles one run from its parts and runs the loop. One per run.

    python -m rose_hpc.rollout.controller SPEC.json

    start metrics writer → listen → wait for trainers, relays, agents → loop → stop everybody → exit

Exit status: 0 finished, 2 where the user can put it right, 1 otherwise. It starts no process but the metrics writer; the
launcher owns the others. It renews the agents' leases while it lives, and only then: when it dies, agents give everything back.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
import traceback
from pathlib import Path

from rose_hpc.config import RunConfig, Section, read_spec
from rose_hpc.control import publish_address, read_token
from rose_hpc.errors import RoseError, RunFailed
from rose_hpc.http_api import base_url, serving, tcp_site
from rose_hpc.lifeline import die_with_parent, report_failure
from rose_hpc.messages import AgentUp, WorkerUp
from rose_hpc.metrics.writer import MetricsClient
from rose_hpc.rollout.api import control_app
from rose_hpc.rollout.client import AgentClient, ExecutorError
from rose_hpc.rollout.collector import Collector, Executor
from rose_hpc.rollout.run_loop import LoopParts, Progress, RunLoop
from rose_hpc.rollout.scheduler import ExecutorJoined, RolloutScheduler
from rose_hpc.rollout.tokenizer import TurnTokenizer
from rose_hpc.rollout.versions import VersionSync
from rose_hpc.rollout.workers import WorkerPool

STOP_DEADLINE_S = 5.0


class ControllerSpec(Section):
    """What the launcher tells the controller.

    relays: roles by MPI rank, "source" or "sink". agents: how many will register. started_s: Unix time at which the attempt began.
    """

    run_dir: Path
    control_dir: Path
    model_dir: Path
    attempt: int
    started_s: float
    relays: list[str]
    agents: int
    config: RunConfig


class Controller:
    """Everything that lives as long as the run. Use `run()` once."""

    def __init__(self, spec: ControllerSpec) -> None:
        self._spec, self._config = spec, spec.config
        self._workers, self._scheduler, self._progress = WorkerPool(), RolloutScheduler(), Progress()
        self._arrivals: asyncio.Queue[AgentUp] = asyncio.Queue()
        self._metrics = MetricsClient(spec.run_dir, spec.attempt)
        self._agents: list[AgentClient] = []
        self._executors: dict[str, Executor] = {}
        self._trainers = [f"trainer-{r}" for r in range(self._config.train.ranks)]

    async def run(self) -> None:
        """From start to stop. Raises RoseError."""
        token = read_token(self._spec.control_dir)
        app = control_app(token, self._workers, self._arrivals, lambda: vars(self._progress))
        async with serving(app, tcp_site(self._config.control.host, self._config.control.port)) as runner:
            self._metrics.start(self._spec.started_s)
            self._event("run_started", self._spec.run_dir.name, f"attempt {self._spec.attempt}")
            try:
                publish_address(self._spec.control_dir, base_url(runner))
                await self._train(token)
                self._event("run_finished", self._spec.run_dir.name, "")
            except BaseException as error:
                self._event("run_failed", type(error).__name__, str(error))
                raise
            finally:
                await self._stop_everybody()
                await asyncio.to_thread(self._metrics.close)

    async def _train(self, token: str) -> None:
        tokenizer = TurnTokenizer(self._spec.model_dir)
        hello = await self._gather_workers()
        await self._gather_agents(token)
        resumed = hello[self._trainers[0]]
        if any(
            (h.resumed_step, h.resumed_version) != (resumed.resumed_step, resumed.resumed_version)
            for w, h in hello.items()
            if w in self._trainers
        ):
            raise RunFailed("trainer ranks resumed from different checkpoints", got={w: hello[w].resumed_step for w in self._trainers})
        first_step, version = max(resumed.resumed_step, 0), max(resumed.resumed_version, 0)
        if first_step:
            self._event("resumed", f"step {first_step}", f"version {version}")
        renewals = asyncio.create_task(self._renew_leases())
        try:
            await self._loop(tokenizer).run(first_step, version)
        finally:
            renewals.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await renewals

    async def _gather_workers(self) -> dict[str, WorkerUp]:
        relays = [f"relay-{r}" for r in range(len(self._spec.relays))]
        return await self._workers.wait_for([*self._trainers, *relays], self._config.control.start_deadline_s)

    async def _gather_agents(self, token: str) -> None:
        """Wait until every agent has registered; its executors join the scheduler."""
        try:
            async with asyncio.timeout(self._config.control.start_deadline_s):
                while len(self._agents) < self._spec.agents:
                    await self._join(AgentClient(await self._arrivals.get(), token))
        except TimeoutError:
            raise RunFailed(
                "agents did not start", got=f"{len(self._agents)} of {self._spec.agents}", remedy="see logs/ in the run folder"
            ) from None

    async def _join(self, agent: AgentClient) -> None:
        self._agents.append(agent)
        await agent.renew(self._config.control.lease_ttl_s)
        for info in agent.executors:
            self._scheduler.observe(ExecutorJoined(info.executor_id, info.kind, info.max_concurrency), time.monotonic())
            self._executors[info.executor_id] = Executor(info.executor_id, info.kind, agent)
            self._event("executor_up", info.executor_id, info.kind)

    async def _renew_leases(self) -> None:
        """Once per heartbeat; an agent that does not answer is noticed by its turns, not here."""
        while True:
            for agent in self._agents:
                with contextlib.suppress(ExecutorError):
                    await agent.renew(self._config.control.lease_ttl_s)
            await asyncio.sleep(self._config.control.heartbeat_s)

    def _loop(self, tokenizer: TurnTokenizer) -> RunLoop:
        c = self._config
        sources, sinks = ([f"relay-{r}" for r, role in enumerate(self._spec.relays) if role == wanted] for wanted in ("source", "sink"))
        sync = VersionSync(self._workers, self._trainers, sources, sinks, self._metrics, c.weights.deadline_s)
        collector = Collector(
            self._executors,
            self._scheduler,
            tokenizer,
            c.env,
            c.sampling,
            c.rollout.engine.max_model_len,
            c.rollout.engine.request_deadline_s,
            lambda executor_id, reason: self._event("executor_lost", executor_id, reason),
        )
        parts = LoopParts(self._workers, self._trainers, collector, self._scheduler, self._executors, sync, self._metrics, self._progress)
        return RunLoop(parts, c.seed, c.steps, c.sampling, c.train)

    async def _stop_everybody(self) -> None:
        self._progress.phase = "stopping"
        self._workers.stop_all()
        for agent in self._agents:
            with contextlib.suppress(ExecutorError):
                await agent.stop(STOP_DEADLINE_S)
            await agent.close()
        await self._workers.drained(STOP_DEADLINE_S)

    def _event(self, kind: str, subject: str, detail: str) -> None:
        self._metrics.record("events", time_s=time.time(), kind=kind, subject=subject, detail=detail)


async def _run_until_signalled(spec: ControllerSpec) -> None:
    task = asyncio.ensure_future(Controller(spec).run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    await task


def main(spec_file: str) -> int:
    """Process entry."""
    die_with_parent()
    try:
        asyncio.run(_run_until_signalled(read_spec(Path(spec_file), ControllerSpec)))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    except RoseError as error:
        return report_failure(error)
    except Exception as error:
        traceback.print_exc()
        return report_failure(RunFailed("the controller failed", got=f"{type(error).__name__}: {error}"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
