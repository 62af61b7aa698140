"""Weight relay: one process per node, the only one that holds MPI; carries versions from arena to arena. Disposable.

Started as the ranks of one MPI world: `mpiexec -n N python -m rose_hpc.weights.relay SPEC.json`. Each rank has a role:

    source   its arena holds trainer shards; it offers what they cover and streams what it is asked for
    sink     its arena feeds executors; it asks each source for its part, stores, recomputes the digest, commits

One transfer, for every (source, sink) pair, all messages in order:

    source ─ Offer(generation, version, layout, owned runs) ─▶ sink
    source ◀─ Pull(generation, version, runs) ─ sink                    the sink has planned over all offers (routing.py)
    source ─ bucket × n: header + payload ─▶ sink                       header names generation, version and place

Invariants
- A sink commits a version only when the digest over what lies in its arena equals the one in the command.
- Everything a peer says is checked before it is used: layout, bounds, sizes, generation, version.
- Every wait has a deadline; a failed transfer leaves the version absent at the sink.
- A source hears every sink's Pull, then sends one bucket to each in turn: the first bucket comes soon, however many sinks there are.

It does not decide when to transfer (the controller does) and does not touch engines (the agent's updates do).
"""

from __future__ import annotations

import os
import struct
import sys
import time
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Literal

import msgspec

from rose_hpc.config import Section, read_spec
from rose_hpc.control import WorkerChannel
from rose_hpc.errors import ControlError, LayoutError, RoseError, WeightsError
from rose_hpc.lifeline import die_with_parent, report_failure
from rose_hpc.messages import (
    TransferVersion,
    VersionTransferred,
    WorkerUp,
    decode,
    encode,
)
from rose_hpc.weights.arena import Arena
from rose_hpc.weights.digest import digest_image
from rose_hpc.weights.layout import ITEM_BYTES, Run, from_json, merge, to_json
from rose_hpc.weights.routing import plan_routes
from rose_hpc.weights.transport.base import Transport

HEADER = struct.Struct("<4sIQQQ")  # magic, generation, version, offset_bytes, nbytes
MAGIC = b"RSE1"
MAX_OFFER_BYTES = 256 << 20


class RelayNode(Section):
    """One rank of the world. name: for logs and metrics; arena: the folder it reads from or writes to."""

    name: str
    role: Literal["source", "sink"]
    arena: Path


class RelaySpec(Section):
    """What every relay of one world is told; a rank finds itself by its MPI rank."""

    control_dir: Path
    nodes: list[RelayNode]
    bucket_bytes: int
    retained_versions: int
    deadline_s: float
    lease_ttl_s: float


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a source has of a version. layout: canonical JSON; runs: (offset_bytes, nbytes), merged and sorted."""

    generation: int
    version: int
    layout: str
    runs: list[tuple[int, int]]


class Pull(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a sink wants from one source, in the order in which it will arrive; one bucket per run."""

    generation: int
    version: int
    runs: list[tuple[int, int]]


