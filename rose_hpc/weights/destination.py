"""Which image element goes where in one vLLM worker: the destination layout as data. Pure.

A PLAN lists, for every runtime parameter of one worker, the strided copies out of Hugging Face tensors and the constants
that fill the rest. It is recorded from vLLM's own loaders (tracing.py), never written by hand per model; placement.py
compiles it into what the hot paths use.

Invariants of a plan without `faults` (asserted by the tests)
- Every element of every runtime parameter is covered exactly once, by a copy or by a constant.
- A copy reads inside of its tensor, each element of it at most once, and keeps the bits: wire and runtime dtype are equal.
- `from_bytes(to_bytes(plan)) == plan`.

It does not touch tensors (runtime_weights.py) and does not know how many workers there are (placement.py).
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose_hpc.errors import LayoutError
from rose_hpc.weights.layout import MAX_PARAMETERS, ImageLayout, ParameterSpec, Runs

MAX_DIMS = 4  # of a copy, once its dims are joined where they can be; more is no layout that a model has
MAX_PIECES = 1 << 24  # contiguous pieces of one copy; a larger one would be written element by element
FORMAT = 1

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class RuntimeParameter:
    """A contiguous parameter of the worker's model. dtype: "float32", "bfloat16", … as torch names it."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class CopyBox:
    """One strided copy. Starts and strides count elements of the flat runtime parameter and of the flat Hugging Face tensor."""

    runtime: str
    source: str
    shape: tuple[int, ...]
    to_start: int
    to_strides: tuple[int, ...]
    from_start: int
    from_strides: tuple[int, ...]


@dataclass(frozen=True)
class ConstantBox:
    """Elements of a runtime parameter that a loader fills, for example the padding of a vocabulary."""

    runtime: str
    value: float
    shape: tuple[int, ...]
    to_start: int
    to_strides: tuple[int, ...]


@dataclass(frozen=True)
class DestinationPlan:
    """The destination layout of one worker. flags: what the loaders did that a copy cannot express, one line each."""

    parameters: tuple[RuntimeParameter, ...]
    copies: tuple[CopyBox, ...]
    constants: tuple[ConstantBox, ...] = ()
    flags: tuple[str, ...] = ()

    @cached_property
    def by_name(self) -> dict[str, RuntimeParameter]:
        return {p.name: p for p in self.parameters}


# ── may it be used? ──


def faults(plan: DestinationPlan, layout: ImageLayout) -> tuple[str, ...]:
    """Why the plan must not be used for copies in place, one line each; empty when it may. See the module's invariants."""
    return (*plan.flags, *_copy_faults(plan, layout), *_coverage_faults(plan))


def _copy_faults(plan: DestinationPlan, layout: ImageLayout) -> Iterator[str]:
    for copy in plan.copies:
        target, spec = plan.by_name.get(copy.runtime), layout.by_name.get(copy.source)
        if target is None or spec is None:
            yield f"{copy.runtime} ← {copy.source}: not in the {'image' if target else 'model'}"
        elif target.dtype != spec.dtype:
            yield f"{copy.runtime} is {target.dtype}, {copy.source} is {spec.dtype} on the wire"
        elif not _reads_each_once(copy, spec):
            yield f"{copy.runtime} ← {copy.source}: reads outside of the tensor, or an element twice"
        elif len(joined_dims(copy.shape, copy.to_strides, copy.from_strides)[0]) > MAX_DIMS:
            yield f"{copy.runtime} ← {copy.source}: more than {MAX_DIMS} dims"


def _reads_each_once(copy: CopyBox, spec: ParameterSpec) -> bool:
    """Inside the tensor, and every stride spans all that the smaller ones reach: element numbers are unique and decode by division."""
    dims = sorted((stride, size) for stride, size in zip(copy.from_strides, copy.shape, strict=True) if size > 1)
    reach = 0
    for stride, size in dims:
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return copy.from_start >= 0 and (math.prod(copy.shape) == 0 or copy.from_start + reach < spec.numel)


def _coverage_faults(plan: DestinationPlan) -> Iterator[str]:
    boxes: dict[str, list[CopyBox | ConstantBox]] = defaultdict(list)
    for copy in plan.copies:
        boxes[copy.runtime].append(copy)
    for constant in plan.constants:
        boxes[constant.runtime].append(constant)
    for parameter in plan.parameters:
        if fault := _tiling_fault(parameter, boxes[parameter.name]):
            yield f"{parameter.name}: {fault}"


def _tiling_fault(parameter: RuntimeParameter, boxes: Sequence[CopyBox | ConstantBox]) -> str | None:
    """Why the boxes do not tile the parameter exactly, or None. Pieces are at most numel: overlaps are found, never counted out."""
    if sum(math.prod(b.shape) for b in boxes) != parameter.numel:
        return f"{sum(math.prod(b.shape) for b in boxes)} elements are written of {parameter.numel}"
    if any(_piece_count(b.shape, b.to_strides) > MAX_PIECES for b in boxes):
        return "written in too many pieces"
    pieces = Runs.joined(_pieces(b.shape, b.to_start, b.to_strides) for b in boxes)
    try:
        whole = pieces.merged()
    except LayoutError:
        return "an element is written twice"
    if len(whole) and (len(whole) > 1 or int(whole.offsets[0]) != 0 or int(whole.sizes[0]) != parameter.numel):
        return "elements are not written, or written outside"
    return None


# ── what it reads ──


