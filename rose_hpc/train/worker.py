"""One trainer rank as a worker of the controller: commands in, replies out.

    built ── hello ──▶ serving ── TrainStep, PublishVersion, SaveCheckpoint ──▶ serving ── Stop ──▶ ended

All ranks receive the same commands in the same order, since every command is a round of collectives. The weights are
published by an object that the caller passes in: this file knows neither the arena nor the wire.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from rose_hpc.control import WorkerChannel
from rose_hpc.errors import ConfigError, ControlError
from rose_hpc.messages import (
    CheckpointSaved,
    Command,
    PublishVersion,
    Reply,
    SaveCheckpoint,
    StepTrained,
    TrainStep,
    VersionWritten,
    WorkerUp,
    unpack_rows,
)
from rose_hpc.train.checkpoint import Checkpoints, Progress, complete_steps
from rose_hpc.train.learner import Learner
from rose_hpc.train.policy import device_of, load_policy, mesh_of, process_group, shard_policy
from rose_hpc.train.spec import TrainerSpec


class Shard(Protocol):
    """What a rank wrote of a version: digest over its own shards (adds up mod 2^64) and their bytes."""

    @property
    def digest(self) -> int: ...
    @property
    def shard_bytes(self) -> int: ...


class Publisher(Protocol):
    """Writes this rank's shards somewhere as a policy version; see weights.publisher.WeightPublisher."""

    def publish(self, version: int) -> Shard: ...


MakePublisher = Callable[[nn.Module], Publisher]  # given the sharded policy


class TrainerRank:
    """Handles the commands of one rank. Steps only go forward: a step that was trained already is refused, never trained twice."""

    def __init__(self, learner: Learner, publisher: Publisher, checkpoints: Checkpoints, *, seed: int, resumed: Progress | None) -> None:
        self._learner, self._publisher, self._checkpoints, self._seed = learner, publisher, checkpoints, seed
        self._next_step = 0 if resumed is None else resumed.step

    def handle(self, command: Command) -> Reply:
        """Carry out one command. Raises ControlError on one that a trainer does not know."""
        match command:
            case TrainStep():
                return self._train(command)
            case PublishVersion():
                return self._publish(command)
            case SaveCheckpoint():
                return self._save(command)
        raise ControlError("not a command for a trainer rank", got=type(command).__name__, expected="train, publish, save or stop")

    def _train(self, command: TrainStep) -> StepTrained:
        if command.step < self._next_step:
            raise ControlError("training step out of order", got=command.step, expected=f"{self._next_step} or later")
        start = time.perf_counter()
        statistics = self._learner.train_step(command.step, unpack_rows(command.rows))
        self._next_step = command.step + 1
        return StepTrained(**asdict(statistics), train_s=time.perf_counter() - start)

    def _publish(self, command: PublishVersion) -> VersionWritten:
        start = time.perf_counter()
        shard = self._publisher.publish(command.version)
        seconds = time.perf_counter() - start
        return VersionWritten(command.version, shard.digest, shard.shard_bytes, seconds, shard.base, dict(shard.stream_bytes))

    def _save(self, command: SaveCheckpoint) -> CheckpointSaved:
        start = time.perf_counter()
        progress = Progress(command.step, command.version, self._seed)
        self._checkpoints.save(self._learner.policy, self._learner.optimizer, progress)
        return CheckpointSaved(command.step, time.perf_counter() - start)


def run_rank(spec: TrainerSpec, channel: WorkerChannel, make_publisher: MakePublisher) -> None:
    """Build the rank, announce it and serve until Stop. Errors are reported, then raised; the process group is left on all paths."""
    with ExitStack() as group:
        with _reporting_to(channel):
            device = device_of(spec.train.device, spec.local_rank, spec.local_world_size)
            group.enter_context(process_group(spec.rendezvous, spec.rank, spec.world_size, device, spec.train.step_deadline_s))
            rank, resumed = build_rank(spec, device, make_publisher)
        channel.hello(_worker_up(spec, resumed))
        channel.serve(rank.handle)


@contextmanager
def _reporting_to(channel: WorkerChannel) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        channel.fail(error)
        raise


def build_rank(spec: TrainerSpec, device: torch.device, make_publisher: MakePublisher) -> tuple[TrainerRank, Progress | None]:
    """Load, shard and, where asked, resume; collective. The second result is what was resumed."""
    policy = shard_policy(load_policy(spec.model_dir), mesh_of(spec.world_size, device), spec.train.compute_dtype)
    learner = Learner(
        policy,
        spec.train,
        rank=spec.rank,
        world_size=spec.world_size,
        device=device,
        temperature=spec.temperature,
        seed=spec.seed,
    )
    checkpoints = Checkpoints(spec.checkpoints_dir, spec.train.checkpoints_kept, spec.rank)
    resumed = restore(spec, learner, checkpoints)
    return TrainerRank(learner, make_publisher(policy), checkpoints, seed=spec.seed, resumed=resumed), resumed


def restore(spec: TrainerSpec, learner: Learner, checkpoints: Checkpoints) -> Progress | None:
    """Load the newest checkpoint if the spec asks for it.

    Raises ConfigError when a fresh run would mix its checkpoints with older ones, or when the seed is another one.
    """
    if not spec.resume:
        refuse_older(spec.checkpoints_dir)
        return None
    progress = checkpoints.load_newest(learner.policy, learner.optimizer)
    if progress is not None and progress.seed != spec.seed:
        raise ConfigError("the checkpoint is of another run", got=f"seed {progress.seed}", expected=f"seed {spec.seed}")
    return progress


def refuse_older(checkpoints_dir: Path) -> None:
    """Pruning goes by step number: beside older checkpoints of higher steps, a fresh run's would be deleted as soon as written."""
    steps = complete_steps(checkpoints_dir)
    if steps:
        raise ConfigError(
            f"{checkpoints_dir} holds checkpoints already",
            got=f"steps {steps}",
            remedy="resume the run, or give the new one its own folder",
        )


def _worker_up(spec: TrainerSpec, resumed: Progress | None) -> WorkerUp:
    if resumed is None:
        return WorkerUp(world_size=spec.world_size)
    return WorkerUp(world_size=spec.world_size, resumed_step=resumed.step, resumed_version=resumed.version)
