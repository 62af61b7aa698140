"""What an agent and its engines are told at their start: JSON files, typed and strict like the run's configuration.

Nothing here travels over the network; the launcher writes an agent's file, the agent writes its engines'.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rose_hpc.config import EngineConfig, GateConfig, GpuConfig, Section, SloConfig
from rose_hpc.coserve.lease_book import LEAST_FRAC
from rose_hpc.coserve.registry import NAME_PATTERN
from rose_hpc.weights.relay_spec import RelaySpec


class EngineOffer(Section):
    """One rollout engine that an agent shall run."""

    executor_id: str = Field(..., pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="names a file and a URL segment")
    model_dir: Path = Field(..., description="folder with the model's config.json; its weights are not read")
    arena: Path = Field(..., description="folder of the arena that the node's relay fills")
    engine: EngineConfig = EngineConfig()
    seed: int = Field(0, ge=0, description="of the engine's sampling")
    gate: dict[str, Any] | None = Field(None, description="on a lent device: the settings of its gate, see gate.gate_settings")


class EngineSpec(EngineOffer):
    """The offer, and where the engine meets its agent."""

    socket: Path = Field(..., description="Unix socket to listen on, in a folder of mode 0700")
    token_file: Path = Field(..., description="file of mode 0600 with the bearer token")


RESERVED_FLAGS = ("--uds", "--host", "--port", "--model", "--scheduler-cls", "--additional-config")


class ServingSpec(Section):
    """The serving engine on a lent device. Its users talk to the Unix socket, or to host:port where a port is given."""

    model_dir: Path = Field(..., description="folder in Hugging Face format")
    socket: Path = Field(..., description="Unix socket that its users talk to")
    host: str = Field("127.0.0.1", description="address to listen on, where a port is given")
    port: int | None = Field(None, ge=1, le=65535)
    scratch: Path | None = Field(None, description="private folder for scratch files; without one the socket's")
    flags: list[str] = Field([], description="further flags of the vLLM server")
    board: Path = Field(..., description="shared-memory file on which it shows its state to the gate")
    engine: EngineConfig
    slo: SloConfig
    gate: GateConfig
    device_cpus: list[int] = Field(..., min_length=1)

    @field_validator("flags")
    @classmethod
    def _ours_stay(cls, flags: list[str]) -> list[str]:
        taken = [flag for flag in flags if flag.partition("=")[0] in RESERVED_FLAGS]
        if taken:
            raise ValueError(f"the agent sets these flags itself: {', '.join(taken)}")
        return flags

    @property
    def scratch_dir(self) -> Path:
        return self.socket.parent if self.scratch is None else self.scratch

    @property
    def url(self) -> str:
        """Where its users reach it."""
        reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        host = f"[{reachable}]" if ":" in reachable else reachable
        return f"unix:{self.socket}" if self.port is None else f"http://{host}:{self.port}"


class AttachSpec(Section):
    """A serving engine that somebody else started, with our plug-in flags. model: its served name, or its folder; "": any."""

    url: str = Field(..., description="http://HOST:PORT or unix:/PATH")
    board: Path = Field(..., description="where its scheduler shows its state")
    model: str = ""


class ServeSpec(Section):
    """A serving engine, and what of its device an operator's agent lends to whom.

    serving: what starts it, or of an attached one what the gate and the device need to know. attach: always there for the agent itself.
    """

    name: str = Field(..., pattern=NAME_PATTERN, description="of the agent in the registry")
    serving: ServingSpec
    attach: AttachSpec | None = None
    registry: Path
    logs_dir: Path
    arena_root: Path = Path("/dev/shm")
    host: str = Field("127.0.0.1", description="address on which runs reach the agent")
    port: int = Field(0, ge=0, le=65535, description="0: any free port")
    allow_models: list[Path] = Field([], description="folders of the models that runs may bring")
    max_frac: float = Field(1.0, ge=LEAST_FRAC, le=1, description="most of the device that a run may ask for")
    max_ttl_s: float = Field(10.0, gt=0, description="longest time without a renewal")
    devices: int = Field(1, ge=1, description="that a lent engine may span")
    unverified_tp: bool = Field(False, description="allow tensor parallelism beside a serving engine on GPUs")
    gpu: GpuConfig = GpuConfig()


class AgentSpec(Section):
    """One agent: its controller, its engines, and how long it keeps them without hearing from the controller."""

    agent_id: str = Field(..., pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    kind: Literal["dedicated", "opportunistic"] = "dedicated"
    serving: ServingSpec | None = Field(None, description="opportunistic only: the serving engine whose device is lent")
    gpu: GpuConfig = GpuConfig()
    control_dir: Path = Field(..., description="RUN/control: the controller's address and the run's token")
    logs_dir: Path = Field(..., description="gets engine-ID.log per engine, and relay.log")
    relay: str = Field("", description="whose arena the engines load from")
    own_relay: RelaySpec | None = Field(None, description="that relay, where the agent is to start it: on a lent node")
    host: str = Field("127.0.0.1", description="address to listen on; the port is chosen freely")
    engines: list[EngineOffer] = Field(..., min_length=1)
    lease_ttl_s: float = Field(10, gt=0, description="from registration to the first renewal, and the most that a renewal grants")
    start_deadline_s: float = Field(300, gt=0, description="longest wait for the controller; engines have their own")

    @model_validator(mode="after")
    def _lent_or_not(self) -> AgentSpec:
        if (self.kind == "opportunistic") != (self.serving is not None):
            raise ValueError("an opportunistic agent, and only such a one, has a serving engine")
        if self.serving is not None and len(self.engines) > 1:
            raise ValueError(f"a lent device has one rollout engine, as its board has one gate (got {len(self.engines)})")
        return self

    @field_validator("engines")
    @classmethod
    def _distinct(cls, engines: list[EngineOffer]) -> list[EngineOffer]:
        if len({e.executor_id for e in engines}) < len(engines):
            raise ValueError("two engines have the same executor_id")
        return engines
