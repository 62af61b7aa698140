"""A whole run on this machine: controller, trainer ranks, relays, agent (and through it the engine), each its own process.

    launcher ─┬─ controller ── metrics writer
              ├─ trainer-0 … trainer-N                FSDP2 over gloo or NCCL
              ├─ mpiexec ── relay 0 (source), relay 1 … (sinks)
              └─ agent ── rollout engines ── vLLM's own children

The launcher starts them together, shows progress, and ends with the controller: whatever happens (success, failure of any
process, SIGINT, SIGTERM), all are stopped and reaped, the arenas are removed. It holds no state of the run.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from rose_hpc.config import RunConfig, Section
from rose_hpc.coserve.specs import AgentSpec, EngineOffer
from rose_hpc.errors import RoseError, RunFailed, UsageError
from rose_hpc.launch import preflight, run_folder
from rose_hpc.launch.display import Display
from rose_hpc.launch.processes import Supervisor
from rose_hpc.launch.run_folder import RunFolder
from rose_hpc.metrics.files import next_attempt
from rose_hpc.rollout.controller import ControllerSpec
from rose_hpc.train.spec import TrainerSpec
from rose_hpc.weights.arena_home import ArenaHome
from rose_hpc.weights.relay import RelayNode, RelaySpec

POLL_S = 0.1
VERDICT_S = 5.0  # how long the controller has to explain why another process ended
FINISH_DEADLINE_S = 20.0


class Interrupted(RoseError):
    """SIGINT or SIGTERM: everything was stopped in good order; `rose-hpc resume` goes on from the last checkpoint."""

    def __init__(self, number: int, run_dir: Path) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}", remedy=f"rose-hpc resume {run_dir}")
        self.exit_code = 128 + number


def run(config: RunConfig, run_dir: Path) -> RunFolder:
    """Start a new run and see it to its end. Raises UsageError before anything starts, RunFailed, Interrupted."""
    preflight.check(config)
    folder = run_folder.create(run_dir, config)
    _attempt(config, folder, resume=False)
    return folder


def resume(run_dir: Path) -> RunFolder:
    """Go on with an interrupted run from its last checkpoint; from the beginning where it had none."""
    folder, config = run_folder.reopen(run_dir)
    preflight.check(config)
    _attempt(config, folder, resume=True)
    return folder


def _attempt(config: RunConfig, folder: RunFolder, resume: bool) -> None:
    signals, started_s = _Signals(folder.path), time.time()
    with signals, Display(folder.path, config.steps) as display:
        with Supervisor(folder.logs) as supervisor:
            _make_model(config, folder, supervisor, signals, display)
        preflight.check_arena_space(config, folder.model_dir(config))
        with ArenaHome(config.weights.arena_root) as arenas, Supervisor(folder.logs, {"TMPDIR": str(arenas.tmp)}) as supervisor:
            _start_all(_Specs(config, folder, arenas.path, resume, started_s), config, supervisor)
            _watch(supervisor, signals, display, folder)


def _make_model(config: RunConfig, folder: RunFolder, supervisor: Supervisor, signals: _Signals, display: Display) -> None:
    """Make the tiny model where the configuration asks for one; in a process of its own, since it needs torch."""
    if config.model.tiny is None or folder.tiny_model.exists():
        return
    display.phase("making and warming up the model")
    child = supervisor.start_module(
        "model",
        "rose_hpc.cli",
        "model",
        "tiny",
        "--out",
        str(folder.tiny_model),
        "--config",
        str(folder.path / "config.json"),
        "--seed",
        str(config.seed),
    )
    while not supervisor.ended():
        signals.check()
        time.sleep(POLL_S)
    if child.process.returncode != 0:
        raise RunFailed("the tiny model could not be made", got=child.failure())


def _start_all(specs: _Specs, config: RunConfig, supervisor: Supervisor) -> None:
    """Start every process; they find each other through RUN/control."""
    supervisor.start_module("controller", "rose_hpc.rollout.controller", specs.write("controller", specs.controller()))
    supervisor.start_module("agent-0", "rose_hpc.coserve.agent", specs.write("agent-0", specs.agent()))
    for rank in range(config.train.ranks):
        supervisor.start_module(f"trainer-{rank}", "rose_hpc.train.trainer", specs.write(f"trainer-{rank}", specs.trainer(rank)))
    relays = specs.relays()
    mpiexec = [preflight.find_mpiexec(config.weights.mpiexec), "-n", str(len(relays.nodes)), sys.executable, "-m", "rose_hpc.weights.relay"]
    command = [sys.executable, "-m", "rose_hpc.lifeline", *mpiexec, specs.write("relays", relays)]
    supervisor.start("relays", command, env={"HYDRA_LAUNCHER": "fork", "OMP_NUM_THREADS": "1"})


class _Specs:
    """What each process is told; written to RUN/control/specs, readable by this user only."""

    def __init__(self, config: RunConfig, folder: RunFolder, arenas: Path, resume: bool, started_s: float) -> None:
        self._c, self._folder, self._arenas, self._resume, self._started_s = config, folder, arenas, resume, started_s
        self._executors = [f"executor-{i}" for i in range(config.rollout.dedicated)]

    def write(self, name: str, spec: Section) -> str:
        """Path of the written file."""
        path = self._folder.specs / f"{name}.json"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as f:
            f.write(spec.model_dump_json())
        return str(path)

    def controller(self) -> ControllerSpec:
        return ControllerSpec(
            run_dir=self._folder.path,
            control_dir=self._folder.control,
            model_dir=self._folder.model_dir(self._c),
            attempt=next_attempt(self._folder.path),
            started_s=self._started_s,
            relays=[node.role for node in self.relays().nodes],
            agents=1,
            config=self._c,
        )

    def trainer(self, rank: int) -> TrainerSpec:
        return TrainerSpec(
            rank=rank,
            world_size=self._c.train.ranks,
            control_dir=self._folder.control,
            model_dir=self._folder.model_dir(self._c),
            arena=self._arenas / "trainer",
            rendezvous=self._folder.control / "rendezvous",
            checkpoints_dir=self._folder.checkpoints,
            train=self._c.train,
            temperature=self._c.sampling.temperature,
            wire_dtype=self._c.weights.wire_dtype,
            retained_versions=self._c.weights.retained_versions,
            seed=self._c.seed,
            resume=self._resume,
            lease_ttl_s=self._c.control.lease_ttl_s,
        )

    def relays(self) -> RelaySpec:
        """Rank 0 reads the trainer's arena; one sink per node of executors, which is one on this machine."""
        nodes = [
            RelayNode(name="trainer", role="source", arena=self._arenas / "trainer"),
            RelayNode(name="executors", role="sink", arena=self._arenas / "executors"),
        ]
        weights = self._c.weights
        return RelaySpec(
            control_dir=self._folder.control,
            nodes=nodes,
            bucket_bytes=weights.bucket_bytes,
            retained_versions=weights.retained_versions,
            deadline_s=weights.deadline_s,
            lease_ttl_s=self._c.control.lease_ttl_s,
        )

    def agent(self) -> AgentSpec:
        offers = [
            EngineOffer(
                executor_id=name,
                model_dir=self._folder.model_dir(self._c),
                arena=self._arenas / "executors",
                engine=self._c.rollout.engine,
                seed=self._c.seed * 1000 + i,
            )
            for i, name in enumerate(self._executors)
        ]
        return AgentSpec(
            agent_id="agent-0",
            control_dir=self._folder.control,
            logs_dir=self._folder.logs,
            engines=offers,
            lease_ttl_s=self._c.control.lease_ttl_s,
            start_deadline_s=self._c.control.start_deadline_s,
        )


