"""Destination layouts: what is traced is what the loaders do, and changed elements, digests and wanted bytes follow from it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_workers import Group, Toy, ToyWorker, bits, toys

from rose_hpc.errors import DigestMismatch, LayoutError
from rose_hpc.weights.destination import CopyBox, DestinationPlan, RuntimeParameter, faults, from_bytes, to_bytes, union, wanted_runs
from rose_hpc.weights.digest import digest_lanes
from rose_hpc.weights.layout import Runs, build_layout
from rose_hpc.weights.placement import box_table, share
from rose_hpc.weights.runtime_memory import DeviceMemory, HostMemory
from rose_hpc.weights.runtime_weights import RuntimeWeights, add
from rose_hpc.weights.tracing import trace

SEED = st.integers(0, 1 << 30)
QUICK = settings(max_examples=25, deadline=None)


def plans_of(toy: Toy) -> list[DestinationPlan]:
    return [trace(toy.worker(rank, "meta"), toy.layout) for rank in range(toy.workers)]


def changed(image: np.ndarray, seed: int, density: float) -> tuple[np.ndarray, np.ndarray]:
    """The image after random changes, and the lanes that may have changed, sorted."""
    random = np.random.default_rng(seed)
    lanes = np.flatnonzero(random.random(len(image)) < density)
    after = image.copy()
    after[lanes] = random.integers(0, 1 << 16, len(lanes), dtype=np.uint16)
    return after, lanes


@QUICK
@given(toys(), SEED)
def test_a_traced_plan_does_bit_for_bit_what_the_loader_does(toy: Toy, seed: int) -> None:
    image = toy.image(seed)
    for rank, plan in enumerate(plans_of(toy)):
        assert faults(plan, toy.layout) == ()
        assert from_bytes(to_bytes(plan)) == plan
        worker = toy.worker(rank)
        RuntimeWeights(dict(worker.named_parameters()), plan, toy.layout).copy_all(image)
        assert bits(worker) == bits(toy.loaded(rank, image))


@QUICK
@given(toys())
def test_wanted_runs_are_the_elements_that_the_copies_read(toy: Toy) -> None:
    layout = toy.layout
    for plan in plans_of(toy):
        read = np.zeros(layout.image_bytes // layout.item_bytes, bool)
        for copy in plan.copies:
            spec = layout.by_name[copy.source]
            tensor = read[spec.offset_bytes // layout.item_bytes :][: spec.numel]
            strides = [s * tensor.itemsize for s in copy.from_strides]
            np.lib.stride_tricks.as_strided(tensor[copy.from_start :], copy.shape, strides, writeable=True)[...] = True
        runs = wanted_runs(plan, layout)
        assert runs.is_sorted() and (runs.offsets[1:] > runs.ends[:-1]).all()
        covered = np.zeros_like(read)
        for run in runs:
            covered[run.offset_bytes // layout.item_bytes : run.end_bytes // layout.item_bytes] = True
        assert (covered == read).all()


@QUICK
@given(toys(), SEED, st.floats(0, 1))
def test_a_patch_makes_of_the_old_weights_the_new_ones_and_tells_their_digest_before(toy: Toy, seed: int, density: float) -> None:
    old, (new, lanes) = toy.image(seed), changed(toy.image(seed), seed + 1, density)
    plans = plans_of(toy)
    slots = share(plans, toy.layout).slots
    for rank, plan in enumerate(plans):
        worker = toy.loaded(rank, old)
        weights = RuntimeWeights(dict(worker.named_parameters()), plan, toy.layout, slots[rank])
        before = weights.digests()
        patch = weights.patch(new, lanes)
        assert bits(worker) == bits(toy.loaded(rank, old))  # nothing is written yet
        weights.apply(patch)
        assert bits(worker) == bits(toy.loaded(rank, new))
        assert weights.digests() == add(before, patch.change)
        assert weights.applied_change(patch) == list(patch.change)


@QUICK
@given(toys(), SEED)
def test_the_digests_of_all_workers_together_are_the_images(toy: Toy, seed: int) -> None:
    image, plans = toy.image(seed), plans_of(toy)
    sharing = share(plans, toy.layout)
    workers = [toy.loaded(rank, image) for rank in range(toy.workers)]
    weights = [RuntimeWeights(dict(w.named_parameters()), p, toy.layout, s) for w, p, s in zip(workers, plans, sharing.slots, strict=True)]
    assert sharing.total([w.digests() for w in weights]) == digest_lanes(0, image)
    for worker, plan in zip(workers, plans, strict=True):  # one bit in any worker, whether it holds the element alone or not
        element = worker.get_parameter(plan.copies[0].runtime).view(-1).view(torch.uint8)
        at = plan.copies[0].to_start * worker.p0.element_size()
        element[at] ^= 1
        try:
            assert sharing.total([w.digests() for w in weights]) != digest_lanes(0, image)
        except DigestMismatch as error:
            assert "holds other bits" in str(error)
        element[at] ^= 1


@QUICK
@given(toys(), SEED, st.floats(0, 1))
def test_torch_operators_find_the_digests_that_the_compiled_loops_find(toy: Toy, seed: int, density: float) -> None:
    image = toy.image(seed)
    plan = trace(toy.worker(0, "meta"), toy.layout)
    table, worker = box_table(plan, toy.layout), toy.loaded(0, image)
    _, lanes = changed(image, seed, density)
    slots = np.arange(len(table)) % 2
    for placed in table.place(np.unique(lanes // (toy.layout.item_bytes // 2))):
        parameter = worker.get_parameter(plan.parameters[placed.parameter].name)
        elements = np.unique(lanes // (toy.layout.item_bytes // 2))[placed.rows]
        values = np.random.default_rng(seed).integers(0, 1 << 16, len(elements) * (toy.layout.item_bytes // 2), dtype=np.uint16)
        found = []
        for memory in (HostMemory(parameter.clone()), DeviceMemory(parameter.clone())):
            sums = np.zeros(2, np.uint64)
            memory.scatter(*memory.staged(placed.positions, values))
            memory.digest_elements(placed.positions, elements, slots[placed.boxes], sums)
            memory.digest_boxes(table, slice(*table.bounds[placed.parameter]), slots, sums)
            found.append(sums.tolist())
        assert found[0] == found[1]


def test_a_tied_parameter_is_planned_once_and_a_buffer_left_alone() -> None:
    toy = Toy((Group((4,), 2, "all", 0, False),), 1, "float32")
    with torch.device("meta"):
        worker = ToyWorker(toy.groups, 0, 1, "float32", tied=True)
    plan = trace(worker, toy.layout)
    assert [p.name for p in plan.parameters] == ["p0"] and faults(plan, toy.layout) == ()


def test_what_two_places_of_one_worker_hold_is_compared_too() -> None:
    layout = build_layout([("embedding", (4, 2))], "float32")
    copies = tuple(CopyBox(name, "embedding", (8,), 0, (1,), 0, (1,)) for name in ("first", "head"))
    plan = DestinationPlan(tuple(RuntimeParameter(c.runtime, (4, 2), "float32") for c in copies), copies)
    sharing = share([plan], layout)
    assert sharing.parts == ((0, 0),) and sharing.total([[7, 7]]) == 7
    with pytest.raises(DigestMismatch):
        sharing.total([[7, 8]])


LAYOUT = build_layout([("a", (4, 3)), ("b", (2,))], "float32")
WHOLE = CopyBox("p", "a", (4, 3), 0, (3, 1), 0, (3, 1))
GOOD = DestinationPlan((RuntimeParameter("p", (4, 3), "float32"),), (WHOLE,))


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (replace(GOOD, flags=("loading a: aten.exp",)), "aten.exp"),
        (replace(GOOD, copies=()), "0 elements are written of 12"),
        (replace(GOOD, copies=(WHOLE, WHOLE)), "24 elements"),
        (replace(GOOD, copies=(replace(WHOLE, to_start=1),)), "not written, or written outside"),
        (replace(GOOD, copies=(replace(WHOLE, to_strides=(3, 0)),)), "written twice"),
        (replace(GOOD, copies=(replace(WHOLE, from_strides=(3, 0)),)), "an element twice"),
        (replace(GOOD, copies=(replace(WHOLE, from_strides=(1, 1)),)), "an element twice"),
        (replace(GOOD, copies=(replace(WHOLE, from_start=1),)), "outside of the tensor"),
        (replace(GOOD, copies=(replace(WHOLE, source="c"),)), "not in the image"),
        (replace(GOOD, parameters=(RuntimeParameter("p", (4, 3), "bfloat16"),)), "bfloat16"),
    ],
)
def test_a_plan_that_is_no_exact_copy_is_found_out(plan: DestinationPlan, why: str) -> None:
    assert faults(GOOD, LAYOUT) == ()
    assert any(why in fault for fault in faults(plan, LAYOUT))
    with pytest.raises(LayoutError):
        box_table(plan, LAYOUT)


def test_workers_that_do_not_hold_all_of_the_image_cannot_prove_it() -> None:
    with pytest.raises(LayoutError, match="do not tile"):
        share([GOOD], LAYOUT)  # nobody holds b
    with pytest.raises(LayoutError, match="does not hold"):
        wanted_runs(replace(GOOD, copies=(replace(WHOLE, source="c"),)), LAYOUT)


def test_live_parameters_that_are_not_as_they_were_traced_are_refused() -> None:
    for live in ({}, {"p": torch.zeros(0)}, {"p": torch.zeros(3, 4).t()}, {"p": torch.zeros(4, 3, dtype=torch.bfloat16)}):
        with pytest.raises(LayoutError, match="as it was loaded"):
            RuntimeWeights(live, GOOD, LAYOUT)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"format":2}', to_bytes(GOOD).replace(b"[0,1,", b"[0,9,"), to_bytes(GOOD)[:-9]])
def test_bytes_that_are_no_plan_are_refused(content: bytes) -> None:
    with pytest.raises(LayoutError):
        from_bytes(content)


@QUICK
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9))))
def test_a_union_covers_what_any_run_covers(runs: list[tuple[int, int]]) -> None:
    covered = {byte for start, size in runs for byte in range(start, start + size)}
    joined = union(Runs([r[0] for r in runs], [r[1] for r in runs]))
    assert {byte for run in joined for byte in range(run.offset_bytes, run.end_bytes)} == covered
    assert joined.is_sorted() and (joined.offsets[1:] > joined.ends[:-1]).all()
