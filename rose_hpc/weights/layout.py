"""Where every element of a policy lies: the image layout and the slices that a rank owns of it. Pure.

The IMAGE is the policy's parameters laid end to end in the wire dtype, without padding, in the trainer's parameter order.
An element's position in the image is its global index: the digest, the routing plan and the wire all speak in it, so no
side ever needs another side's tensor shapes to talk about bytes.

Invariants (asserted by the tests)
- Parameters tile the image exactly: no gap, no overlap; image_bytes = Σ numel × itemsize.
- `runs_of(box)` covers exactly the box's elements, in increasing order, with neighbours merged.
- `grid_runs` laid end to end are a rank's local tensor flattened row-major.
- `from_json(to_json(layout)) == layout`, and the fingerprints agree exactly when the layouts do.

A tensor sharded on its last dim is one run per row, millions in a large model: many runs live in arrays (`Runs`), and nothing
here loops over them in Python.

What it does not do: read tensors (publisher.py) or know who sends what to whom (routing.py).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rose_hpc.errors import LayoutError

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
MAX_PARAMETERS = 1_000_000  # a peer that announces more is refused
MAX_NAME_CHARS = 512


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter in the image. name: Hugging Face name; shape: of the full tensor; offset_bytes: in the image."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset_bytes: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Box:
    """An axis-aligned slice of a tensor: start and size along every dim, in elements."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, order=True)
class Run:
    """A contiguous byte range of the image."""

    offset_bytes: int
    nbytes: int

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.nbytes


class Runs(Sequence[Run]):
    """Many runs in two arrays; reads as an immutable sequence of `Run` and equals any other sequence of the same runs.

    offsets, sizes: int64 [n], read-only, in bytes. The order is the caller's: `merged()` gives the sorted form.
    """

    __slots__ = ("offsets", "sizes")

    def __init__(self, offsets: ArrayLike, sizes: ArrayLike) -> None:
        self.offsets, self.sizes = _frozen(offsets), _frozen(sizes)
        if self.offsets.shape != self.sizes.shape:
            raise LayoutError("as many sizes as offsets are needed", got=self.sizes.shape, expected=self.offsets.shape)

    @classmethod
    def of(cls, runs: Iterable[Run]) -> Runs:
        """The same runs as arrays; no copy when they are already."""
        if isinstance(runs, Runs):
            return runs
        listed = list(runs)
        return cls([r.offset_bytes for r in listed], [r.nbytes for r in listed])

    @classmethod
    def joined(cls, parts: Iterable[Runs]) -> Runs:
        """All runs of the parts, one part behind the other."""
        listed = [cls([], []), *parts]
        return cls(np.concatenate([p.offsets for p in listed]), np.concatenate([p.sizes for p in listed]))

    @property
    def ends(self) -> NDArray[np.int64]:
        return self.offsets + self.sizes

    @property
    def nbytes(self) -> int:
        return int(self.sizes.sum())

    def starts_in_concatenation(self) -> NDArray[np.int64]:
        """Where each run begins when all are laid end to end, int64 [n], in bytes."""
        return np.cumsum(self.sizes) - self.sizes

    def span(self, low: int, high: int) -> Runs:
        """Bytes low to high (exclusive) of the concatenation, as runs in the same order."""
        starts = self.starts_in_concatenation()
        first, last = int(np.searchsorted(starts, low, "right")) - 1, int(np.searchsorted(starts, high, "left"))
        if high <= low or last <= max(first, 0):
            return Runs([], [])
        begins = np.maximum(starts[first:last], low)
        ends = np.minimum(starts[first:last] + self.sizes[first:last], high)
        return Runs(self.offsets[first:last] + begins - starts[first:last], ends - begins)

    def is_sorted(self) -> bool:
        """In increasing order, none empty, none before byte 0, none overlapping another."""
        in_order = bool((self.sizes > 0).all() and (self.offsets[1:] >= self.ends[:-1]).all())
        return in_order and (len(self) == 0 or int(self.offsets[0]) >= 0)

    def joined_neighbours(self) -> Runs:
        """The same order, with each run that continues the one before it in the image joined to it; empty runs dropped."""
        kept = np.flatnonzero(self.sizes)
        if not kept.size:
            return Runs([], [])
        offsets, ends = self.offsets[kept], self.ends[kept]
        first = np.flatnonzero(np.concatenate(([True], offsets[1:] != ends[:-1])))
        last = np.append(first[1:], len(kept)) - 1
        return Runs(offsets[first], ends[last] - offsets[first])

    def merged(self) -> Runs:
        """Sorted, without empty runs, touching neighbours joined. Raises LayoutError when two overlap."""
        kept = np.flatnonzero(self.sizes)
        order = kept[np.argsort(self.offsets[kept], kind="stable")]
        ordered = Runs(self.offsets[order], self.sizes[order])
        if (clash := np.flatnonzero(ordered.offsets[1:] < ordered.ends[:-1])).size:
            at = int(clash[0])
            raise LayoutError("two slices overlap", got=f"{ordered[at]} and {ordered[at + 1]}", expected="every byte owned once")
        return ordered.joined_neighbours()

    def expanded(self) -> NDArray[np.int64]:
        """Every position that the runs cover, int64 [nbytes], in their order."""
        return np.arange(self.nbytes, dtype=np.int64) + np.repeat(self.offsets - self.starts_in_concatenation(), self.sizes)

    def __len__(self) -> int:
        return len(self.offsets)

    @overload
    def __getitem__(self, at: int) -> Run: ...
    @overload
    def __getitem__(self, at: slice) -> Runs: ...
    def __getitem__(self, at: int | slice) -> Run | Runs:
        if isinstance(at, slice):
            return Runs(self.offsets[at], self.sizes[at])
        return Run(int(self.offsets[at]), int(self.sizes[at]))

    def __iter__(self) -> Iterator[Run]:
        return map(Run, self.offsets.tolist(), self.sizes.tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Runs):
            return isinstance(other, Sequence) and list(self) == list(other)
        return np.array_equal(self.offsets, other.offsets) and np.array_equal(self.sizes, other.sizes)

    def __hash__(self) -> int:
        return hash((self.offsets.tobytes(), self.sizes.tobytes()))

    def __repr__(self) -> str:
        return f"Runs({len(self)} runs, {self.nbytes} bytes)"