def wanted_runs(plans: DestinationPlan | Sequence[DestinationPlan], layout: ImageLayout) -> Runs:
    """The image runs that a worker, or a node of several workers, needs: sorted, disjoint, neighbours joined; in bytes.

    Raises LayoutError when a plan reads a tensor that the layout does not have, or outside of it.
    """
    listed = [plans] if isinstance(plans, DestinationPlan) else list(plans)
    distinct = {(c.source, c.shape, c.from_start, c.from_strides) for plan in listed for c in plan.copies}
    return union(Runs.joined(_source_runs(layout, *box) for box in sorted(distinct)))


def _source_runs(layout: ImageLayout, source: str, shape: tuple[int, ...], start: int, strides: tuple[int, ...]) -> Runs:
    spec = layout.by_name.get(source)
    last = start + sum(stride * (size - 1) for stride, size in zip(strides, shape, strict=True))
    if spec is None or start < 0 or last >= spec.numel or min(strides, default=0) < 0:
        raise LayoutError("a plan reads what the image does not hold", got=f"{source} {shape} from {start} by {strides}", expected=spec)
    pieces = _pieces(shape, start, strides)
    return Runs(spec.offset_bytes + pieces.offsets * layout.item_bytes, pieces.sizes * layout.item_bytes)


def union(runs: Runs) -> Runs:
    """All bytes that any of the runs covers: sorted, disjoint, neighbours joined. Unlike `merged`, overlaps are welcome."""
    order = np.argsort(runs.offsets, kind="stable")
    offsets, ends = runs.offsets[order], runs.ends[order]
    reach = np.maximum.accumulate(ends) if len(ends) else ends
    first = np.flatnonzero(np.concatenate(([True], offsets[1:] > reach[:-1]))) if len(ends) else order
    last = np.append(first[1:], len(ends)) - 1 if len(ends) else order
    return Runs(offsets[first], reach[last] - offsets[first])


# ── strides ──


def joined_dims(shape: Sequence[int], *strides: Sequence[int]) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """The same walk with dims of size 1 dropped and neighbours joined where all given strides allow it."""
    dims: list[list[int]] = []  # size, then a stride per walk
    for size, *steps in zip(shape, *strides, strict=True):
        if size == 1:
            continue
        if dims and all(outer == size * inner for outer, inner in zip(dims[-1][1:], steps, strict=True)):
            dims[-1] = [dims[-1][0] * size, *steps]
        else:
            dims.append([size, *steps])
    return tuple(d[0] for d in dims), tuple(tuple(d[k + 1] for d in dims) for k in range(len(strides)))


def _piece_count(shape: Sequence[int], strides: Sequence[int]) -> int:
    sizes, (steps,) = joined_dims(shape, strides)
    return math.prod(sizes[:-1] if steps and steps[-1] == 1 else sizes)


def _pieces(shape: Sequence[int], start: int, strides: Sequence[int]) -> Runs:
    """The elements of a strided walk as contiguous pieces, in elements."""
    sizes, (steps,) = joined_dims(shape, strides)
    if math.prod(shape) == 0:
        return Runs([], [])
    length = sizes[-1] if steps and steps[-1] == 1 else 1
    offsets = np.array([start], np.int64)
    for size, step in zip(sizes, steps, strict=True):
        if step == 1 and length > 1:
            break
        offsets = (offsets[:, None] + np.arange(size, dtype=np.int64) * step).ravel()
    return Runs(offsets, np.full(len(offsets), length))


# ── as bytes ──


def to_bytes(plan: DestinationPlan) -> bytes:
    """Canonical JSON, names once each."""
    names = list(dict.fromkeys([*(p.name for p in plan.parameters), *(c.source for c in plan.copies)]))
    number = {name: i for i, name in enumerate(names)}
    tree = {
        "format": FORMAT,
        "names": names,
        "parameters": [[number[p.name], p.shape, p.dtype] for p in plan.parameters],
        "copies": [[number[c.runtime], number[c.source], *astuple(c)[2:]] for c in plan.copies],
        "constants": [[number[c.runtime], *astuple(c)[1:]] for c in plan.constants],
        "flags": plan.flags,
    }
    return json.dumps(tree, separators=(",", ":")).encode()


def from_bytes(content: bytes) -> DestinationPlan:
    """Inverse of `to_bytes`. Raises LayoutError when it is no plan."""
    try:
        tree: Any = json.loads(content)
        if tree["format"] != FORMAT or max(len(tree["names"]), len(tree["copies"])) > MAX_PARAMETERS:
            raise ValueError("another format, or too large")
        return _plan_of(tree, [str(name) for name in tree["names"]])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise LayoutError("not a destination plan", got=content[:200], expected=f"format {FORMAT}") from error


def _plan_of(tree: Any, names: list[str]) -> DestinationPlan:
    ints = _int_tuple
    return DestinationPlan(
        tuple(RuntimeParameter(names[n], ints(shape), str(dtype)) for n, shape, dtype in tree["parameters"]),
        tuple(
            CopyBox(names[r], names[s], ints(shape), int(to), ints(to_strides), int(start), ints(strides))
            for r, s, shape, to, to_strides, start, strides in tree["copies"]
        ),
        tuple(ConstantBox(names[r], float(v), ints(shape), int(to), ints(strides)) for r, v, shape, to, strides in tree["constants"]),
        tuple(str(flag) for flag in tree["flags"]),
    )


def _int_tuple(values: Any) -> tuple[int, ...]:
    return tuple(int(v) for v in values)