def _watch(supervisor: Supervisor, signals: _Signals, display: Display, folder: RunFolder) -> None:
    """Until the controller has finished well. Raises RunFailed, UsageError or Interrupted."""
    while not supervisor.ended():
        signals.check()
        display.poll()
        time.sleep(POLL_S)
    display.phase("stopping")
    controller = supervisor.child("controller")
    if (
        not supervisor.wait_for(controller, FINISH_DEADLINE_S if not supervisor.failed() else VERDICT_S)
        or controller.process.returncode != 0
    ):
        raise _verdict(supervisor, folder)
    supervisor.wait_ended(FINISH_DEADLINE_S)
    if supervisor.failed():
        raise _verdict(supervisor, folder)


def _verdict(supervisor: Supervisor, folder: RunFolder) -> RoseError:
    """A process ended that should not have: the best explanation that any of them gave."""
    child = (supervisor.failed() or supervisor.ended())[0]
    what = f"{child.name} ended with status {child.process.returncode}: {child.failure()}"
    if child.process.returncode == UsageError.exit_code:
        return UsageError(what, remedy=f"logs are in {folder.logs}")
    return RunFailed(what, remedy=f"logs are in {folder.logs}; rose-hpc resume {folder.path} goes on")


class _Signals:
    """Turns SIGINT and SIGTERM into Interrupted at the next `check`; a second one does not cut the stopping short."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._received = run_dir, 0
        self._before: dict[int, object] = {}

    def __enter__(self) -> _Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = number

    def check(self) -> None:
        if self._received:
            raise Interrupted(self._received, self._run_dir)
