"""A GPU node for tests, through the whole of lending: a serving engine under the stand-in of MPS, and the operator's agent beside it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil
from mps_harness import GIB, Node, Process, gpu_uuid
from serving_specs import serving_spec
from small_engine import SmallEngine

from rose_hpc.config import GpuConfig
from rose_hpc.coserve.lease_client import LeaseClient
from rose_hpc.coserve.lease_messages import LeaseAsk, LendChange, LendStatus
from rose_hpc.coserve.operator_api import tell
from rose_hpc.coserve.quota.mps import Ceiling, MpsQuota
from rose_hpc.coserve.registry import AgentEntry, Registry
from rose_hpc.coserve.serving_agent import ServingAgent
from rose_hpc.coserve.serving_process import ServingProcess
from rose_hpc.coserve.specs import AttachSpec, ServeSpec, ServingSpec
from rose_hpc.weights.arena_home import ArenaHome

SERVER = Path(__file__).with_name("fake_server.py")
MEMORY_BYTES = 4 * GIB
START_S = 30


class SmallServer(ServingProcess):
    """The server's process is fake_server.py; its worker is a client of the stand-in, whose path is the only flag."""

    async def __aenter__(self) -> SmallServer:
        await self.start(server_command(self.spec))
        return self


def server_command(spec: ServingSpec) -> list[str]:
    """Its worker ends with it, as vLLM's do."""
    worker = [sys.executable, "-m", "rose_hpc.lifeline", spec.flags[0], "client"]
    return [sys.executable, str(SERVER), str(spec.socket), str(spec.board), str(spec.model_dir), *worker]


class Place:
    """folder: short, for sockets."""

    def __init__(self, folder: Path, node: Node) -> None:
        self.folder, self.node, self.uuid = folder, node, gpu_uuid()
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")
        gpu = GpuConfig(uuids=[self.uuid], mps_folder=node.root, mps_control=node.executable, memory_bytes=MEMORY_BYTES)
        serving = serving_spec(folder, model_dir=self.model, socket=folder / "users.sock", flags=[str(node.executable)])
        self.spec = ServeSpec(
            name="op",
            serving=serving,
            attach=AttachSpec(url=serving.url, board=serving.board, model="model"),
            registry=folder / "agents",
            logs_dir=folder / "logs",
            arena_root=folder,
            allow_models=[self.model],
            max_frac=0.5,
            gpu=gpu,
        )

    def told(self, **gpu: object) -> ServeSpec:
        """The specification with other words about the GPU."""
        return self.spec.model_copy(update={"gpu": self.spec.gpu.model_copy(update=gpu)})

    @contextmanager
    def served(self, environment: Mapping[str, str] | None = None) -> Iterator[Process]:
        """A server as an operator starts it by hand: the daemon first, then the server with its variables, or with others."""
        daemon = self.node.daemon(self.uuid)
        daemon.start()
        given = MpsQuota(daemon, Ceiling(1.0, GIB)).serving_environment() if environment is None else dict(environment)
        process = Process(server_command(self.spec.serving), given)
        try:
            assert process.says() == "up"
            yield process
        finally:
            process.kill()
            daemon.close()

    def small_engine(self, *worker: str) -> type[SmallEngine]:
        """Engines whose worker is a client of the stand-in, or another command."""
        return type("GpuEngine", (SmallEngine,), {"worker": worker or (str(self.node.executable), "client")})

    @asynccontextmanager
    async def agent(self, spec: ServeSpec | None = None, engine: type[SmallEngine] | None = None) -> AsyncIterator[AgentEntry]:
        """The operator's agent, in this process, once it lends."""
        with ArenaHome(self.folder) as home:
            agent = ServingAgent(self.spec if spec is None else spec, home, engine or self.small_engine())
            running = asyncio.create_task(agent.run())
            try:
                yield await self.entry(running)
            finally:
                running.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await running

    async def entry(self, running: asyncio.Task[int] | None = None, not_pid: int = 0) -> AgentEntry:
        """Of an agent that lends, another one than a killed one. Raises what the agent has raised."""
        async with asyncio.timeout(START_S):
            while not (there := [e for e in Registry(self.spec.registry).entries() if e.pid != not_pid]):
                if running is not None and running.done():
                    running.result()
                await asyncio.sleep(0.05)
        return there[0]

    def ask(self, **changes: object) -> LeaseAsk:
        values = {"run_id": "run-a", "executor_id": "lent-0", "model": str(self.model), "arena_bytes": 1000, "ceiling_frac": 0.3}
        return LeaseAsk(**{**values, **changes})  # type: ignore[arg-type]

    def events(self) -> list[str]:
        """What the stand-in has seen."""
        return (self.node.root / "log" / "events.log").read_text().splitlines()


@asynccontextmanager
async def borrowed(place: Place, entry: AgentEntry, **changes: object) -> AsyncIterator[LeaseClient]:
    """A lease whose engine is up."""
    async with LeaseClient(entry.url) as client:
        await client.ask(entry.key, place.ask(**changes))
        await client.until_up(START_S)
        yield client


async def operator(entry: AgentEntry, change: LendChange | None = None) -> LendStatus:
    return await asyncio.to_thread(tell, entry.operator_socket, change)


async def until_state(entry: AgentEntry, state: str) -> LendStatus:
    async with asyncio.timeout(START_S):
        while (status := await operator(entry)).state != state:
            await asyncio.sleep(0.05)
    return status


def engine_of(place: Place) -> psutil.Process:
    """The lent engine's process."""
    (engine,) = (p for p in psutil.Process().children() if any(word.endswith("fake_engine.py") for word in p.cmdline()))
    return engine
