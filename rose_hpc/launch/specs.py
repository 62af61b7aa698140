"""What each process of a run on this machine is told: one JSON file per process, derived from the configuration in one place.

Pure derivation, but for `write`, which puts a file into RUN/control/specs (0600). Decides no policy and starts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose_hpc.config import EngineConfig, GpuConfig, RunConfig, Section, ServingConfig
from rose_hpc.control import write_private
from rose_hpc.coserve.specs import AgentSpec, EngineOffer, ServingSpec
from rose_hpc.launch.run_folder import RunFolder
from rose_hpc.metrics.files import serving_file
from rose_hpc.rollout.controller import ControllerSpec, RelayPlace
from rose_hpc.traffic.spec import ReplaySpec
from rose_hpc.train.spec import TrainerSpec
from rose_hpc.weights.arena_home import ArenaHome
from rose_hpc.weights.relay_spec import RelayNode, RelaySpec

TRAINER_RELAY, DEDICATED_RELAY, LENT_RELAY = "relay-0", "relay-1", "relay-2"


@dataclass(frozen=True)
class Attempt:
    """One attempt at a run. started_s: Unix time; number: from 0, names the attempt's metrics files."""

    config: RunConfig
    folder: RunFolder
    home: ArenaHome
    resume: bool
    started_s: float
    number: int

    @property
    def dedicated(self) -> list[str]:
        return [f"executor-{i}" for i in range(self.config.rollout.dedicated)]

    @property
    def lent(self) -> list[str]:
        return ["lent-0"] if self.config.serving is not None else []

    @property
    def serving_socket(self) -> Path:
        """Where the serving engine listens and its traffic goes."""
        return self.home.tmp / "serving.sock"

    def write(self, name: str, spec: Section) -> str:
        """Path of the written file."""
        path = self.folder.specs / f"{name}.json"
        write_private(path, spec.model_dump_json())
        return str(path)

    def controller(self) -> ControllerSpec:
        return ControllerSpec(
            run_dir=self.folder.path,
            control_dir=self.folder.control,
            model_dir=self.folder.model_dir(self.config),
            attempt=self.number,
            started_s=self.started_s,
            relays=self._places(),
            dedicated=len(self.dedicated),
            opportunistic=len(self.lent),
            config=self.config,
        )

    def trainer(self, rank: int) -> TrainerSpec:
        return TrainerSpec(
            rank=rank,
            world_size=self.config.train.ranks,
            control_dir=self.folder.control,
            model_dir=self.folder.model_dir(self.config),
            arena=self._arena("trainer"),
            rendezvous=self.folder.control / "rendezvous",
            checkpoints_dir=self.folder.checkpoints,
            train=self.config.train,
            temperature=self.config.sampling.temperature,
            wire_dtype=self.config.weights.wire_dtype,
            retained_versions=self.config.weights.retained_versions,
            bucket_bytes=self.config.weights.bucket_bytes,
            seed=self.config.seed,
            resume=self.resume,
            lease_ttl_s=self.config.control.lease_ttl_s,
        )

    def relays(self) -> RelaySpec:
        """The run's own relays, by MPI rank: of the trainer's node and of the dedicated executors' node."""
        nodes = [
            RelayNode(name=TRAINER_RELAY, arena=self._arena("trainer"), is_source=True),
            RelayNode(name=DEDICATED_RELAY, arena=self._arena("executors"), is_source=False),
        ]
        return self._relay_spec(nodes, world="trainer")

    def _lent_relay(self) -> RelaySpec:
        """The lent node's, which the lender starts: another owner's node is reached by TCP."""
        return self._relay_spec([RelayNode(name=LENT_RELAY, arena=self._arena("lent"), is_source=False)], world="")

    def _relay_spec(self, nodes: list[RelayNode], world: str) -> RelaySpec:
        weights = self.config.weights
        return RelaySpec(
            control_dir=self.folder.control,
            nodes=nodes,
            world=world,
            host=self.config.control.host,
            bucket_bytes=weights.bucket_bytes,
            retained_versions=weights.retained_versions,
            deadline_s=weights.deadline_s,
            lease_ttl_s=self.config.control.lease_ttl_s,
        )

    def _places(self) -> dict[str, RelayPlace]:
        ranks = tuple(range(self.config.train.ranks))
        places = {
            TRAINER_RELAY: RelayPlace(partition="trainer", node="trainer", ranks=ranks),
            DEDICATED_RELAY: RelayPlace(partition="rollout", node="rollout", feeds="dedicated"),
        }
        return places | ({LENT_RELAY: RelayPlace(partition="serving", node="serving", feeds="opportunistic")} if self.lent else {})

    def agent(self) -> AgentSpec:
        """The node of the dedicated executors."""
        offers = [self._offer(name, "executors", self.config.rollout.engine, seed=i) for i, name in enumerate(self.dedicated)]
        return self._agent("agent-0", offers, DEDICATED_RELAY)

    def lender(self, serving: ServingConfig) -> AgentSpec:
        """The lent node: a serving engine, and one opportunistic executor on its device."""
        spec = ServingSpec(
            model_dir=self.folder.serving_model_dir(serving),
            socket=self.serving_socket,
            board=self.home.path / "board",
            engine=serving.engine,
            slo=serving.slo,
            gate=self.config.gate,
            device_cpus=serving.device_cpus,
        )
        gate = {"board": str(spec.board), **serving.slo.model_dump(), **self.config.gate.model_dump()}
        offers = [self._offer(name, "lent", serving.rollout, seed=100 + i, gate=gate) for i, name in enumerate(self.lent)]
        return self._agent("lender-0", offers, LENT_RELAY, spec, self._lent_relay())

    def traffic(self, serving: ServingConfig) -> ReplaySpec:
        """The users of the serving engine; they go on until told to stop."""
        return ReplaySpec(
            url=f"unix:{self.serving_socket}",
            traffic=serving.traffic,
            slo=serving.slo,
            out=serving_file(self.folder.path, self.number),
            start_deadline_s=serving.engine.start_deadline_s,
        )

    def _agent(
        self, agent_id: str, offers: list[EngineOffer], relay: str, serving: ServingSpec | None = None, own_relay: RelaySpec | None = None
    ) -> AgentSpec:
        return AgentSpec(
            relay=relay,
            own_relay=own_relay,
            agent_id=agent_id,
            kind="dedicated" if serving is None else "opportunistic",
            serving=serving,
            gpu=self.config.serving.gpu if serving is not None and self.config.serving is not None else GpuConfig(),
            control_dir=self.folder.control,
            logs_dir=self.folder.logs,
            engines=offers,
            lease_ttl_s=self.config.control.lease_ttl_s,
            start_deadline_s=self.config.control.start_deadline_s,
        )

    def _offer(self, name: str, arena: str, engine: EngineConfig, seed: int, gate: dict[str, Any] | None = None) -> EngineOffer:
        return EngineOffer(
            executor_id=name,
            model_dir=self.folder.model_dir(self.config),
            arena=self._arena(arena),
            engine=engine,
            seed=self.config.seed * 1000 + seed,
            gate=gate,
        )

    def _arena(self, name: str) -> Path:
        return self.home.path / name
