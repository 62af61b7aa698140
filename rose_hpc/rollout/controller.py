"""The controller: assembles one run from its parts and runs the loop. One per run; its process is launch/controller_process.py.

    start metrics writer → listen → wait for trainers, relays, agents → loop → stop everybody → exit

It starts no process but the metrics writer; the launcher owns the others. It renews the agents' leases while it lives, and only then:
when it dies, agents give everything back. Who borrows from other owners' agents (`Borrow`) works beside the loop, from start to stop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Literal

from msgspec import structs

from rose_hpc.config import RunConfig, Section
from rose_hpc.control import publish_address, read_token
from rose_hpc.errors import RunFailed
from rose_hpc.http_api import base_url, serving, tcp_site
from rose_hpc.messages import AgentStatus, AgentUp, WorkerUp
from rose_hpc.metrics.writer import MetricsClient, record_event
from rose_hpc.rollout.agents import AgentPool
from rose_hpc.rollout.api import control_app
from rose_hpc.rollout.background import Background, uninterrupted
from rose_hpc.rollout.borrowed import BorrowedExecutors
from rose_hpc.rollout.chat import read_chat_template
from rose_hpc.rollout.collector import Collector, TurnForm
from rose_hpc.rollout.delivery import Delivery
from rose_hpc.rollout.distribution import Distribution
from rose_hpc.rollout.fleet import Fleet
from rose_hpc.rollout.known_arenas import Place
from rose_hpc.rollout.relay_tokens import RelayTokens
from rose_hpc.rollout.run_loop import LoopParts, Progress, RunLoop, check_record
from rose_hpc.rollout.saved_rollouts import RolloutFiles
from rose_hpc.rollout.scheduler import RolloutScheduler
from rose_hpc.rollout.tokenizer import TurnTokenizer
from rose_hpc.rollout.versions import VersionSync
from rose_hpc.rollout.workers import WorkerPool

STOP_DEADLINE_S = 5.0

Borrow = Callable[[BorrowedExecutors, str], Coroutine[Any, Any, None]]  # str: base URL of the control API; for ever


class RelayPlace(Section):
    """Where a relay stands: a trainer's node with its ranks, or the node whose arena feeds the executors of one kind."""

    partition: str
    node: str
    ranks: tuple[int, ...] = ()
    feeds: Literal["dedicated", "opportunistic"] | None = None


class ControllerSpec(Section):
    """What the launcher tells the controller.

    dedicated, opportunistic: how many executors of each kind to expect. started_s: Unix time at which the attempt began.
    """

    run_dir: Path
    control_dir: Path
    model_dir: Path
    attempt: int
    started_s: float
    relays: dict[str, RelayPlace]
    dedicated: int
    opportunistic: int
    config: RunConfig


