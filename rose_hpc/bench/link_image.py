"""The policy that crosses the link: SmolLM2-135M, repeated until it is as large as asked, each copy under its own names."""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rose_hpc.bench import real_versions
from rose_hpc.bench.synthetic import ValueTable
from rose_hpc.errors import LayoutError


class LinkImage:
    """real: what `real_versions.make_versions` wrote; copies: of its image."""

    def __init__(self, real: Path, copies: int) -> None:
        self._real, self._one = real, real_versions.read_shapes(real)
        self.shapes = [(f"{name}.{copy}", shape) for copy in range(copies) for name, shape in self._one]
        self.copies = copies

    @classmethod
    def at_least(cls, real: Path, nbytes: int) -> LinkImage:
        """As many copies as make so many bytes."""
        one = cls(real, 1)
        return cls(real, max(1, -(-nbytes // one.nbytes)))

    @property
    def lanes(self) -> int:
        return sum(math.prod(shape) for _, shape in self.shapes)

    @property
    def nbytes(self) -> int:
        return 2 * self.lanes

    def bits(self) -> NDArray[np.uint16]:
        """uint16 [lanes]: all of it."""
        return np.tile(self._base, self.copies)

    def values(self) -> ValueTable:
        """The frequencies of the real changes, all steps pooled."""
        return ValueTable.of([step.change.deltas for step in real_versions.read_steps(self._real)])

    def rows_of(self, rank: int, world_size: int) -> NDArray[np.uint16]:
        """uint16: this rank's rows of every parameter, one after the other. Raises LayoutError where they do not divide."""
        parts, at = [], 0
        for name, shape in self._one:
            if shape[0] % world_size:
                raise LayoutError(f"{name} does not divide into rows", got=f"{shape[0]} rows", expected=f"a multiple of {world_size}")
            count = math.prod(shape) // world_size
            parts.append(self._base[at + rank * count : at + (rank + 1) * count])
            at += count * world_size
        return np.tile(np.concatenate(parts), self.copies)

    @cached_property
    def _base(self) -> NDArray[np.uint16]:
        return real_versions.read_image(self._real)
