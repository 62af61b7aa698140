"""Messages about leases, in MessagePack like those of messages.py.

run ──LeaseAsk──▶ agent ──LeaseGranted──▶ run          POST /v1/leases, with the key from the agent's registry entry
run ──…──▶ agent ──LeaseState──▶ run                   GET /v1/lease, with the lease's token
operator ──LendChange──▶ agent ──LendStatus──▶         POST, GET /v1/lend on the agent's Unix socket
"""

from __future__ import annotations

import msgspec

from rose_hpc.messages import Message


class RelayAsk(Message, frozen=True):
    """The relay that feeds the lent engine: its name in the run, the run's controller, and what RelaySpec says of the rest.

    controller_token: with it the relay speaks to the controller; it is written to a file of mode 0600, and goes with the lease.
    """

    name: str
    controller_url: str
    controller_token: str
    bucket_bytes: int
    deadline_s: float
    retained_versions: int = 4

    def __repr__(self) -> str:
        return f"RelayAsk({self.name}, {self.controller_url})"


class LeaseAsk(Message, frozen=True):
    """A run wants a share of a lent device.

    model: a folder that the agent's registry entry lists. engine: EngineConfig's keys. arena_bytes: host memory for the weights.
    relay: None where something else brings the weights.
    """

    run_id: str
    executor_id: str
    model: str
    arena_bytes: int
    engine: dict[str, str | int | float | bool] = msgspec.field(default_factory=dict)
    ceiling_frac: float = 1.0
    ttl_s: float = 10.0
    seed: int = 0
    relay: RelayAsk | None = None


class LeaseGranted(Message, frozen=True):
    """The token opens the agent's other routes for this lease, from now until it is over; it is in no log."""

    lease_id: str
    token: str
    ttl_s: float

    def __repr__(self) -> str:
        return f"LeaseGranted({self.lease_id}, {self.ttl_s:g} s)"


class LeaseState(Message, frozen=True):
    """Where a held lease stands. up: its engine answers. states: executor id → open, held or starved (progress.py)."""

    lease_id: str
    left_s: float
    up: bool
    states: dict[str, str]


class LendChange(Message, frozen=True):
    """New terms; None: as they are."""

    lending: bool | None = None
    max_frac: float | None = None


class LendStatus(Message, frozen=True):
    """What an agent lends, and to whom. run_id, lease_id, left_s: of the lease that has the device.

    state: off, free, held, clearing or faulty. freed_s: from the change to a device free of rollout work, where the change revoked a lease.
    """

    agent_id: str
    state: str
    max_frac: float
    quota: str
    run_id: str = ""
    lease_id: str = ""
    left_s: float = 0.0
    states: dict[str, str] = msgspec.field(default_factory=dict)
    freed_s: float | None = None
    last: str = ""
