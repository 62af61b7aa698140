"""A policy cut over workers in the ways vLLM does it, as plain torch modules with vLLM's `load_weights`; no vLLM involved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from rose_hpc.weights.layout import ImageLayout, build_layout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Group:
    """Tensors of shape (row, columns) that end up in one parameter, one below the other.

    cut: what each worker takes of every tensor, "rows", "columns" or "all"; padding: rows of zeros behind them; transposed: the
    parameter lies the other way round.
    """

    rows: tuple[int, ...]
    columns: int
    cut: str
    padding: int
    transposed: bool


class ToyWorker(torch.nn.Module):
    """One worker of `workers`. tied: a second name for the first parameter."""

    def __init__(self, groups: tuple[Group, ...], rank: int, workers: int, dtype: str, tied: bool = False) -> None:
        super().__init__()
        self._groups, self._rank, self._workers = groups, rank, workers
        for g, group in enumerate(groups):
            height = sum(self._rows(group, i)[1] for i in range(len(group.rows))) + group.padding
            shape = (height, self._columns(group)[1])
            parameter = torch.full(shape[::-1] if group.transposed else shape, float("nan"), dtype=DTYPES[dtype])
            self.register_parameter(f"p{g}", torch.nn.Parameter(parameter, requires_grad=False))
        self.register_buffer("cache", torch.zeros(3))
        if tied:
            self.head = self.p0

    def _rows(self, group: Group, i: int) -> tuple[int, int]:
        """(first, count) of tensor i that this worker takes."""
        count = group.rows[i] // self._workers if group.cut == "rows" else group.rows[i]
        return (self._rank * count if group.cut == "rows" else 0), count

    def _columns(self, group: Group) -> tuple[int, int]:
        count = group.columns // self._workers if group.cut == "columns" else group.columns
        return (self._rank * count if group.cut == "columns" else 0), count

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            g, i = (int(n) for n in name[1:].split("_"))
            group, parameter = self._groups[g], getattr(self, f"p{g}")
            rows = parameter.t() if group.transposed else parameter
            top = sum(self._rows(group, k)[1] for k in range(i))
            count = self._rows(group, i)[1]
            rows[top : top + count].copy_(tensor.narrow(0, *self._rows(group, i)).narrow(1, *self._columns(group)))
            if i == len(group.rows) - 1 and group.padding:
                rows[top + count :].fill_(0)


@dataclass(frozen=True)
class Toy:
    """A policy and how it is cut."""

    groups: tuple[Group, ...]
    workers: int
    dtype: str

    @property
    def layout(self) -> ImageLayout:
        return build_layout(((f"t{g}_{i}", (r, u.columns)) for g, u in enumerate(self.groups) for i, r in enumerate(u.rows)), self.dtype)

    def worker(self, rank: int, device: str = "cpu") -> ToyWorker:
        with torch.device(device):
            return ToyWorker(self.groups, rank, self.workers, self.dtype)

    def image(self, seed: int) -> np.ndarray:
        """Random bits, all patterns of them."""
        return np.random.default_rng(seed).integers(0, 1 << 16, self.layout.image_bytes // 2, dtype=np.uint16)

    def loaded(self, rank: int, image: np.ndarray) -> ToyWorker:
        """A worker after its own loader has run over the image."""
        worker, layout = self.worker(rank), self.layout
        flat = torch.from_numpy(image.view(np.uint8).copy())
        parts = ((s, flat[s.offset_bytes : s.offset_bytes + s.nbytes]) for s in layout.parameters)
        worker.load_weights((s.name, part.view(DTYPES[self.dtype]).reshape(s.shape)) for s, part in parts)
        return worker


@st.composite
def toys(draw: st.DrawFn) -> Toy:
    workers = draw(st.integers(1, 3))
    size = st.integers(1, 4).map(lambda n: n * workers)
    group = st.builds(
        Group,
        st.lists(size, min_size=1, max_size=3).map(tuple),
        size,
        st.sampled_from(["rows", "columns", "all"]),
        st.integers(0, 2),
        st.booleans(),
    )
    return Toy(tuple(draw(st.lists(group, min_size=1, max_size=3))), workers, draw(st.sampled_from(sorted(DTYPES))))


def bits(worker: torch.nn.Module) -> dict[str, bytes]:
    return {name: p.detach().contiguous().view(torch.uint8).numpy().tobytes() for name, p in worker.named_parameters()}
