"""Real relays under a real mpiexec, driven by the real control API."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from rose_hpc.control import make_token, publish_address
from rose_hpc.errors import RunFailed, UsageError
from rose_hpc.http_api import base_url, serving, tcp_site
from rose_hpc.launch.preflight import find_mpiexec
from rose_hpc.messages import TransferVersion, VersionTransferred
from rose_hpc.rollout.api import control_app
from rose_hpc.rollout.workers import WorkerPool
from rose_hpc.weights.arena import Arena
from rose_hpc.weights.publisher import WeightPublisher
from rose_hpc.weights.relay import RelayNode, RelaySpec

pytestmark = pytest.mark.mpi

SINKS = 2
WORLD = [f"relay-{r}" for r in range(1 + SINKS)]


def spec_in(tmp_path, deadline_s=10.0):
    nodes = [RelayNode(name="trainer", role="source", arena=tmp_path / "arena0")]
    nodes += [RelayNode(name=f"node{i}", role="sink", arena=tmp_path / f"arena{i}") for i in range(1, 1 + SINKS)]
    return RelaySpec(
        control_dir=tmp_path / "control", nodes=nodes, bucket_bytes=1 << 20, retained_versions=2, deadline_s=deadline_s, lease_ttl_s=5
    )


def relay_command(tmp_path, deadline_s=10.0):
    path = tmp_path / "spec.json"
    path.write_text(spec_in(tmp_path, deadline_s).model_dump_json())
    return [sys.executable, "-m", "rose_hpc.weights.relay", str(path)]


@asynccontextmanager
async def controller_in(tmp_path):
    """The control API, and the worker pool behind it."""
    token, workers = make_token(tmp_path / "control"), WorkerPool()
    async with serving(control_app(token, workers, asyncio.Queue(), dict), tcp_site("127.0.0.1", 0)) as runner:
        publish_address(tmp_path / "control", base_url(runner))
        yield workers


def start(tmp_path, command):
    with (tmp_path / "relays.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env={**os.environ, "HYDRA_LAUNCHER": "fork"})


def end(process):
    if process.poll() is None:
        process.terminate()
    try:
        return process.wait(15)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def segments():
    return {p.name for p in Path("/dev/shm").glob("mpich_shm_*")}


def weights(version):
    g = torch.Generator().manual_seed(version)
    return {"w": torch.randn(1000, 1000, generator=g), "b": torch.randn(77, generator=g)}


def test_versions_reach_every_sink_bit_by_bit_and_nothing_is_left_behind(tmp_path):
    before = segments()

    async def scenario():
        async with controller_in(tmp_path) as workers:
            world = start(tmp_path, [find_mpiexec("mpiexec"), "-n", str(len(WORLD)), *relay_command(tmp_path)])
            try:
                hello = await workers.wait_for(WORLD, 60)
                assert all(h.world_size == len(WORLD) for h in hello.values())
                assert segments() <= before
                for version in range(3):
                    digest = WeightPublisher(weights(version), tmp_path / "arena0", 0, 1, "float32").publish(version).digest
                    replies = await workers.call(
                        WORLD, lambda i, v=version, d=digest: TransferVersion(i, v + 1, v, d), VersionTransferred, 30
                    )
                    assert all(replies[w].verified and replies[w].received_bytes >= 4_000_308 for w in WORLD[1:])
                    assert replies[WORLD[0]].sent_bytes >= SINKS * 4_000_308
                    for sink in range(1, 1 + SINKS):
                        arena = Arena.open(tmp_path / f"arena{sink}")
                        spec = arena.layout.by_name["w"]
                        got = torch.frombuffer(
                            bytearray(arena.map_version(version)[spec.offset_bytes :][: spec.nbytes]), dtype=torch.float32
                        )
                        assert torch.equal(got.view(1000, 1000), weights(version)["w"])
                workers.stop_all()
                await asyncio.to_thread(world.wait, 20)
                assert world.returncode == 0
            finally:
                await asyncio.to_thread(end, world)

    asyncio.run(scenario())
    assert Arena.open(tmp_path / "arena1").versions() == [1, 2]  # retained_versions = 2
    assert segments() <= before


def test_a_relay_killed_in_the_world_is_an_error_within_the_deadline_not_a_hang(tmp_path):
    before = segments()

    async def scenario():
        async with controller_in(tmp_path) as workers:
            world = start(tmp_path, [find_mpiexec("mpiexec"), "-n", str(len(WORLD)), *relay_command(tmp_path, deadline_s=2.0)])
            try:
                await workers.wait_for(WORLD, 60)
                victim = max(relay_pids(world.pid))
                os.kill(victim, signal.SIGKILL)
                digest = WeightPublisher(weights(0), tmp_path / "arena0", 0, 1, "float32").publish(0).digest
                begun = time.monotonic()
                with pytest.raises(RunFailed):
                    await workers.call(WORLD, lambda i: TransferVersion(i, 1, 0, digest), VersionTransferred, 8)
                assert time.monotonic() - begun < 15
            finally:
                await asyncio.to_thread(end, world)

    asyncio.run(scenario())
    assert segments() <= before and not relay_pids_of(tmp_path)


def test_a_launcher_that_starts_separate_worlds_is_reported_as_what_it_is(tmp_path):
    async def scenario():
        async with controller_in(tmp_path) as workers:
            worlds = [start(tmp_path, relay_command(tmp_path)) for _ in range(2)]  # as a foreign mpiexec would
            try:
                with pytest.raises(UsageError, match="separate worlds"):
                    await workers.wait_for(WORLD, 60)
                assert [await asyncio.to_thread(w.wait, 20) for w in worlds] == [2, 2]
            finally:
                for world in worlds:
                    await asyncio.to_thread(end, world)

    asyncio.run(scenario())
    assert "separate worlds" in (tmp_path / "relays.log").read_text()


def test_relays_end_by_themselves_when_the_controller_is_gone(tmp_path):
    async def scenario():
        async with controller_in(tmp_path) as workers:
            world = start(tmp_path, [find_mpiexec("mpiexec"), "-n", str(len(WORLD)), *relay_command(tmp_path)])
            await workers.wait_for(WORLD, 60)
            return world

    world = asyncio.run(scenario())
    try:
        assert world.wait(20) != 0
    finally:
        end(world)
    assert "does not answer" in (tmp_path / "relays.log").read_text()


def relay_pids(ancestor):
    """Pids of relays below a process, read from /proc."""
    parents, relays = {}, []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
            command = (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue
        pid = int(stat.parent.name)
        parents[pid] = int(fields[1])
        if b"rose_hpc.weights.relay" in command and b"python" in command.split(b"\0")[0]:
            relays.append(pid)
    return [p for p in relays if ancestor in _ancestors(p, parents)]


def _ancestors(pid, parents):
    while pid in parents:
        pid = parents[pid]
        yield pid


def relay_pids_of(tmp_path):
    """Pids of processes that run this test's relay spec."""
    wanted, found = str(tmp_path / "spec.json").encode(), []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if wanted in file.read_bytes():
                found.append(int(file.parent.name))
        except OSError:
            continue
    return found
