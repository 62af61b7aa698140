"""Where every element of a policy lies: the image layout and the slices that a rank owns of it. Pure.

The IMAGE is the policy's parameters laid end to end in the wire dtype, without padding, in the trainer's parameter order.
An element's position in the image is its global index: the digest, the routing plan and the wire all speak in it, so no
side ever needs another side's tensor shapes to talk about bytes.

Invariants (asserted by the tests)
- Parameters tile the image exactly: no gap, no overlap; image_bytes = Σ numel × itemsize.
- `runs_of(box)` covers exactly the box's elements, in increasing order, with neighbours merged.
- `from_json(to_json(layout)) == layout`, and the fingerprints agree exactly when the layouts do.

What it does not do: read tensors (publisher.py) or know who sends what to whom (routing.py).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

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
    if math.prod(box.sizes) == 0:
        return []
    item = ITEM_BYTES[spec.dtype]
    strides = [math.prod(spec.shape[d + 1 :]) for d in range(len(spec.shape))]
    whole_from = _first_whole_dim(spec.shape, box)  # dims behind this one are taken whole: one run per outer index
    run_elements = math.prod(box.sizes[whole_from:])
    outer = itertools.product(*(range(s, s + n) for s, n in zip(box.starts[:whole_from], box.sizes[:whole_from], strict=True)))
    inner = sum(s * k for s, k in zip(box.starts[whole_from:], strides[whole_from:], strict=True))
    starts = (sum(i * k for i, k in zip(index, strides, strict=False)) + inner for index in outer)
    return merge([Run(spec.offset_bytes + start * item, run_elements * item) for start in starts])


def _first_whole_dim(shape: tuple[int, ...], box: Box) -> int:
    """Index of the outermost dim from which on the box is contiguous: every LATER dim is taken whole."""
    dim = max(len(shape) - 1, 0)
    while dim > 0 and box.sizes[dim] == shape[dim]:
        dim -= 1
    return dim


def merge(runs: Iterable[Run]) -> list[Run]:
    """Sorted runs with touching neighbours joined. Raises LayoutError when two overlap."""
    merged: list[Run] = []
    for run in sorted(r for r in runs if r.nbytes):
        if merged and run.offset_bytes < merged[-1].end_bytes:
            raise LayoutError("two slices overlap", got=f"{merged[-1]} and {run}", expected="every byte owned once")
        if merged and run.offset_bytes == merged[-1].end_bytes:
            merged[-1] = Run(merged[-1].offset_bytes, merged[-1].nbytes + run.nbytes)
        else:
            merged.append(run)
    return merged
