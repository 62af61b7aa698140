"""The weights that one worker runs, as the image sees them: changed elements put in place, and digests of what is there now.

    image ──changed elements──▶ Patch        while the model serves: nothing of the model is written
    Patch ──apply──▶ parameters              between two steps: copies only, nothing is computed
    parameters ──digests──▶ one per slot     of what is in memory, at any time

Invariants
- `patch` and `digests` never write to the model. `apply` and `copy_all` write exactly the elements of the plan.
- After `apply(patch)` the digests are `patch.predicted` added to the old ones, or memory does not hold what was written.

It does not decide what to do (vllm_backend.py) and does not read arenas.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rose_hpc.errors import LayoutError
from rose_hpc.weights import runtime_kernels as kernels
from rose_hpc.weights.destination import DestinationPlan, Ints, RuntimeParameter
from rose_hpc.weights.layout import ImageLayout
from rose_hpc.weights.placement import MODULUS, BoxTable, box_table
from rose_hpc.weights.runtime_memory import ELEMENT_BITS, Lanes, Memory, Sums, memory_of
from rose_hpc.weights.tracing import dtype_name


@dataclass(frozen=True)
class _Piece:
    """Of one parameter. positions, values: staged where the parameter lives; places, elements, slots [n]: on the host."""

    parameter: int
    positions: torch.Tensor
    values: torch.Tensor
    places: Ints
    elements: Ints
    slots: Ints


@dataclass(frozen=True)
class Patch:
    """Changed elements of one worker. image_elements: how many changed, here or not; change: of the digest of each slot, mod 2^64."""

    pieces: tuple[_Piece, ...]
    image_elements: int
    change: tuple[int, ...]
    _before: tuple[int, ...]


class RuntimeWeights:
    """The parameters of a plan without faults. slots: per box of the plan's table; by default all are slot 0."""

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], plan: DestinationPlan, layout: ImageLayout, slots: Ints | None = None
    ) -> None:
        self.table: BoxTable = box_table(plan, layout)
        self._layout, self._width = layout, layout.item_bytes // 2
        self.slots = np.zeros(len(self.table), np.int64) if slots is None else np.array(slots, np.int64)
        if len(self.slots) != len(self.table):
            raise LayoutError("slots for other copies", got=len(self.slots), expected=len(self.table))
        self._slot_count = int(self.slots.max(initial=-1)) + 1
        live = [_matching(parameters, expected) for expected in plan.parameters]
        self._memories: dict[int, Memory] = {index: memory_of(live[index]) for index in self.table.bounds}
        number = {p.name: i for i, p in enumerate(plan.parameters)}
        self._constants = [(live[number[box.runtime]], box) for box in plan.constants]

    def digests(self) -> list[int]:
        """Digest of each slot, of what the parameters hold now."""
        sums = self._zeros()
        for index, (begin, end) in self.table.bounds.items():
            self._memories[index].digest_boxes(self.table, slice(begin, end), self.slots, sums)
        return [int(s) for s in sums]

    def patch(self, image: Lanes, lanes: Ints) -> Patch:
        """image: uint16 [image lanes], holding the new values; lanes: the changed ones, sorted and unique. May be empty."""
        elements = _elements(lanes, self._width)
        before, after, pieces = self._zeros(), self._zeros(), []
        for placed in self.table.place(elements):
            memory, mine = self._memories[placed.parameter], elements[placed.rows]
            slots, values = self.slots[placed.boxes], np.empty(len(mine) * self._width, np.uint16)
            kernels.gather(image, self._width, mine, values)
            memory.digest_elements(placed.positions, mine, slots, before)
            kernels.digest_values(values, self._width, mine, slots, after)
            positions, staged = memory.staged(placed.positions, values)
            pieces.append(_Piece(placed.parameter, positions, staged, placed.positions, mine, slots))
        change = tuple((a - b) % MODULUS for a, b in zip(after.tolist(), before.tolist(), strict=True))
        return Patch(tuple(pieces), len(elements), change, tuple(before.tolist()))

    def apply(self, patch: Patch) -> None:
        """Write the patch. The only step that needs the model to stand still."""
        for piece in patch.pieces:
            self._memories[piece.parameter].scatter(piece.positions, piece.values)

    def applied_change(self, patch: Patch) -> list[int]:
        """By how much the patch changed each slot's digest, with the new values read back from the parameters."""
        after = self._zeros()
        for piece in patch.pieces:
            self._memories[piece.parameter].digest_elements(piece.places, piece.elements, piece.slots, after)
        return [(a - b) % MODULUS for a, b in zip(after.tolist(), patch._before, strict=True)]

    def copy_all(self, image: Lanes) -> None:
        """Every copy and every constant of the plan. image: uint16 [image lanes]."""
        bits = image_elements(image, self._layout)
        for row, parameter in enumerate(self.table.parameters.tolist()):
            self._memories[parameter].copy_box(self.table, row, bits)
        for tensor, box in self._constants:
            tensor.view(-1).as_strided(box.shape, box.to_strides, tensor.storage_offset() + box.to_start).fill_(box.value)

    def _zeros(self) -> Sums:
        return np.zeros(self._slot_count, np.uint64)


def _matching(parameters: Mapping[str, torch.Tensor], expected: RuntimeParameter) -> torch.Tensor:
    """The live parameter, detached. Raises LayoutError when it is not as it was traced."""
    found = parameters.get(expected.name)
    if found is None or (tuple(found.shape), dtype_name(found.dtype)) != (expected.shape, expected.dtype) or not found.is_contiguous():
        got = None if found is None else f"{tuple(found.shape)}, {found.dtype}, strides {found.stride()}"
        raise LayoutError("a parameter does not lie in memory as it was loaded", got=got, expected=expected)
    return found.detach()


def _elements(lanes: Ints, width: int) -> Ints:
    """The elements that these lanes belong to, sorted and unique."""
    if width == 1 or not len(lanes):
        return lanes
    elements = lanes // width
    unique: Ints = elements[np.concatenate(([True], elements[1:] != elements[:-1]))]
    return unique


def image_elements(image: Lanes, layout: ImageLayout) -> torch.Tensor:
    """The image as bit patterns of its elements, int16 or int32 [elements]. It aliases the (read-only) mapping: never write to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(image.view(np.int16)).view(ELEMENT_BITS[layout.item_bytes])


def add(digests: Sequence[int], change: Sequence[int]) -> list[int]:
    """Digests after a change."""
    return [(a + b) % MODULUS for a, b in zip(digests, change, strict=True)]
