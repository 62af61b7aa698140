"""The processes of one run over the shaped link: trainer ranks and their relay near, a relay with an arena per receiver far.

    ranks (near) ─ arena ─ relay-0 (near)  ══ link ══  [forwarder with a delay]  ── relay-1 … relay-n (far), an arena each

They are what a training run starts, but for the ranks, whose training is made up (link_rank.py). It knows nothing of versions.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose_hpc.bench.delay import read_address
from rose_hpc.bench.link_image import LinkImage
from rose_hpc.bench.link_rank import LinkRankSpec
from rose_hpc.bench.link_trees import RANKS
from rose_hpc.bench.shaped_link import ShapedLink, Side
from rose_hpc.config import WeightsConfig
from rose_hpc.errors import RunFailed
from rose_hpc.launch.processes import Supervisor
from rose_hpc.lifeline import parent_variable
from rose_hpc.messages import RelayAddress
from rose_hpc.weights.relay_spec import RelayNode, RelaySpec

SOURCE = "relay-0"
BUCKET_BYTES = WeightsConfig().bucket_bytes
START_DEADLINE_S = 120.0
DEADLINE_S = 60.0  # of one version
LEASE_TTL_S = 60.0
EXIT_S = 5.0  # for a process that was told to end
LOG_TAIL_CHARS = 1500


@dataclass(frozen=True)
class LinkSpec:
    """folder: new, in shared memory; real: folder of the real versions; receivers: how many; seed: of what changes."""

    folder: Path
    image: LinkImage
    real: Path
    receivers: int
    seed: int

    @property
    def sinks(self) -> list[str]:
        return [f"relay-{i + 1}" for i in range(self.receivers)]

    @property
    def ranks(self) -> list[str]:
        return [f"trainer-{rank}" for rank in range(RANKS)]

    @property
    def control_dir(self) -> Path:
        return self.folder / "control"

    @property
    def logs_dir(self) -> Path:
        return self.folder / "logs"

    def arena(self, relay: str) -> Path:
        return self.folder / f"arena-{relay}"

    def dump(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.npy"


class LinkProcesses:
    """Starts, watches and ends them. `stop` may be called at any time, and twice."""

    def __init__(self, link: ShapedLink, spec: LinkSpec) -> None:
        self._link, self._spec = link, spec
        for folder in (spec.logs_dir, spec.folder / "specs"):
            folder.mkdir(parents=True)
        self._children = Supervisor(spec.logs_dir)
        self._ranks: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Ranks and relays; each says hello to the controller when it is up."""
        for rank in range(RANKS):
            self._start_rank(rank)
        self._start_relay(SOURCE, self._link.near, is_source=True)
        for name in self._spec.sinks:
            self._start_relay(name, self._link.far, is_source=False)

    def start_forwarder(self, source: RelayAddress, delay_s: float) -> RelayAddress:
        """Where the source is reached `delay_s` later, one way. Raises RunFailed."""
        announced, far = self._spec.folder / "forwarder.json", self._link.far
        with self._link.inside(far):
            where = [far.address, source.host, str(source.port)]
            self._children.start_module("forwarder", "rose_hpc.bench.delay", *where, f"{delay_s:g}", str(announced))
        host, port = read_address(announced, START_DEADLINE_S)
        return RelayAddress(host, port, source.key)

    async def tell_ranks(self, requests: Sequence[Mapping[str, Any]]) -> None:
        """One line to each, and its answer. Raises RunFailed."""
        for rank, request in zip(self._ranks, requests, strict=True):
            assert rank.stdin is not None
            rank.stdin.write(json.dumps(request).encode() + b"\n")
            rank.stdin.flush()
        for number, rank in enumerate(self._ranks):
            assert rank.stdout is not None
            answer = await asyncio.wait_for(asyncio.to_thread(rank.stdout.readline), DEADLINE_S)
            if answer != b"done\n":
                await asyncio.to_thread(rank.wait, EXIT_S)
                self.raise_ended()
                raise RunFailed(f"rank {number} of the link benchmark answers something else", got=answer, expected="done")

    def raise_ended(self) -> None:
        """Raises RunFailed when a rank or a relay has ended."""
        for child in self._children.ended():
            raise RunFailed(f"{child.name} of the link benchmark has ended", got=child.failure())
        for number, rank in enumerate(self._ranks):
            if rank.poll() is not None:
                log = (self._spec.logs_dir / f"rank{number}.log").read_text()
                raise RunFailed(f"rank {number} of the link benchmark has ended", got=log[-LOG_TAIL_CHARS:])

    def tell_ranks_to_end(self) -> None:
        for rank in self._ranks:
            if rank.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    rank.stdin.close()

    async def stop(self) -> None:
        """Everything down: what does not end by itself is killed."""
        self.tell_ranks_to_end()
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(rank.wait, EXIT_S)
            rank.kill()
            await asyncio.to_thread(rank.wait)
            if rank.stdout is not None:
                rank.stdout.close()
        self._ranks.clear()
        await asyncio.to_thread(self._children.stop_all)

    def _start_rank(self, rank: int) -> None:
        """Near; we talk to it over its standard input and output."""
        spec = LinkRankSpec(
            rank=rank,
            world_size=RANKS,
            control_dir=self._spec.control_dir,
            rendezvous=self._spec.folder / "rendezvous",
            arena=self._spec.arena(SOURCE),
            shapes=self._spec.image.shapes,
            real=self._spec.real,
            seed=self._spec.seed,
            bucket_bytes=BUCKET_BYTES,
            lease_ttl_s=LEASE_TTL_S,
            publish_deadline_s=START_DEADLINE_S,
        )
        path = self._write_spec(f"rank{rank}", spec.model_dump_json())
        env = {**os.environ, **parent_variable(), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        with self._link.inside(self._link.near), (self._spec.logs_dir / f"rank{rank}.log").open("ab") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "rose_hpc.bench.link_rank", str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                env=env,
            )
        self._ranks.append(process)

    def _start_relay(self, name: str, side: Side, is_source: bool) -> None:
        spec = RelaySpec(
            control_dir=self._spec.control_dir,
            nodes=[RelayNode(name=name, arena=self._spec.arena(name), is_source=is_source)],
            host=side.address,
            bucket_bytes=BUCKET_BYTES,
            deadline_s=DEADLINE_S,
            lease_ttl_s=LEASE_TTL_S,
        )
        path = self._write_spec(name, spec.model_dump_json())
        with self._link.inside(side):
            self._children.start_module(name, "rose_hpc.weights.relay", str(path))

    def _write_spec(self, name: str, content: str) -> Path:
        path = self._spec.folder / "specs" / f"{name}.json"
        path.write_text(content)
        return path