class Controller:
    """Everything that lives as long as the run. Use `run()` once."""

    def __init__(self, spec: ControllerSpec, borrow: Borrow | None = None) -> None:
        self._spec, self._config, self._borrow = spec, spec.config, borrow
        self._relay_tokens = RelayTokens()
        self._workers, self._progress, self._background = WorkerPool(), Progress(), Background()
        self._fleet = Fleet(RolloutScheduler(spec.config.rollout.policy), self._event)
        self._arrivals: asyncio.Queue[AgentUp] = asyncio.Queue()
        self._metrics = MetricsClient(spec.run_dir, spec.attempt)
        self._trainers = [f"trainer-{r}" for r in range(self._config.train.ranks)]
        self._places = {name: Place(p.partition, p.node, p.ranks, p.feeds) for name, p in spec.relays.items()}

    async def run(self) -> None:
        """From start to stop. Raises RoseError."""
        token = read_token(self._spec.control_dir)
        app = control_app(token, self._workers, self._arrivals, lambda: vars(self._progress), self._relay_tokens)
        async with serving(app, tcp_site(self._config.control.host, self._config.control.port)) as runner:
            self._metrics.start(self._spec.started_s)
            self._event("run_started", self._spec.run_dir.name, f"attempt {self._spec.attempt}")
            try:
                publish_address(self._spec.control_dir, base_url(runner))
                await self._train(token, base_url(runner))
                self._event("run_finished", self._spec.run_dir.name, "")
            except BaseException as error:
                self._event("run_failed", type(error).__name__, str(error))
                raise
            finally:
                await uninterrupted(self._clean_up())
            check_record(self._metrics)

    async def _clean_up(self) -> None:
        """Takes STOP_DEADLINE_S and the writer's deadline at most."""
        self._progress.phase = "stopping"
        self._workers.stop_all()
        await self._workers.drained(STOP_DEADLINE_S)
        await asyncio.to_thread(self._metrics.close)

    async def _train(self, token: str, url: str) -> None:
        sync = self._version_sync()
        delivery = Delivery(self._fleet, sync, self._background)
        loop = self._loop(TurnTokenizer(self._spec.model_dir), delivery)
        control, on_lost = self._config.control, sync.distribution.lost
        agents = AgentPool(self._fleet, self._arrivals, token, control, self._background, delivery.joined, self._note_status, on_lost)
        async with agents:
            borrowed = BorrowedExecutors(agents, delivery, self._relay_tokens, len(self._places), self._event)
            borrowing = [] if self._borrow is None else [self._background.spawn(self._borrow(borrowed, url), "borrowing")]
            try:
                await self._background.beside(self._gather_and_loop(agents, loop))
            finally:
                for task in borrowing:
                    task.cancel()
                await asyncio.gather(*borrowing, return_exceptions=True)
                await delivery.close()

    async def _gather_and_loop(self, agents: AgentPool, loop: RunLoop) -> None:
        first_step, version = self._resumed(await self._gather_workers())
        await self._gather_executors(agents)
        await loop.run(first_step, version)

    async def _gather_workers(self) -> dict[str, WorkerUp]:
        """Greetings of all that training needs: a relay of a lent node may come later."""
        relays = [name for name, place in self._places.items() if place.feeds != "opportunistic"]
        return await self._workers.wait_for([*self._trainers, *relays], self._config.control.start_deadline_s)

    async def _gather_executors(self, agents: AgentPool) -> None:
        """Wait for all dedicated executors, and for a while for the opportunistic ones: those that are late join later."""
        control = self._config.control
        if not await agents.wait_for("dedicated", self._spec.dedicated, control.start_deadline_s):
            there = len(self._fleet.of_kind("dedicated"))
            raise RunFailed("executors did not start", got=f"{there} of {self._spec.dedicated}", remedy="see logs/ in the run folder")
        if not await agents.wait_for("opportunistic", self._spec.opportunistic, control.lend_patience_s):
            self._event("executors_late", "opportunistic", f"going on without them after {control.lend_patience_s:g} s")

    def _resumed(self, hello: dict[str, WorkerUp]) -> tuple[int, int]:
        """First step and policy version; from the trainers' checkpoint where they resumed one."""
        found = {(hello[t].resumed_step, hello[t].resumed_version) for t in self._trainers}
        if len(found) != 1:
            raise RunFailed("trainer ranks resumed from different checkpoints", got=sorted(found))
        step, version = next(iter(found))
        if step > 0:
            self._event("resumed", f"step {step}", f"version {version}")
        return max(step, 0), max(version, 0)

    def _version_sync(self) -> VersionSync:
        weights = self._config.weights
        distribution = Distribution(self._workers, self._places, self._metrics, weights.deadline_s, weights.retained_versions)
        return VersionSync(self._workers, self._trainers, distribution, self._metrics, weights.deadline_s)

    def _loop(self, tokenizer: TurnTokenizer, delivery: Delivery) -> RunLoop:
        c, engine = self._config, self._config.rollout.engine
        chat = read_chat_template(self._spec.model_dir, tokenizer.eos_text, c.model.chat_options)
        form = TurnForm(tokenizer, c.sampling, engine.max_model_len, engine.request_deadline_s, chat)
        collector = Collector(self._fleet, form, c.env)
        rollouts = RolloutFiles(self._spec.run_dir / "rollouts", c.train.checkpoints_kept + 1)
        parts = LoopParts(self._workers, self._trainers, collector, delivery.deliver, self._metrics, self._progress, rollouts)
        return RunLoop(parts, c.seed, c.steps, c.sampling, c.train)

    def _note_status(self, status: AgentStatus) -> None:
        for sample in status.devices:
            self._metrics.record("devices", time_s=time.time(), **structs.asdict(sample))

    def _event(self, kind: str, subject: str, detail: str) -> None:
        record_event(self._metrics, kind, subject, detail)
