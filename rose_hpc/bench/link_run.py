"""The engine itself over the shaped link: four trainer ranks and their relay near, a relay with an arena per receiver far.

    async with LinkRun(link, folder, image, receivers=8, seed=0) as run:      # processes up, version 0 at every receiver
        await run.change(0.003)                                               # not timed
        timing = await run.publish()                                          # from the command to the last verified receiver

Everything is what a training run uses: publisher, relays, transports, the controller's planner (rollout/distribution.py) and its control
API. The API listens on a Unix socket, so that commands and reports do not cross the link whose bytes are counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar, cast

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from rose_hpc.bench.delay import read_address
from rose_hpc.bench.link_image import LinkImage
from rose_hpc.bench.link_rank import LinkRankSpec, truth
from rose_hpc.bench.shaped_link import LinkCounters, ShapedLink, Side
from rose_hpc.control import make_token, publish_address
from rose_hpc.errors import DigestMismatch, RunFailed
from rose_hpc.http_api import serving
from rose_hpc.launch.processes import Supervisor
from rose_hpc.lifeline import parent_variable
from rose_hpc.messages import AgentUp, PublishVersion, RelayAddress, VersionWritten, WorkerUp
from rose_hpc.metrics.writer import MetricsClient
from rose_hpc.rollout.api import control_app
from rose_hpc.rollout.distribution import Distribution, Place, Published
from rose_hpc.rollout.workers import WorkerPool
from rose_hpc.weights.arena import Arena
from rose_hpc.weights.digest import combine
from rose_hpc.weights.relay_spec import RelayNode, RelaySpec

RANKS = 4
BUCKET_BYTES = 64 << 20
START_DEADLINE_S = 120.0
DEADLINE_S = 60.0  # of one version
LEASE_TTL_S = 60.0
LOOK_S = 0.2  # between looks at whether everybody lives
EXIT_S = 5.0  # for a process that was told to end
LOG_TAIL_CHARS = 1500
SOURCE = "relay-0"

T = TypeVar("T")


@dataclass(frozen=True)
class Delivery:
    """One version. seconds: until every receiver had it, verified; counted: over the link; encoded_bytes: of all messages.

    publish_s: until the last rank had reported; write_s: the longest time a rank spent publishing.
    """

    version: int
    seconds: float
    publish_s: float
    write_s: float
    encoded_bytes: int
    counted: LinkCounters
    receivers: Mapping[str, Mapping[str, float]]  # receiver → what its relay reported: transfer_s, apply_s


class WeightTransfer(Protocol):
    """What the link benchmark drives. The versions go up by one from 0, which `start` has brought over."""

    async def start(self) -> None: ...
    async def change(self, density: float) -> None:
        """Alter this fraction of the parameters' lanes on every rank."""
        ...

    async def publish(self) -> Delivery:
        """Bring the next version to every receiver. Raises RoseError."""
        ...

    async def mismatches(self) -> int:
        """Lanes of all receivers together that differ from the trainer's parameters."""
        ...

    async def stop(self) -> None: ...


