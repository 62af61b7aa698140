"""What each rank holds, read from placements: torch's own splitting is the reference, every rank in turn, no process started."""

import contextlib
import itertools
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from rose_hpc.errors import LayoutError
from rose_hpc.weights.layout import Run, Runs, build_layout
from rose_hpc.weights.source_layout import LocalParameter, LocalSlices, read_source, slices_of

S, R, SS = Shard, Replicate(), _StridedShard


@contextlib.contextmanager
def as_rank(rank, world_size):
    """This process as one rank of a world whose other ranks do not exist: meshes and local splitting work, collectives do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def numbered(shape):
    """A tensor whose every element is its own index."""
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape)


def elements(runs):
    """Indices that the runs cover in a float32 image, in order."""
    return Runs(runs.offsets // 4, runs.sizes // 4).expanded().tolist()


def seen_by(rank, mesh_shape, shape, placements):
    """(owned by every rank, own runs, own local elements) as this rank sees them."""
    world = int(np.prod(mesh_shape))
    with as_rank(rank, world):
        mesh = init_device_mesh("cpu", mesh_shape)
        tensor = distribute_tensor(numbered(shape), mesh, placements, src_data_rank=None)
        layout = build_layout([("before", (3,)), ("p", shape)], "float32")
        source = read_source({"before": torch.zeros(3), "p": tensor}, layout, rank, world)
        own = [elements(part.runs) for part in source.local if part.name == "p"]
        return source.owned, own, tensor.to_local().reshape(-1).int().tolist()


def check(mesh_shape, shape, placements):
    replicas = int(np.prod([n for n, p in zip(mesh_shape, placements, strict=True) if isinstance(p, Replicate)]))
    views = [seen_by(rank, mesh_shape, shape, placements) for rank in range(int(np.prod(mesh_shape)))]
    for rank, (owned, own, local) in enumerate(views):
        assert owned == views[0][0]  # every rank computes the same, of all ranks
        assert own == ([[k + 3 for k in local]] if local else [])  # and its own is its local tensor flattened
        assert elements(owned[rank]) == ([0, 1, 2] if rank == 0 else []) + [k + 3 for k in local]
    covered = sorted(k for _, _, local in views for k in local)
    assert covered == sorted(list(range(int(np.prod(shape)))) * replicas)


@pytest.mark.parametrize("rows", [1, 5, 6, 7, 12])
@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [
        ((3,), [S(0)]),
        ((5,), [S(0)]),
        ((3,), [S(1)]),
        ((3,), [R]),
        ((2, 2), [R, S(0)]),
        ((2, 2), [S(0), R]),
        ((2, 3), [S(0), S(1)]),
        ((2, 3), [S(1), S(0)]),
        ((2, 2), [S(0), S(0)]),
        ((2, 3), [S(0), SS(0, split_factor=2)]),
        ((2, 2), [SS(0, split_factor=2), S(0)]),
        ((2, 2), [SS(0, split_factor=2), R]),
        ((3,), [SS(0, split_factor=3)]),
        ((2, 2, 2), [R, SS(0, split_factor=2), S(0)]),
        ((2, 2), [SS(1, split_factor=2), S(1)]),
    ],
)
def test_the_runs_of_each_rank_are_its_local_tensor_flattened(mesh_shape, placements, rows):
    check(mesh_shape, (rows, 5), placements)


@pytest.mark.parametrize("shape", [(8,), (3, 4, 5), (2, 7, 3), (4, 0)])
def test_tensors_of_other_ranks_are_split_alike(shape):
    dims = range(len(shape))
    for a, b in itertools.product(dims, dims):
        check((2, 2), shape, [S(a), S(b)])


def test_strided_parts_that_the_two_orders_of_sharding_give_to_different_ranks_are_refused_by_every_rank():
    """7 rows, tensor parallel over 2 (4 + 3), then FSDP over 3: row 6 is the second tensor rank's; placements say the first's."""
    for rank in range(6):
        with pytest.raises(LayoutError, match="too uneven"):
            seen_by(rank, (3, 2), (7, 2), [SS(0, split_factor=2), S(0)])


def test_partial_values_are_refused():
    with as_rank(0, 2):
        tensor = DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (2,)), [Partial()])
        with pytest.raises(LayoutError, match="placement not supported"):
            read_source({"p": tensor}, build_layout([("p", (4,))], "float32"), 0, 2)


def test_of_a_slice_of_a_larger_mesh_the_first_copy_owns_whichever_rank_looks():
    """A tensor that is sharded over one axis only: nobody says that the copies along the other axis are equal."""
    layout = build_layout([("a", (4,)), ("b", (4,)), ("flat", (4,))], "float32")
    for rank in range(4):
        with as_rank(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
            meshes = {"a": mesh["a"], "b": mesh["b"], "flat": mesh._flatten("flat")}
            tensors = {n: distribute_tensor(numbered((4,)), m, [S(0)], src_data_rank=None) for n, m in meshes.items()}
            source = read_source(tensors, layout, rank, 4)
            own = {part.name for part in source.local}
        held = {r: elements(runs) for r, runs in source.owned.items()}
        assert held == {0: [0, 1, 4, 5, 8], 1: [6, 7, 9], 2: [2, 3, 10], 3: [11]}
        assert own == {0: {"a", "b", "flat"}, 1: {"b", "flat"}, 2: {"a", "flat"}, 3: {"flat"}}[rank]


def test_a_mesh_that_is_not_over_all_ranks_is_refused():
    with as_rank(0, 4):
        tensor = DTensor.from_local(torch.ones(2), DeviceMesh("cpu", [0, 1]), [S(0)])
        with pytest.raises(LayoutError, match="not over all"):
            read_source({"p": tensor}, build_layout([("p", (4,))], "float32"), 0, 4)


def test_a_local_tensor_of_another_size_than_its_placements_say_is_refused():
    with as_rank(0, 2):
        tensor = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (2,)), [S(0)], run_check=False, shape=(4,), stride=(1,))
        with pytest.raises(LayoutError, match="not what its placements say"):
            read_source({"p": tensor}, build_layout([("p", (4,))], "float32"), 0, 2)


def test_plain_tensors_belong_to_rank_0():
    layout = build_layout([("scalar", ()), ("p", (4,)), ("empty", (0, 3))], "bfloat16")
    tensors = {"scalar": torch.tensor(1.0), "p": torch.ones(4), "empty": torch.ones(0, 3)}
    for rank in range(2):
        source = read_source(tensors, layout, rank, 2)
        assert source.owned == {0: [Run(0, 10)], 1: []}
        assert source.local == ((LocalParameter("scalar", Runs([0], [2])), LocalParameter("p", Runs([2], [8]))) if rank == 0 else ())


# ── streams ──

LAYOUT = build_layout([("a", (4, 4)), ("b", (3,)), ("c", (2, 2))], "bfloat16")
LOCAL = (  # columns 1 and 2 of a, nothing of b, all of c
    LocalParameter("a", Runs([2, 10, 18, 26], [4] * 4)),
    LocalParameter("c", Runs([38], [8])),
)


def test_the_slices_of_a_stream_are_where_its_bytes_lie_in_the_local_tensors():
    whole = Runs([2, 10, 18, 26, 38], [4, 4, 4, 4, 8])
    assert slices_of(LOCAL, whole, LAYOUT) == (LocalSlices("a", Runs([0], [16])), LocalSlices("c", Runs([0], [8])))
    some = Runs([4, 18, 26, 42], [2, 4, 2, 4])
    assert slices_of(LOCAL, some, LAYOUT) == (LocalSlices("a", Runs([2, 8], [2, 6])), LocalSlices("c", Runs([4], [4])))
    assert slices_of(LOCAL, Runs([], []), LAYOUT) == ()


def test_a_stream_with_bytes_that_the_rank_does_not_hold_is_refused():
    for foreign in (Runs([0], [4]), Runs([32], [2]), Runs([2], [6]), Runs([46], [2])):
        with pytest.raises(LayoutError, match="does not hold"):
            slices_of(LOCAL, foreign, LAYOUT)


def test_a_stream_that_cuts_an_element_is_refused():
    with pytest.raises(LayoutError, match="cuts an element"):
        slices_of([LocalParameter("p", Runs([0], [16]))], Runs([0], [6]), build_layout([("p", (4,))], "float32"))


def test_a_matrix_sharded_by_columns_is_planned_without_a_loop_over_its_rows():
    with as_rank(3, 8):
        mesh = init_device_mesh("cpu", (8,))
        tensor = distribute_tensor(torch.zeros(4096, 4096, dtype=torch.bfloat16), mesh, [S(1)], src_data_rank=None)
        layout = build_layout([("p", (4096, 4096))], "bfloat16")
        start = time.process_time()
        source = read_source({"p": tensor}, layout, 3, 8)
        slices = slices_of(source.local, source.owned[3], layout)
        took = time.process_time() - start
    assert [len(runs) for runs in source.owned.values()] == [4096] * 8
    assert slices == (LocalSlices("p", Runs([0], [4096 * 512 * 2])),)
    assert took < 1.0  # milliseconds; a Run object per row of every rank would still be quick here, but not for 400 such matrices