def _frozen(values: ArrayLike) -> NDArray[np.int64]:
    """Read-only; an int64 array is viewed, not copied."""
    array = np.asarray(values, np.int64).reshape(-1).view()
    array.flags.writeable = False
    return array


@dataclass(frozen=True)
class ImageLayout:
    """All parameters of one policy in one wire dtype. Build it with `build_layout`."""

    dtype: str
    parameters: tuple[ParameterSpec, ...]

    @cached_property
    def image_bytes(self) -> int:
        return sum(p.nbytes for p in self.parameters)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @cached_property
    def by_name(self) -> dict[str, ParameterSpec]:
        return {p.name: p for p in self.parameters}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON: two sides with the same fingerprint agree on every offset."""
        return hashlib.sha256(to_json(self).encode()).hexdigest()


def build_layout(shapes: Iterable[tuple[str, Sequence[int]]], dtype: str) -> ImageLayout:
    """Lay parameters end to end in the given order.

    Raises LayoutError: unknown dtype, a name given twice or too long, a negative extent, too many parameters.
    """
    if dtype not in ITEM_BYTES:
        raise LayoutError("unknown wire dtype", got=dtype, expected=" or ".join(ITEM_BYTES))
    offset = 0
    specs: list[ParameterSpec] = []
    seen: set[str] = set()
    for name, shape in shapes:
        _check_entry(name, shape, seen)
        seen.add(name)
        spec = ParameterSpec(name, tuple(int(n) for n in shape), dtype, offset)
        specs.append(spec)
        offset = spec.offset_bytes + spec.nbytes
    return ImageLayout(dtype, tuple(specs))


def _check_entry(name: str, shape: Sequence[int], seen: set[str]) -> None:
    if name in seen:
        raise LayoutError("a parameter is named twice", got=name)
    if not name or len(name) > MAX_NAME_CHARS:
        raise LayoutError("a parameter's name is empty or too long", got=name[:80], expected=f"1 to {MAX_NAME_CHARS} characters")
    if any(int(n) < 0 for n in shape):
        raise LayoutError(f"parameter {name} has a negative extent", got=tuple(shape))
    if len(seen) >= MAX_PARAMETERS:
        raise LayoutError("too many parameters", got=f"more than {MAX_PARAMETERS}")


def to_json(layout: ImageLayout) -> str:
    """Canonical JSON of a layout; offsets follow from the order and are not written."""
    return json.dumps({"dtype": layout.dtype, "parameters": [[p.name, list(p.shape)] for p in layout.parameters]}, separators=(",", ":"))


def from_json(text: str) -> ImageLayout:
    """Inverse of `to_json`, for text from a peer. Raises LayoutError when it is not a layout."""
    try:
        tree: Any = json.loads(text)
        return build_layout(((str(name), [int(n) for n in shape]) for name, shape in tree["parameters"]), str(tree["dtype"]))
    except (ValueError, KeyError, TypeError) as error:
        raise LayoutError("not a layout", got=text[:200]) from error


def runs_of(spec: ParameterSpec, box: Box) -> list[Run]:
    """The box's bytes as contiguous runs in image coordinates (row-major storage), increasing, neighbours merged.

    Raises LayoutError when the box does not lie inside the parameter.
    """
    if len(box.starts) != len(spec.shape) or any(
        s < 0 or n < 0 or s + n > e for s, n, e in zip(box.starts, box.sizes, spec.shape, strict=True)
    ):
        raise LayoutError(f"slice outside of {spec.name}", got=f"starts {box.starts}, sizes {box.sizes}", expected=f"inside {spec.shape}")
    return list(grid_runs(spec, [Runs([s], [n]) for s, n in zip(box.starts, box.sizes, strict=True)]))


def grid_runs(spec: ParameterSpec, dims: Sequence[Runs]) -> Runs:
    """Elements [i, j, …] for every i that dims[0] covers, j that dims[1] covers, …, in the order of a row-major walk over them.

    dims: one per dim of the full tensor, ranges of indices (offset, count) inside its extent, in the order in which a rank
    holds them. The runs laid end to end are the local tensor flattened: neighbours in that walk that touch are joined.
    """
    item = ITEM_BYTES[spec.dtype]
    inner = Runs([0], [1])  # of the dims behind, in elements
    for dim in reversed(range(len(spec.shape))):
        stride, ranges = math.prod(spec.shape[dim + 1 :]), dims[dim].joined_neighbours()
        if inner == Runs([0], [stride]):  # the dims behind are taken whole: consecutive indices are one run
            inner = Runs(ranges.offsets * stride, ranges.sizes * stride)
        else:
            starts = ranges.expanded() * stride
            inner = Runs((starts[:, None] + inner.offsets).ravel(), np.tile(inner.sizes, len(starts)))
    return Runs(spec.offset_bytes + inner.offsets * item, inner.sizes * item).joined_neighbours()


def merge(runs: Iterable[Run]) -> list[Run]:
    """Sorted runs with touching neighbours joined. Raises LayoutError when two overlap."""
    return list(Runs.of(runs).merged())
