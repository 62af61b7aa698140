"""The policies that cross the link: shapes of a Qwen3, bits of SmolLM2-135M, repeated until the image is full.

How many parameters an image has decides what a publish costs beside the coding, so the shapes are those of a real policy of that size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rose_hpc.bench import real_versions
from rose_hpc.bench.synthetic import ValueTable
from rose_hpc.errors import LayoutError

Shapes = Sequence[tuple[str, tuple[int, ...]]]
LANE_BYTES = 2


@dataclass(frozen=True)
class Qwen3Sizes:
    """What a Qwen3's parameters are made of; embeddings tied."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Hugging Face's names and shapes, in its order."""
        found: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (self.vocabulary, self.hidden))]
        for layer in range(self.layers):
            found += [(f"model.layers.{layer}.{name}.weight", shape) for name, shape in self._layer()]
        return [*found, ("model.norm.weight", (self.hidden,))]

    def _layer(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "self_attn.q_proj", (queries, self.hidden)
        yield "self_attn.k_proj", (keys, self.hidden)
        yield "self_attn.v_proj", (keys, self.hidden)
        yield "self_attn.o_proj", (self.hidden, queries)
        yield from ((f"self_attn.{name}_norm", (self.head_dim,)) for name in ("q", "k"))
        yield from ((f"mlp.{name}_proj", (self.intermediate, self.hidden)) for name in ("gate", "up"))
        yield "mlp.down_proj", (self.hidden, self.intermediate)
        yield from ((name, (self.hidden,)) for name in ("input_layernorm", "post_attention_layernorm"))


def link_policy(nbytes: int) -> list[tuple[str, tuple[int, ...]]]:
    """Shapes of Qwen3-0.6B with as many layers as make at least so many bytes in bfloat16 (28 would be the real one: 1.2 GB)."""
    layers = 0
    while _lanes(shapes := Qwen3Sizes(151_936, 1024, 3072, layers, 16, 8, 128).shapes()) * LANE_BYTES < nbytes:
        layers += 1
    return shapes


class LinkImage:
    """shapes: of its parameters, in image order; real: what `real_versions.make_versions` wrote."""

    def __init__(self, shapes: Shapes, real: Path) -> None:
        self.shapes, self._real = [(name, tuple(shape)) for name, shape in shapes], real

    @property
    def lanes(self) -> int:
        return _lanes(self.shapes)

    @property
    def nbytes(self) -> int:
        return LANE_BYTES * self.lanes

    def bits(self) -> NDArray[np.uint16]:
        """uint16 [lanes]: all of it."""
        return np.resize(self._real_bits, self.lanes)

    def values(self) -> ValueTable:
        """The frequencies of the real changes, all steps pooled."""
        return ValueTable.of([step.change.deltas for step in real_versions.read_steps(self._real)])

    def rows_of(self, rank: int, world_size: int) -> NDArray[np.uint16]:
        """uint16: this rank's rows of every parameter, one after the other. Raises LayoutError where they do not divide."""
        parts: list[NDArray[np.uint16]] = []
        first = 0
        for name, shape in self.shapes:
            if shape[0] % world_size:
                raise LayoutError(f"{name} does not divide into rows", got=f"{shape[0]} rows", expected=f"a multiple of {world_size}")
            count = math.prod(shape) // world_size
            parts += self._tiles(first + rank * count, count)
            first += count * world_size
        return np.concatenate(parts)

    def _tiles(self, first: int, count: int) -> Iterator[NDArray[np.uint16]]:
        """Lanes first … first + count of the repeated bits, in views."""
        base = self._real_bits
        while count:
            part = base[first % len(base) :][:count]
            yield part
            first, count = first + len(part), count - len(part)

    @cached_property
    def _real_bits(self) -> NDArray[np.uint16]:
        return real_versions.read_image(self._real)


def _lanes(shapes: Shapes) -> int:
    return sum(math.prod(shape) for _, shape in shapes)