class Relay:
    """One rank's part in transfers. Holds no version itself: everything lies in the arena."""

    def __init__(self, spec: RelaySpec, transport: Transport) -> None:
        self._spec, self._transport = spec, transport
        self._node = spec.nodes[transport.rank]
        self._peers = {role: [r for r, n in enumerate(spec.nodes) if n.role == role] for role in ("source", "sink")}

    def transfer(self, command: TransferVersion) -> VersionTransferred:
        """Play this node's role. Raises WeightsError: a deadline passed or a peer said something that cannot be."""
        started_s, sent, received = time.monotonic(), self._transport.sent_bytes, self._transport.received_bytes
        digest = self._serve(command) if self._node.role == "source" else self._fetch(command)
        return VersionTransferred(
            version=command.version,
            sent_bytes=self._transport.sent_bytes - sent,
            received_bytes=self._transport.received_bytes - received,
            digest=digest,
            verified=digest == command.digest,
            transfer_s=time.monotonic() - started_s,
        )

    # ── source ──

    def _serve(self, command: TransferVersion) -> int:
        arena = Arena.open(self._node.arena, self._spec.deadline_s)
        owned = merge(run for shard in arena.shards(command.version) for run in shard.runs)
        if not owned:
            raise WeightsError(f"{self._node.name}: no shard of version {command.version} here")
        offer = encode(Offer(command.generation, command.version, to_json(arena.layout), [(r.offset_bytes, r.nbytes) for r in owned]))
        for sink in self._peers["sink"]:
            self._transport.send(sink, offer, self._spec.deadline_s)
        image = arena.map_version(command.version, committed=False)
        asked = {sink: self._asked_for(sink, command, owned) for sink in self._peers["sink"]}
        for sink, run in _interleaved(asked):
            header = HEADER.pack(MAGIC, command.generation, command.version, run.offset_bytes, run.nbytes)
            self._transport.send(sink, header + image[run.offset_bytes : run.end_bytes].tobytes(), self._spec.deadline_s)
        return command.digest

    def _asked_for(self, sink: int, command: TransferVersion, owned: list[Run]) -> list[Run]:
        pull = decode(bytes(self._transport.receive(sink, MAX_OFFER_BYTES, self._spec.deadline_s)), Pull)
        _same_transfer(pull.generation, pull.version, command)
        runs = [Run(o, n) for o, n in pull.runs]
        if wrong := [r for r in runs if not 0 < r.nbytes <= self._spec.bucket_bytes]:
            raise WeightsError(
                f"{self._node.name}: a peer asks for what is no bucket", got=wrong[0], expected=f"1 to {self._spec.bucket_bytes} bytes"
            )
        plan_routes({0: owned}, sorted(runs), self._spec.bucket_bytes)  # raises unless every byte asked for is owned
        return runs

    # ── sink ──

    def _fetch(self, command: TransferVersion) -> int:
        offers = {
            s: decode(bytes(self._transport.receive(s, MAX_OFFER_BYTES, self._spec.deadline_s)), Offer) for s in self._peers["source"]
        }
        for offer in offers.values():
            _same_transfer(offer.generation, offer.version, command)
        arena = self._arena_for(list(offers.values()))
        if arena.record(command.version) is not None:
            arena.discard(command.version)  # asked for again: what is here was found wrong, or the trainer went back
        arena.prune(self._spec.retained_versions - 1)
        arena.reserve(command.version)
        for source, runs in self._plan(arena, offers).items():
            self._transport.send(
                source, encode(Pull(command.generation, command.version, [(r.offset_bytes, r.nbytes) for r in runs])), self._spec.deadline_s
            )
            for run in runs:
                self._store(arena, source, run, command)
        digest = digest_image(arena.layout, arena.map_version(command.version, committed=False))
        if digest == command.digest:
            arena.commit(command.version, digest)
        return digest

    def _arena_for(self, offers: list[Offer]) -> Arena:
        if len({offer.layout for offer in offers}) != 1:
            raise LayoutError(f"{self._node.name}: the sources disagree about the layout", expected="the same parameters everywhere")
        return Arena.create(self._node.arena, from_json(offers[0].layout))

    def _plan(self, arena: Arena, offers: dict[int, Offer]) -> dict[int, list[Run]]:
        """Source → runs to pull from it. A source without a run is asked for nothing, but asked."""
        owned = {source: merge(Run(o, n) for o, n in offer.runs) for source, offer in offers.items()}
        bucket_bytes = self._spec.bucket_bytes - self._spec.bucket_bytes % ITEM_BYTES[arena.layout.dtype]
        segments = plan_routes(owned, [Run(0, arena.layout.image_bytes)], bucket_bytes)
        return {source: [s.run for s in segments if s.source == source] for source in offers}

    def _store(self, arena: Arena, source: int, run: Run, command: TransferVersion) -> None:
        message = self._transport.receive(source, HEADER.size + run.nbytes, self._spec.deadline_s)
        header = HEADER.unpack_from(message) if message.nbytes >= HEADER.size else None
        if header != (MAGIC, command.generation, command.version, run.offset_bytes, run.nbytes):
            raise WeightsError(
                f"{self._node.name}: a bucket that was not asked for", got=header, expected=f"version {command.version}, {run}"
            )
        arena.write(command.version, run, message[HEADER.size :])


def _interleaved(asked: dict[int, list[Run]]) -> Iterator[tuple[int, Run]]:
    """Round robin over the sinks, each one's runs in order, so that none waits for another's whole transfer."""
    for turn in zip_longest(*asked.values()):
        yield from ((sink, run) for sink, run in zip(asked, turn, strict=True) if run is not None)


def _same_transfer(generation: int, version: int, command: TransferVersion) -> None:
    if (generation, version) != (command.generation, command.version):
        raise WeightsError(
            "a peer speaks of another transfer",
            got=f"generation {generation}, version {version}",
            expected=f"generation {command.generation}, version {command.version}",
        )


def main(spec_file: str) -> int:
    """Process entry. Exit status: 0 after Stop, 2 where the user can put it right, 1 otherwise."""
    die_with_parent()
    channel = None
    try:
        spec = read_spec(Path(spec_file), RelaySpec)
        from rose_hpc.weights.transport.mpi import MpiTransport

        channel = WorkerChannel(spec.control_dir, f"relay-{os.getpid()}", spec.lease_ttl_s)  # until its rank is known
        transport = MpiTransport(len(spec.nodes), spec.deadline_s)
        channel = WorkerChannel(spec.control_dir, f"relay-{transport.rank}", spec.lease_ttl_s)
        channel.hello(WorkerUp(world_size=transport.size))
        channel.serve(Relay(spec, transport).transfer)
    except RoseError as error:
        if channel is not None and not isinstance(error, ControlError):
            channel.fail(error)
        return report_failure(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
