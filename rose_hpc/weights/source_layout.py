"""What every trainer rank holds of the image, read from DTensor placements and device meshes. No communication: each rank computes all.

    tensor                          held by
    plain                           rank 0 (other ranks' copies are not trusted to be equal)
    DTensor, Shard, _StridedShard   the rank at each coordinate: its rows, columns, … of the dim; uneven and empty parts included
    DTensor, Replicate              every rank along that mesh axis: the routing plan shares the bytes out
    mesh is a slice of a larger     its first copy along the axes that are not in it (they are said to be equal by nobody)
    Partial, anything else          refused

Invariants (asserted by the tests)
- Laid end to end, the runs of a rank's part of a parameter are its `to_local()` flattened row-major. Placements only ever take
  increasing indices of a dim, so these runs are also in the order of the image.
- The ranks' parts cover the parameter, and only replicas overlap.

`_StridedShard(dim, sf)` is what FSDP2 leaves of a dim that tensor parallelism had sharded before: the dim is cut into sf chunks,
each of these over the mesh axis, and a rank takes its piece of every chunk. Mesh axes apply from left to right. With uneven sizes
this can differ from what FSDP2 stored (it sharded from right to left): such layouts are refused on every rank, as torch's own
`full_tensor()` would be wrong for them.

What it does not do: read values (publisher.py) or share bytes out (routing.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from rose_hpc.errors import LayoutError
from rose_hpc.weights.layout import ITEM_BYTES, ImageLayout, ParameterSpec, Runs, grid_runs

Axis = tuple[Shard | _StridedShard, int, int]  # placement, size of the mesh axis, coordinate on it


@dataclass(frozen=True)
class LocalParameter:
    """This rank's part of one parameter. runs: laid end to end they are the local tensor flattened, in the wire dtype."""

    name: str
    runs: Runs


@dataclass(frozen=True)
class LocalSlices:
    """Bytes of one parameter's flattened local tensor (wire dtype) that belong to a stream, in the stream's order."""

    name: str
    slices: Runs


@dataclass(frozen=True)
class SourceLayout:
    """owned: rank → its runs of the image, merged; local: this rank's part of each parameter that it holds something of."""

    owned: Mapping[int, Runs]
    local: tuple[LocalParameter, ...]


def read_source(tensors: Mapping[str, torch.Tensor], layout: ImageLayout, rank: int, world_size: int) -> SourceLayout:
    """What all ranks hold of these parameters. layout: built from their names and full shapes, in any dtype.

    Raises LayoutError: placements that are not supported, a mesh over other ranks than 0 … world_size − 1, or a local tensor whose
    size is not what its placements say.
    """
    parts: dict[int, list[Runs]] = {r: [] for r in range(world_size)}
    local: list[LocalParameter] = []
    known: dict[object, dict[int, Runs]] = {}
    for spec in layout.parameters:
        tensor = tensors[spec.name]
        for holder, runs in _holders(spec, tensor, world_size, known).items():
            parts[holder].append(runs)
            if holder == rank:
                _check_local(spec, tensor, runs)
                local.append(LocalParameter(spec.name, runs))
    return SourceLayout({r: Runs.joined(p).merged() for r, p in parts.items()}, tuple(local))


def slices_of(local: Sequence[LocalParameter], stream: Runs, layout: ImageLayout) -> tuple[LocalSlices, ...]:
    """Where the bytes of a stream of this rank lie in its local tensors, parameter by parameter, in the order of the stream.

    Raises LayoutError when the stream has bytes that the rank does not hold, or cuts an element.
    """
    found: list[LocalSlices] = []
    ends = stream.ends
    for part in local:
        spec = layout.by_name[part.name]
        first = int(np.searchsorted(ends, spec.offset_bytes, "right"))
        last = int(np.searchsorted(stream.offsets, spec.offset_bytes + spec.nbytes))
        here = _intersection(part.runs, stream[first:last])
        if len(here):
            at = np.searchsorted(part.runs.offsets, here.offsets, "right") - 1
            starts = part.runs.starts_in_concatenation()[at] + here.offsets - part.runs.offsets[at]
            found.append(LocalSlices(part.name, Runs(starts, here.sizes).joined_neighbours()))
    nbytes = sum(f.slices.nbytes for f in found)
    if nbytes != stream.nbytes:
        raise LayoutError("a stream asks for bytes that this rank does not hold", got=f"{nbytes} bytes held", expected=f"{stream.nbytes}")
    if any(((f.slices.offsets | f.slices.sizes) % layout.item_bytes).any() for f in found):
        raise LayoutError("a stream cuts an element", expected=f"multiples of {layout.item_bytes} bytes")
    return tuple(found)


def _intersection(one: Runs, other: Runs) -> Runs:
    """Bytes in both (each sorted), cut wherever a run of either begins or ends."""
    edges = np.unique(np.concatenate([one.offsets, one.ends, other.offsets, other.ends]))
    starts = edges[:-1]
    both = _covers(one, starts) & _covers(other, starts)
    return Runs(starts[both], np.diff(edges)[both])


