"""Real relay processes of a real run's kinds, commanded through the real control API, with the means to hurt them."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import torch

from rose_hpc.control import make_token, publish_address
from rose_hpc.http_api import base_url, serving, tcp_site
from rose_hpc.launch.preflight import find_mpiexec
from rose_hpc.rollout.api import control_app
from rose_hpc.rollout.distribution import Distribution
from rose_hpc.rollout.known_arenas import Place
from rose_hpc.rollout.published import Published
from rose_hpc.rollout.workers import WorkerPool
from rose_hpc.weights.arena import Arena
from rose_hpc.weights.publisher import WeightPublisher
from rose_hpc.weights.relay_spec import RelayNode, RelaySpec

BUCKET_BYTES = 1 << 20


class Rows(list):
    def record(self, table, **row):
        self.append((table, row))

    def events(self, kind):
        return [r for t, r in self if t == "events" and r["kind"] == kind]


class RelayCluster:
    """relay-0 on the trainer's node and sinks relay-1 … relay-n; `world` of them share an MPI world, the others are alone."""

    def __init__(self, tmp_path, sinks=2, world=3, deadline_s=15.0, retained=4, opportunistic=(), bucket_bytes=BUCKET_BYTES):
        self.path, self.deadline_s, self.retained, self.bucket_bytes = tmp_path, deadline_s, retained, bucket_bytes
        self.names = [f"relay-{i}" for i in range(1 + sinks)]
        self.in_world = self.names[:world]
        kinds = {name: "opportunistic" if name in opportunistic else "dedicated" for name in self.names[1:]}
        self.places = {"relay-0": Place("trainer", "n0", ranks=(0,))}
        self.places |= {n: Place("serving" if k == "opportunistic" else "rollout", n, feeds=k) for n, k in kinds.items()}
        self.workers, self.rows = WorkerPool(), Rows()
        self.distribution = Distribution(self.workers, self.places, self.rows, deadline_s, retained)
        self.processes = {}
        self.publisher = None

    def arena(self, name):
        return self.path / f"arena-{name}"

    @asynccontextmanager
    async def running(self):
        """The control API and every relay; all are ended on the way out."""
        token = make_token(self.path / "control")
        async with serving(control_app(token, self.workers, asyncio.Queue(), dict), tcp_site("127.0.0.1", 0)) as runner:
            publish_address(self.path / "control", base_url(runner))
            try:
                if len(self.in_world) > 1:
                    self.start_world()
                for name in self.names:
                    if name not in self.in_world or len(self.in_world) == 1:
                        self.start(name)
                yield self
            finally:
                await asyncio.to_thread(self.end)

    def spec(self, names, world=""):
        nodes = [RelayNode(name=n, arena=self.arena(n), is_source=n == "relay-0") for n in names]
        spec = RelaySpec(
            control_dir=self.path / "control",
            nodes=nodes,
            world=world,
            bucket_bytes=self.bucket_bytes,
            retained_versions=self.retained,
            deadline_s=self.deadline_s,
            lease_ttl_s=10,
        )
        path = self.path / f"spec-{names[0]}-{world}.json"
        path.write_text(spec.model_dump_json())
        return str(path)

    def start_world(self):
        spec = self.spec(self.in_world, "w0")
        mpiexec = [find_mpiexec("mpiexec"), "-disable-auto-cleanup", "-n", str(len(self.in_world))]
        self._start("world", [*mpiexec, sys.executable, "-m", "rose_hpc.weights.relay_keeper", spec])

    def start(self, name):
        """One relay alone, by TCP; or again, after `kill`."""
        self._start(name, [sys.executable, "-m", "rose_hpc.weights.relay", self.spec([name]), name])

    def start_trainer(self, seed):
        """A trainer of one rank in a process of its own (chaos_trainer.py), on the node of relay-0."""
        script = Path(__file__).with_name("chaos_trainer.py")
        arguments = [self.path / "control", self.arena("relay-0"), seed, self.bucket_bytes, self.retained]
        self._start("trainer-0", [sys.executable, str(script), *map(str, arguments)])

    def _start(self, key, command):
        with (self.path / f"{key}.log").open("ab") as log:
            environment = {**os.environ, "HYDRA_LAUNCHER": "fork", "OMP_NUM_THREADS": "1"}
            self.processes[key] = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment)

    def pid(self, name):
        """Process id of the relay itself."""
        if name in self.processes:
            return self.processes[name].pid
        world = psutil.Process(self.processes["world"].pid)
        for process in world.children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has just ended
                line = " ".join(process.cmdline())
                if "rose_hpc.weights.relay " in line + " " and "relay_keeper" not in line and self._is(process, name, line):
                    return process.pid
        raise LookupError(name)

    def _is(self, process, name, line):
        return line.endswith(name) or process.environ().get("PMI_RANK") == str(self.in_world.index(name))

    def keeper(self, name):
        """The process that keeps a relay of the world."""
        return psutil.Process(self.pid(name)).parent()

    def kill(self, name):
        """SIGKILL. A relay of the world is started again by its keeper; of the others, nobody does."""
        os.kill(self.pid(name), signal.SIGKILL)
        if name in self.processes:
            self.processes.pop(name).wait(10)

    def leave(self, name):
        """SIGTERM to a relay that is alone, as its agent would send it."""
        process = self.processes.pop(name)
        process.terminate()
        process.wait(10)

    def wipe(self, name):
        """The node has lost its arena. Only while its relay is down."""
        shutil.rmtree(self.arena(name), ignore_errors=True)  # it may never have had one

    async def freeze(self, name, stopped_s):
        """SIGSTOP, and SIGCONT later."""
        pid = self.pid(name)
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(stopped_s)
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    # ── damage, as bad memory or a bad disk would do it: nobody is told ──

    def bucket_file(self, name, version, index):
        return self.arena(name) / f"v{version}" / f"s0.b{index}"

    def flip_bit(self, name, version, index, at):
        """In a stored bucket. at: byte offset, negative from the end."""
        with self.bucket_file(name, version, index).open("r+b") as file:
            where = file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(where)
            file.write(bytes([byte ^ 0x10]))

    def truncate(self, name, version, index):
        """A stored bucket loses its end. Another file under the old name: whoever has mapped the old one keeps it."""
        path = self.bucket_file(name, version, index)
        shorter = path.with_name(f".{path.name}.cut")
        shorter.write_bytes(path.read_bytes()[:-5])
        shorter.rename(path)

    def flip_lane(self, name, lane):
        """In the image."""
        image = np.memmap(self.arena(name) / "image", np.uint16, "r+")
        image[lane] ^= 0x10
        image.flush()

    def end(self):
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(5)

    async def up(self, names=None):
        await self.workers.wait_for(self.names if names is None else names, 60)

    def publish(self, weights, version):
        """Publish and tell the distribution. weights: the same mapping at every call."""
        if self.publisher is None:
            arena = self.arena("relay-0")
            self.publisher = WeightPublisher(weights, arena, retained_versions=self.retained, bucket_bytes=self.bucket_bytes)
        shard = self.publisher.publish(version)
        self.distribution.publish(Published(version, shard.base, shard.digest, shard.shard_bytes, {0: shard.stream_bytes}))
        return shard

    def image(self, name):
        return np.asarray(Arena.open(self.arena(name)).image()).copy()

    def state(self, name):
        return Arena.open(self.arena(name)).state()


def bits_of(weights):
    return np.concatenate([t.detach().view(torch.int16).reshape(-1).numpy().view(np.uint16) for t in weights.values()])


def change(weights, fraction, generator):
    """Some elements take a neighbouring bit pattern, as a small optimiser step makes them."""
    for tensor in weights.values():
        bits = tensor.view(torch.int16).view(-1)
        chosen = torch.rand(bits.shape, generator=generator) < fraction
        bits[chosen] += torch.randint(0, 2, (int(chosen.sum()),), generator=generator).to(torch.int16) * 2 - 1


def segments():
    """What MPI leaves in shared memory. Other prefixes are of programs that relays are not: they come and go with our neighbours."""
    return {p.name for p in Path("/dev/shm").glob("mpich_shm_*")}
