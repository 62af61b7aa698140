"""A destination plan compiled for use: where changed image elements go in a worker, and what several workers hold together. Pure.

    BoxTable   one worker's copies as arrays, sorted by runtime parameter, then by where they read
    Sharing    which elements are held by the same workers, so that digests of what each holds can be put together

A PART is the set of image elements that the same workers hold. The digests of all parts add up to the trainer's digest although no
worker holds everything, and all holders of one part must find the same digest for it: replicated norms and KV heads are
checked where they run, not only at one of the replicas.

Invariants (asserted by the tests)
- `place` finds every runtime position of every given element that the worker holds, each once.
- Parts tile the image: every element is in exactly one. `share` refuses plans of which this is not so.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rose_hpc.errors import DigestMismatch, LayoutError
from rose_hpc.weights.destination import MAX_DIMS, CopyBox, DestinationPlan, Ints, faults, joined_dims, wanted_runs
from rose_hpc.weights.layout import ImageLayout

MODULUS = 1 << 64


@dataclass(frozen=True)
class Placed:
    """Changed elements of one runtime parameter: positions [n] in the flat parameter, rows [n] of the list that was asked for.

    boxes [n]: the copy (row of the table) that each belongs to.
    """

    parameter: int
    positions: Ints
    rows: Ints
    boxes: Ints


@dataclass(frozen=True)
class BoxTable:
    """One worker's copies. All int64; n boxes, dims padded in front to MAX_DIMS with size 1 and stride 0, largest source stride first.

    parameters [n]: index into the plan's parameters; firsts, lasts [n]: smallest and largest image element read; to_starts [n];
    sizes, to_strides, from_strides [n, MAX_DIMS].
    """

    parameters: Ints
    firsts: Ints
    lasts: Ints
    to_starts: Ints
    sizes: Ints
    to_strides: Ints
    from_strides: Ints

    def __len__(self) -> int:
        return len(self.firsts)

    @cached_property
    def counts(self) -> Ints:
        """Elements of each box, [n]."""
        elements: Ints = self.sizes.prod(axis=1)
        return elements

    @cached_property
    def bounds(self) -> dict[int, tuple[int, int]]:
        """Rows of each parameter: parameter → (first row, row behind the last)."""
        edges = np.flatnonzero(np.diff(self.parameters, prepend=-1, append=-1))
        return {int(self.parameters[a]): (int(a), int(b)) for a, b in itertools.pairwise(edges)}

    def key(self, row: int) -> tuple[int, ...]:
        """Equal for two boxes exactly when they read the same elements, wherever they put them."""
        sizes, (strides,) = joined_dims(self.sizes[row].tolist(), self.from_strides[row].tolist())
        return (int(self.firsts[row]), *sizes, *strides)

    def place(self, elements: Ints) -> list[Placed]:
        """Where the image elements go, by parameter. elements: sorted, unique."""
        begins = np.searchsorted(elements, self.firsts)
        ends = np.searchsorted(elements, self.lasts, side="right")
        found: dict[int, list[tuple[Ints, Ints, int]]] = defaultdict(list)
        for row in np.flatnonzero(ends > begins).tolist():
            positions, rows = self._place_in(row, elements, int(begins[row]), int(ends[row]))
            if len(rows):
                found[int(self.parameters[row])].append((positions, rows, row))
        return [_joined(parameter, parts) for parameter, parts in found.items()]

    def _place_in(self, row: int, elements: Ints, begin: int, end: int) -> tuple[Ints, Ints]:
        rest = elements[begin:end] - self.firsts[row]
        positions = np.full(end - begin, self.to_starts[row])
        inside = np.ones(end - begin, bool)
        for size, to, by in zip(self.sizes[row].tolist(), self.to_strides[row].tolist(), self.from_strides[row].tolist(), strict=True):
            if size == 1:
                continue
            index, rest = (rest, np.zeros_like(rest)) if by == 1 else np.divmod(rest, by)
            inside &= index < size
            positions += index * to
        inside &= rest == 0
        kept = np.flatnonzero(inside)
        return positions[kept], kept + begin


def _joined(parameter: int, parts: list[tuple[Ints, Ints, int]]) -> Placed:
    boxes = [np.full(len(rows), row, np.int64) for _, rows, row in parts]
    return Placed(parameter, np.concatenate([p for p, _, _ in parts]), np.concatenate([r for _, r, _ in parts]), np.concatenate(boxes))


def box_table(plan: DestinationPlan, layout: ImageLayout) -> BoxTable:
    """Raises LayoutError when the plan has faults."""
    if found := faults(plan, layout):
        raise LayoutError("a destination plan that cannot be used in place", got="; ".join(found[:3]), expected="no faults")
    number = {p.name: i for i, p in enumerate(plan.parameters)}
    rows = sorted(_row(number[copy.runtime], copy, layout) for copy in plan.copies if 0 not in copy.shape)
    table = np.array(rows, np.int64).reshape(len(rows), 4 + 3 * MAX_DIMS)
    parameters, firsts, lasts, to_starts = (np.ascontiguousarray(table[:, k]) for k in range(4))
    sizes, to_strides, from_strides = (np.ascontiguousarray(table[:, 4 + k * MAX_DIMS : 4 + (k + 1) * MAX_DIMS]) for k in range(3))
    return BoxTable(parameters, firsts, lasts, to_starts, sizes, to_strides, from_strides)


def _row(parameter: int, copy: CopyBox, layout: ImageLayout) -> tuple[int, ...]:
    dims = sorted(zip(copy.from_strides, copy.to_strides, copy.shape, strict=True), reverse=True)
    sizes, (to_strides, from_strides) = joined_dims([d[2] for d in dims], [d[1] for d in dims], [d[0] for d in dims])
    first = layout.by_name[copy.source].offset_bytes // layout.item_bytes + copy.from_start
    last = first + sum(stride * (size - 1) for stride, size in zip(from_strides, sizes, strict=True))
    pad = MAX_DIMS - len(sizes)
    return (
        parameter,
        first,
        last,
        copy.to_start,
        *((1,) * pad + sizes),
        *((0,) * pad + to_strides),
        *((0,) * pad + from_strides),
    )


# ── several workers ──


@dataclass(frozen=True)
class Sharing:
    """How the workers of one engine hold the image together.

    slots[w]: int64 [boxes of worker w], the worker's own number of the part that each box belongs to, from 0;
    parts[w]: the engine-wide number of each slot. A part occurs twice in a worker that holds its elements twice.
    """

    slots: tuple[Ints, ...]
    parts: tuple[tuple[int, ...], ...]

    def total(self, digests: Sequence[Sequence[int]]) -> int:
        """The digest of the whole image, from the digest of each slot of each worker. Raises DigestMismatch: holders disagree."""
        found: dict[int, int] = {}
        for worker, (parts, values) in enumerate(zip(self.parts, digests, strict=True)):
            for part, value in zip(parts, values, strict=True):
                if found.setdefault(part, value) != value:
                    raise DigestMismatch(
                        f"worker {worker} holds other bits than an earlier one of what both hold",
                        got=f"digest {value:#018x}",
                        expected=f"{found[part]:#018x}",
                    )
        return sum(found.values()) % MODULUS


def share(plans: Sequence[DestinationPlan], layout: ImageLayout) -> Sharing:
    """Cut the image into parts. Raises LayoutError: a plan has faults, or the workers do not hold all of the image, or cut it unevenly."""
    tables = [box_table(plan, layout) for plan in plans]
    keys = [_numbered(table) for table in tables]
    holders: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
    counts: dict[tuple[int, ...], int] = {}
    for worker, listed in enumerate(keys):
        for row, (key, occurrence) in enumerate(listed):
            holders[key].append((worker, occurrence))
            counts[key] = int(tables[worker].counts[row])
    _check_tiling(plans, layout, sum(counts.values()))
    part_of: dict[tuple[tuple[int, int], ...], int] = {}
    part = {key: part_of.setdefault(tuple(held), len(part_of)) for key, held in holders.items()}
    return Sharing(*zip(*(_slots([(part[key], occurrence) for key, occurrence in listed]) for listed in keys), strict=True))


def _numbered(table: BoxTable) -> list[tuple[tuple[int, ...], int]]:
    """Each box's key, and how many boxes of the same key come before it."""
    seen: dict[tuple[int, ...], int] = defaultdict(int)
    listed = []
    for row in range(len(table)):
        key = table.key(row)
        listed.append((key, seen[key]))
        seen[key] += 1
    return listed


def _slots(wanted: list[tuple[int, int]]) -> tuple[Ints, tuple[int, ...]]:
    numbers = {slot: i for i, slot in enumerate(sorted(set(wanted)))}
    return np.array([numbers[slot] for slot in wanted], np.int64), tuple(part for part, _ in numbers)


def _check_tiling(plans: Sequence[DestinationPlan], layout: ImageLayout, elements: int) -> None:
    """Distinct boxes tile the image exactly when they cover it and have as many elements as it has."""
    covered, size = wanted_runs(plans, layout).nbytes, layout.image_bytes
    if covered != size or elements * layout.item_bytes != size:
        raise LayoutError(
            "the workers' copies do not tile the image",
            got=f"{covered} bytes covered by copies of {elements * layout.item_bytes}",
            expected=f"{size} bytes, each once",
        )
