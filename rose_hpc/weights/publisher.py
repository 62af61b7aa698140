"""Trainer side of the weight path: each rank writes the slices that it owns into the node's arena. No rank gathers a tensor.

    publisher = WeightPublisher(module, arena=Path("/dev/shm/…/trainer"), rank=0, world_size=2, wire_dtype="bfloat16")
    publisher.publish(version=1)           # every rank; then the relays carry the version

Ownership is read from DTensor placements and meshes: FSDP2 (uneven shards included) and HSDP, where the first replica
owns. A plain tensor is owned by rank 0. Tied parameters appear once, under the name that the module lists first.

Not supported yet: strided shards (tensor parallel × FSDP); they are refused, never written wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rose_hpc.errors import LayoutError
from rose_hpc.weights.arena import Arena, ShardRecord
from rose_hpc.weights.digest import combine, digest_run
from rose_hpc.weights.layout import Box, ParameterSpec, Run, build_layout, merge, runs_of

_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class PublishedShard:
    """What this rank wrote: the digest over its own slices (adds up over ranks mod 2^64) and their bytes."""

    version: int
    digest: int
    shard_bytes: int


class WeightPublisher:
    """Publishes versions of a module or of a mapping name → tensor. One instance per trainer rank."""

    def __init__(
        self,
        source: torch.nn.Module | Mapping[str, torch.Tensor],
        arena: Path,
        rank: int,
        world_size: int,
        wire_dtype: str = "bfloat16",
        retained_versions: int = 4,
    ) -> None:
        if not 0 <= rank < world_size:
            raise LayoutError("rank outside the world", got=rank, expected=f"0 to {world_size - 1}")
        self._tensors = dict(source.named_parameters()) if isinstance(source, torch.nn.Module) else dict(source)
        self._rank, self._retained = rank, retained_versions
        self._arena = Arena.create(arena, build_layout(((n, t.shape) for n, t in self._tensors.items()), wire_dtype))
        specs = self._arena.layout.by_name
        self._slices = {name: owned_runs(specs[name], tensor, rank) for name, tensor in self._tensors.items()}

    @property
    def layout_fingerprint(self) -> str:
        return self._arena.layout.fingerprint

    def publish(self, version: int) -> PublishedShard:
        """Write this rank's slices as `version` and mark them complete. Raises EnvironmentFault when the arena is full."""
        runs = [run for owned in self._slices.values() for run in owned]
        self._arena.prune(self._retained - 1)
        self._arena.reserve(version, sum(r.nbytes for r in runs))
        digest = combine([self._write(version, name) for name in self._tensors])
        self._arena.complete_shard(ShardRecord(version, self._rank, digest, tuple(merge(runs))))
        return PublishedShard(version, digest, sum(r.nbytes for r in runs))

    @torch.no_grad()
    def _write(self, version: int, name: str) -> int:
        """Digest of what this rank owns of one parameter, after writing it."""
        runs = self._slices[name]
        if not runs:
            return 0
        content = wire_bytes(self._tensors[name], self._arena.layout.dtype)
        digests, start = [], 0
        for run in runs:
            part = content[start : start + run.nbytes]
            self._arena.write(version, run, part)
            digests.append(digest_run(self._arena.layout, run, part))
            start += run.nbytes
        return combine(digests)


def owned_runs(spec: ParameterSpec, tensor: torch.Tensor, rank: int) -> list[Run]:
    """The byte runs of the image that this rank owns of one parameter; empty where another rank owns it.

    Raises LayoutError on placements other than Shard and Replicate.
    """
    if not isinstance(tensor, DTensor):
        return runs_of(spec, Box((0,) * len(spec.shape), spec.shape)) if rank == 0 else []
    placements, coordinate = tensor.placements, tensor.device_mesh.get_coordinate()
    if any(type(p) not in (Shard, Replicate) for p in placements):
        raise LayoutError(f"{spec.name}: placement not supported", got=placements, expected="Shard or Replicate on every mesh axis")
    if coordinate is None or any(isinstance(p, Replicate) and c for p, c in zip(placements, coordinate, strict=True)):
        return []
    sizes, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, placements)
    if 0 in sizes:
        return []
    return runs_of(spec, Box(tuple(starts), tuple(sizes)))


def wire_bytes(tensor: torch.Tensor, wire_dtype: str) -> np.ndarray:
    """This rank's local values in the wire dtype as uint8 [local bytes], row-major, on the host."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    values = local.detach().to(device="cpu", dtype=_TORCH_DTYPES[wire_dtype]).contiguous()
    return values.view(torch.uint8).reshape(-1).numpy()
