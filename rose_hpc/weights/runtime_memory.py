"""The bits of one runtime parameter where it lives: compiled loops in host memory, torch operators on any other device.

Both classes do the same (asserted by the tests): digests of copies and of single elements per slot (placement.Sharing), as memory holds
them now, and the scatter of new elements. A parameter is contiguous; an element is `width` lanes.

They write nothing but what `scatter` and `copy_box` are told, and never look at values as numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from rose_hpc.weights import runtime_kernels as kernels
from rose_hpc.weights.destination import MAX_DIMS, Ints
from rose_hpc.weights.placement import MODULUS, BoxTable

CHUNK_ELEMENTS = 1 << 22  # of a digest on a device: a handful of int64 temporaries of 32 MiB
ELEMENT_BITS = {2: torch.int16, 4: torch.int32}
_MASK = 0xFFFF
Sums = NDArray[np.uint64]
Lanes = NDArray[np.uint16]


class Memory(Protocol):
    """One parameter. sums: uint64 [slots], added to mod 2^64."""

    width: int

    def digest_boxes(self, table: BoxTable, rows: slice, slots: Ints, sums: Sums) -> None:
        """Digest of the copies in these rows of the table; slots [rows of the table]."""

    def digest_elements(self, positions: Ints, elements: Ints, slots: Ints, sums: Sums) -> None:
        """Digest of the elements at these positions, which are these elements of the image."""

    def scatter(self, positions: torch.Tensor, values: torch.Tensor) -> None:
        """positions, values: from `staged`."""

    def staged(self, positions: Ints, values: Lanes) -> tuple[torch.Tensor, torch.Tensor]:
        """What `scatter` takes, where it takes it without waiting. values: [positions × width]."""

    def copy_box(self, table: BoxTable, row: int, image: torch.Tensor) -> None:
        """Copy one box out of the image, given as its elements' bits (int16 or int32 [elements])."""


def memory_of(parameter: torch.Tensor) -> Memory:
    """parameter: contiguous, of 2 or 4 bytes an element."""
    return HostMemory(parameter) if parameter.device.type == "cpu" else DeviceMemory(parameter)


def warm_up() -> None:
    """Compile the loops now, or load them from numba's cache (tenths of a second), rather than at the first update."""
    one, sums, lanes = np.zeros(1, np.int64), np.zeros(1, np.uint64), np.zeros(2, np.uint16)
    dims = np.ones((1, MAX_DIMS), np.int64)
    memory = HostMemory(torch.zeros(1))
    memory.digest_boxes(BoxTable(one, one, one, one, dims, dims, dims), slice(0, 1), one, sums)
    memory.digest_elements(one, one, one, sums)
    memory.scatter(*memory.staged(one, lanes))
    kernels.digest_values(lanes, memory.width, one, one, sums)
    kernels.gather(np.frombuffer(bytes(4), np.uint16), memory.width, one, lanes)  # read-only, as a mapped image is


class _Flat:
    def __init__(self, parameter: torch.Tensor) -> None:
        self.width = parameter.element_size() // 2
        self._flat = parameter.detach().view(-1).view(ELEMENT_BITS[parameter.element_size()])

    def copy_box(self, table: BoxTable, row: int, image: torch.Tensor) -> None:
        sizes = table.sizes[row].tolist()
        target = self._flat.as_strided(sizes, table.to_strides[row].tolist(), self._flat.storage_offset() + int(table.to_starts[row]))
        source = image.as_strided(sizes, table.from_strides[row].tolist(), image.storage_offset() + int(table.firsts[row]))
        target.copy_(source)


class HostMemory(_Flat):
    """In host memory."""

    def __init__(self, parameter: torch.Tensor) -> None:
        super().__init__(parameter)
        self._lanes: Lanes = self._flat.numpy().view(np.uint16)

    def digest_boxes(self, table: BoxTable, rows: slice, slots: Ints, sums: Sums) -> None:
        boxes = (table.firsts, table.to_starts, table.sizes, table.to_strides, table.from_strides, slots)
        kernels.digest_boxes(self._lanes, self.width, *(column[rows] for column in boxes), sums)

    def digest_elements(self, positions: Ints, elements: Ints, slots: Ints, sums: Sums) -> None:
        kernels.digest_elements(self._lanes, self.width, positions, elements, slots, sums)

    def scatter(self, positions: torch.Tensor, values: torch.Tensor) -> None:
        kernels.scatter(self._lanes, self.width, positions.numpy(), values.numpy().view(np.uint16))

    def staged(self, positions: Ints, values: Lanes) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(positions), torch.from_numpy(values.view(np.int16))


class DeviceMemory(_Flat):
    """On any device of torch's."""

    def digest_boxes(self, table: BoxTable, rows: slice, slots: Ints, sums: Sums) -> None:
        for row in range(*rows.indices(len(table))):
            for positions, elements in self._box_chunks(table, row):
                total = int(sums[slots[row]]) + int(self._terms(positions, elements).sum().item())
                sums[slots[row]] = total % MODULUS

    def digest_elements(self, positions: Ints, elements: Ints, slots: Ints, sums: Sums) -> None:
        terms = self._terms(self._here(positions), self._here(elements))
        found = torch.zeros(len(sums), dtype=torch.int64, device=terms.device).index_add_(0, self._here(slots), terms)
        sums += found.cpu().numpy().view(np.uint64)

    def scatter(self, positions: torch.Tensor, values: torch.Tensor) -> None:
        self._flat[positions] = values

    def staged(self, positions: Ints, values: Lanes) -> tuple[torch.Tensor, torch.Tensor]:
        typed = values.view(np.int16 if self.width == 1 else np.int32)
        return self._here(positions), torch.from_numpy(typed).to(self._flat.device)

    def _here(self, numbers: Ints) -> torch.Tensor:
        return torch.from_numpy(numbers).to(self._flat.device)

    def _box_chunks(self, table: BoxTable, row: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Positions and image elements of a box, at most CHUNK_ELEMENTS (or one element of the outer dims' walk) at a time."""
        sizes, to_strides, from_strides = (a[row].tolist() for a in (table.sizes, table.to_strides, table.from_strides))
        count, device = int(table.counts[row]), self._flat.device
        for begin in range(0, count, CHUNK_ELEMENTS):
            rest = torch.arange(begin, min(begin + CHUNK_ELEMENTS, count), device=device)
            positions = torch.full_like(rest, int(table.to_starts[row]))
            elements = torch.full_like(rest, int(table.firsts[row]))
            for size, to, by in zip(reversed(sizes), reversed(to_strides), reversed(from_strides), strict=True):
                if size > 1:
                    index = rest % size
                    rest = rest // size
                    positions += index * to
                    elements += index * by
            yield positions, elements

    def _terms(self, positions: torch.Tensor, elements: torch.Tensor) -> torch.Tensor:
        """One term of the digest per element, int64 [n], mod 2^64: the sum over its lanes."""
        bits = self._flat[positions].to(torch.int64)
        lanes = [bits >> (16 * k) & _MASK for k in range(self.width)]  # little-endian: the low half comes first
        return sum(_finalised((elements * self.width + k) << 16 | lane) for k, lane in enumerate(lanes))  # type: ignore[return-value]


def _finalised(x: torch.Tensor) -> torch.Tensor:
    """digest._finalise on int64, whose products wrap as uint64's do."""
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Logical right shift."""
    return (x >> by) & ((1 << (64 - by)) - 1)
