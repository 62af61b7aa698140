"""What an agent and its engines are told at their start: JSON files, typed and strict like the run's configuration.

Nothing here travels over the network; the launcher writes an agent's file, the agent writes its engines'.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rose_hpc.config import EngineConfig, GateConfig, Section, SloConfig
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


class ServingSpec(Section):
    """The serving engine on a lent device."""

    model_dir: Path = Field(..., description="folder in Hugging Face format")
    socket: Path = Field(..., description="Unix socket that its users talk to")
    board: Path = Field(..., description="shared-memory file on which it shows its state to the gate")
    engine: EngineConfig
    slo: SloConfig
    gate: GateConfig
    device_cpus: list[int] = Field(..., min_length=1)


class AgentSpec(Section):
    """One agent: its controller, its engines, and how long it keeps them without hearing from the controller."""

    agent_id: str = Field(..., pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    kind: Literal["dedicated", "opportunistic"] = "dedicated"
    serving: ServingSpec | None = Field(None, description="opportunistic only: the serving engine whose device is lent")
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
