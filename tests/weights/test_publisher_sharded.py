"""Each rank publishes the slices it owns, and together they are the model, bit for bit: FSDP2 with uneven shards, HSDP."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from rose_hpc.weights.arena import Arena
from rose_hpc.weights.digest import combine, digest_image
from rose_hpc.weights.layout import merge

pytestmark = pytest.mark.ranks

RANK_PROGRAM = """
import json, sys
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from rose_hpc.errors import LayoutError
from rose_hpc.weights.publisher import WeightPublisher

folder, mode, rank, world = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
dist.init_process_group("cpu:gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world, timeout=timedelta(seconds=60))
try:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(151, 6), torch.nn.Linear(6, 13), torch.nn.Linear(13, 1), torch.nn.LayerNorm(1))
    if rank == 0:
        torch.save(model.state_dict(), folder / "full.pt")
    if mode == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
    else:
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "inner"))
    if mode == "tp":
        parallelize_module(model, mesh["inner"], {"1": ColwiseParallel(), "2": RowwiseParallel()})
        mesh = mesh["outer"]
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    try:
        shard = WeightPublisher(model, folder / "arena", rank, world, "float32").publish(3)
    except LayoutError as error:
        (folder / f"refused{rank}").write_text(str(error))
        sys.exit(0)
    (folder / f"shard{rank}.json").write_text(json.dumps([shard.version, shard.digest, shard.shard_bytes]))
    dist.barrier()
finally:
    dist.destroy_process_group()
"""


def run_ranks(folder, mode, world):
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RANK_PROGRAM, str(folder), mode]
    ranks = [subprocess.Popen([*command, str(r), str(world)], env=env, stderr=subprocess.PIPE, text=True) for r in range(world)]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=100)
            assert rank.returncode == 0, errors
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(10)


@pytest.mark.parametrize(("mode", "world"), [("fsdp", 3), ("hsdp", 4)])
def test_the_slices_of_all_ranks_are_the_model_bit_for_bit_and_each_byte_is_written_once(tmp_path, mode, world):
    run_ranks(tmp_path, mode, world)
    shards = [json.loads((tmp_path / f"shard{r}.json").read_text()) for r in range(world)]
    arena = Arena.open(tmp_path / "arena")
    image = arena.map_version(3, committed=False)
    full = torch.load(tmp_path / "full.pt", weights_only=True)
    for spec in arena.layout.parameters:
        got = image[spec.offset_bytes : spec.offset_bytes + spec.nbytes].view(np.float32).reshape(spec.shape)
        assert (got == full[spec.name].numpy()).all(), spec.name
    records = arena.shards(3)
    owned = merge(run for record in records for run in record.runs)  # raises when two ranks claim a byte
    assert sum(r.nbytes for r in owned) == arena.layout.image_bytes == sum(s[2] for s in shards)
    assert combine([s[1] for s in shards]) == digest_image(arena.layout, image)
    owners = [s for s in shards if s[2]]
    assert len(owners) == (world if mode == "fsdp" else world // 2)  # of two replicas, one publishes
    assert all(s[2] < arena.layout.image_bytes for s in shards)  # nobody holds all of it


def test_strided_shards_of_tensor_parallel_ranks_are_refused_rather_than_written_wrongly(tmp_path):
    run_ranks(tmp_path, "tp", 4)
    for rank in range(4):
        assert "placement not supported" in (tmp_path / f"refused{rank}").read_text()
    assert not list(tmp_path.glob("arena/*.img"))