def _covers(runs: Runs, points: NDArray[np.int64]) -> NDArray[np.bool_]:
    at = np.searchsorted(runs.offsets, points, "right")
    return np.append(-1, runs.ends)[at] > points


# ── who holds what ──


def _holders(spec: ParameterSpec, tensor: torch.Tensor, world_size: int, known: dict[object, dict[int, Runs]]) -> dict[int, Runs]:
    """Rank → its runs in local order. known: the same for a parameter at offset 0, by what it depends on: layers are alike."""
    if not isinstance(tensor, DTensor):
        return {0: Runs([spec.offset_bytes], [spec.nbytes])} if spec.nbytes else {}
    key = (spec.shape, tuple(tensor.placements), tensor.device_mesh)
    if key not in known:
        known[key] = _sharded(ParameterSpec(spec.name, spec.shape, spec.dtype, 0), tensor, world_size)
    return {rank: Runs(runs.offsets + spec.offset_bytes, runs.sizes) for rank, runs in known[key].items()}


def _sharded(spec: ParameterSpec, tensor: DTensor, world_size: int) -> dict[int, Runs]:
    placements = tensor.placements
    if any(type(p) not in (Shard, _StridedShard, Replicate) for p in placements):
        raise LayoutError(
            f"{spec.name}: placement not supported",
            got=placements,
            expected="Shard, _StridedShard or Replicate on every mesh axis",
            remedy="reduce Partial values before publishing",
        )
    ranks = _owning_ranks(tensor.device_mesh, world_size)
    held: dict[int, Runs] = {}
    for coordinate in itertools.product(*map(range, ranks.shape)):
        axes = [(p, n, c) for p, n, c in zip(placements, ranks.shape, coordinate, strict=True) if isinstance(p, (Shard, _StridedShard))]
        dims = [_dim_ranges(spec, dim, [a for a in axes if a[0].dim == dim]) for dim in range(len(spec.shape))]
        if len(runs := grid_runs(spec, dims)):
            held[int(ranks[coordinate])] = runs
    return held


def _owning_ranks(mesh: DeviceMesh, world_size: int) -> NDArray[np.int64]:
    """Ranks by mesh coordinate; of a slice of a larger mesh, the copy that begins at the larger mesh's first rank."""
    root = mesh._get_root_mesh().mesh.numpy().reshape(-1).astype(np.int64)
    if sorted(root.tolist()) != list(range(world_size)):
        raise LayoutError(
            "the device mesh is not over all trainer ranks",
            got=f"ranks {sorted(root.tolist())[:8]}",
            expected=f"0 to {world_size - 1}",
            remedy="slice every mesh from one init_device_mesh over all ranks",
        )
    places = np.argsort(root)[mesh.mesh.numpy()]  # of this copy, in the larger mesh; copies are translates of each other
    owning: NDArray[np.int64] = root[places - places.min()]
    return owning


def _dim_ranges(spec: ParameterSpec, dim: int, axes: Sequence[Axis]) -> Runs:
    """Indices of a dim that a rank holds, as ranges (first, count), in its local order."""
    whole = Runs([0], [spec.shape[dim]])
    held = _applied(whole, axes)
    for k, (placement, _, _) in enumerate(axes):
        inner = axes[k + 1 :]
        if isinstance(placement, _StridedShard) and placement.split_factor == math.prod(n for _, n, _ in inner):
            outer_last = [*axes[:k], *inner, (Shard(dim), *axes[k][1:])]
            if _applied(whole, outer_last).joined_neighbours() != held.joined_neighbours():
                raise LayoutError(
                    f"{spec.name}: tensor parallel × FSDP parts of dim {dim} are too uneven to tell which rank holds what",
                    got=f"extent {spec.shape[dim]} over {[n for _, n, _ in axes]}",
                    expected="an extent for which both orders of sharding agree",
                    remedy="pad the dim to a multiple of the ranks that share it",
                )
    return held


def _applied(ranges: Runs, axes: Sequence[Axis]) -> Runs:
    for placement, size, coordinate in axes:
        if isinstance(placement, _StridedShard):
            factor = int(placement.split_factor)
            chunks = [_chunk(ranges, factor, j) for j in range(factor)]
            ranges = Runs.joined(_chunk(chunk, size, coordinate) for chunk in chunks)
        else:
            ranges = _chunk(ranges, size, coordinate)
    return ranges


def _chunk(ranges: Runs, count: int, place: int) -> Runs:
    """The place-th of `count` chunks, as torch.chunk cuts: all of the ceiling's size, the last ones shorter or empty."""
    extent = ranges.nbytes
    size = -(-extent // count)
    return ranges.span(min(size * place, extent), min(size * (place + 1), extent))


def _check_local(spec: ParameterSpec, tensor: torch.Tensor, runs: Runs) -> None:
    held = tensor.to_local().numel() if isinstance(tensor, DTensor) else tensor.numel()
    if held != runs.nbytes // ITEM_BYTES[spec.dtype]:
        raise LayoutError(
            f"{spec.name}: the local tensor is not what its placements say",
            got=f"{held} elements",
            expected=runs.nbytes // ITEM_BYTES[spec.dtype],
        )