class LinkRun:
    """Implements WeightTransfer with the project's own parts. folder: new, in shared memory; delay_s: one way, by a forwarder."""

    def __init__(
        self, link: ShapedLink, folder: Path, image: LinkImage, real: Path, receivers: int, seed: int, delay_s: float = 0.0
    ) -> None:
        self._link, self._folder, self._image, self._real, self._seed, self._delay_s = link, folder, image, real, seed, delay_s
        self._sinks = [f"relay-{i + 1}" for i in range(receivers)]
        self._workers, self._record = WorkerPool(), _Record()
        places = {SOURCE: Place("near", "near", tuple(range(RANKS)))}
        places |= {name: Place("far", name, feeds="dedicated") for name in self._sinks}
        self._distribution = Distribution(self._workers, places, cast(MetricsClient, self._record), DEADLINE_S)
        self._stack = contextlib.AsyncExitStack()
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._version = -1

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Everything up, and version 0 at every receiver. Raises RunFailed."""
        for name in ("logs", "specs"):
            (self._folder / name).mkdir(parents=True)
        await self._listen()
        self._children = self._stack.enter_context(Supervisor(self._folder / "logs"))
        self._start_ranks()
        self._start_relays()
        workers = [*(f"trainer-{r}" for r in range(RANKS)), SOURCE, *self._sinks]
        greetings = await self._while_all_live(self._workers.wait_for(workers, START_DEADLINE_S))
        self._lengthen(greetings[SOURCE])
        await self.change(0.0)
        await self.publish()

    async def stop(self) -> None:
        """Everything down; nothing is left in the folder that a process still writes."""
        for rank in self._ranks:
            if rank.stdin is not None:
                rank.stdin.close()
        self._workers.stop_all()
        with contextlib.suppress(RunFailed):
            await self._workers.drained(EXIT_S)
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(rank.wait, EXIT_S)
            rank.kill()
            await asyncio.to_thread(rank.wait)
            if rank.stdout is not None:
                rank.stdout.close()
        await self._stack.aclose()

    async def change(self, density: float) -> None:
        await self._tell_ranks([{"density": density}] * RANKS)

    async def publish(self) -> Delivery:
        self._version += 1
        version, before, start = self._version, self._link.counters(), time.monotonic()
        ranks = [f"trainer-{r}" for r in range(RANKS)]
        written = await self._while_all_live(self._workers.call(ranks, lambda i: PublishVersion(i, version), VersionWritten, DEADLINE_S))
        publish_s = time.monotonic() - start
        self._distribution.publish(_published(version, written))
        await self._while_all_live(self._distribution.bring(self._sinks, version))
        seconds = time.monotonic() - start
        encoded = sum(nbytes for w in written.values() for nbytes in w.streams.values())
        write_s = max(w.write_s for w in written.values())
        return Delivery(version, seconds, publish_s, write_s, encoded, self._link.counters().since(before), self._record.take(version))

    async def mismatches(self) -> int:
        paths = [self._folder / f"rank{r}.npy" for r in range(RANKS)]
        await self._tell_ranks([{"dump": str(path)} for path in paths])
        expected = truth([np.load(path, allow_pickle=False) for path in paths], self._image)
        for path in paths:
            path.unlink()
        return sum(int(np.count_nonzero(image != expected)) for image in self._images())

    def _images(self) -> Iterator[NDArray[np.uint16]]:
        for name in self._sinks:
            yield Arena.open(self._arena(name)).image()

    # ── starting ──

    async def _listen(self) -> None:
        control = self._folder / "control"
        token, path = make_token(control), self._folder / "api.sock"
        arrivals: asyncio.Queue[AgentUp] = asyncio.Queue()  # no agent comes
        app = control_app(token, self._workers, arrivals, dict)
        await self._stack.enter_async_context(serving(app, lambda runner: web.UnixSite(runner, path)))
        publish_address(control, f"unix:{path}")

    def _start_ranks(self) -> None:
        for rank in range(RANKS):
            spec = LinkRankSpec(
                rank=rank,
                world_size=RANKS,
                control_dir=self._folder / "control",
                rendezvous=self._folder / "rendezvous",
                arena=self._arena(SOURCE),
                real=self._real,
                copies=self._image.copies,
                seed=self._seed,
                bucket_bytes=BUCKET_BYTES,
                lease_ttl_s=LEASE_TTL_S,
                publish_deadline_s=START_DEADLINE_S,
            )
            path = self._write_spec(f"rank{rank}", spec.model_dump_json())
            self._ranks.append(self._popen("rose_hpc.bench.link_rank", path, self._folder / "logs" / f"rank{rank}.log"))

    def _popen(self, module: str, spec: Path, log: Path) -> subprocess.Popen[bytes]:
        """A rank, near; we talk to it over its standard input and output."""
        env = {**os.environ, **parent_variable(), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        with self._link.inside(self._link.near), log.open("ab") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", module, str(spec)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                env=env,
            )

    def _start_relays(self) -> None:
        self._start_relay(SOURCE, self._link.near, is_source=True)
        for name in self._sinks:
            self._start_relay(name, self._link.far, is_source=False)

    def _start_relay(self, name: str, side: Side, is_source: bool) -> None:
        spec = RelaySpec(
            control_dir=self._folder / "control",
            nodes=[RelayNode(name=name, arena=self._arena(name), is_source=is_source)],
            host=side.address,
            bucket_bytes=BUCKET_BYTES,
            deadline_s=DEADLINE_S,
            lease_ttl_s=LEASE_TTL_S,
        )
        path = self._write_spec(name, spec.model_dump_json())
        with self._link.inside(side):
            self._children.start_module(name, "rose_hpc.weights.relay", str(path))

    def _lengthen(self, hello: WorkerUp) -> None:
        """Put the forwarder between the source and everybody else."""
        if not self._delay_s or hello.relay is None:
            return
        announced = self._folder / "forwarder.json"
        with self._link.inside(self._link.far):
            target = [hello.relay.host, str(hello.relay.port)]
            self._children.start_module(
                "forwarder", "rose_hpc.bench.delay", self._link.far.address, *target, f"{self._delay_s:g}", str(announced)
            )
        host, port = read_address(announced, START_DEADLINE_S)
        relay = RelayAddress(host, port, hello.relay.key)
        self._workers.greet(SOURCE, WorkerUp(world_size=hello.world_size, relay=relay, arena_version=hello.arena_version))

    def _arena(self, relay: str) -> Path:
        return self._folder / f"arena-{relay}"

    def _write_spec(self, name: str, content: str) -> Path:
        path = self._folder / "specs" / f"{name}.json"
        path.write_text(content)
        return path

    async def _while_all_live(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result. Raises RunFailed as soon as a rank or a relay has ended."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=LOOK_S)
                self._raise_ended()
            return task.result()
        finally:
            task.cancel()

    def _raise_ended(self) -> None:
        for child in self._children.ended():
            raise RunFailed(f"{child.name} of the link benchmark has ended", got=child.failure())
        for number, rank in enumerate(self._ranks):
            if rank.poll() is not None:
                log = (self._folder / "logs" / f"rank{number}.log").read_text()
                raise RunFailed(f"rank {number} of the link benchmark has ended", got=log[-LOG_TAIL_CHARS:])

    # ── ranks ──

    async def _tell_ranks(self, requests: Sequence[Mapping[str, Any]]) -> None:
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
                self._raise_ended()
                raise RunFailed(f"rank {number} of the link benchmark answers something else", got=answer, expected="done")


class _Record:
    """In place of the metrics writer: keeps what the planner records of each receiver; a fault or a mismatch ends the benchmark."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, Mapping[str, float]]] = {}

    def record(self, table: str, /, **row: Any) -> None:
        if table != "syncs":
            raise RunFailed(f"{row.get('subject')}: {row.get('kind')}", got=row.get("detail"))
        if not row["verified"]:
            raise DigestMismatch(f"{row['receiver']} holds other bits than the trainer", got=f"version {row['version']}")
        kept = {key: float(row[key]) for key in ("transfer_s", "apply_s", "wire_bytes")}
        self._rows.setdefault(row["version"], {})[row["receiver"]] = kept

    def take(self, version: int) -> Mapping[str, Mapping[str, float]]:
        return self._rows.pop(version, {})


def _published(version: int, written: Mapping[str, VersionWritten]) -> Published:
    bases = {w.base for w in written.values()}
    return Published(
        version=version,
        base=bases.pop() if len(bases) == 1 else -1,
        digest=combine([w.digest for w in written.values()]),
        image_bytes=sum(w.shard_bytes for w in written.values()),
        streams={rank: written[f"trainer-{rank}"].streams for rank in range(RANKS)},
    )
