"""Which memory pages belong to KV blocks alone, and that giving them back frees them and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rose_hpc.coserve.kv_pages import HeldWriter, block_ranges, read_held
from rose_hpc.weights.host_pages import whole_pages

BLOCKS = 12
PAGE = 64  # of these tests' kernel


@dataclass
class Placed:
    """As vLLM's KVCacheTensor."""

    layers: list[str] = field(default_factory=lambda: ["0"])
    layer_stride: int = 0
    block_stride: int = 0
    offset: int = 0


def layer_outermost(layers: int, page: int) -> Placed:
    return Placed([str(i) for i in range(layers)], layer_stride=page * BLOCKS, block_stride=page)


def block_outermost(layers: int, page: int) -> Placed:
    return Placed([str(i) for i in range(layers)], layer_stride=page, block_stride=page * layers)


placements = st.builds(
    lambda make, layers, page: make(layers, page),
    st.sampled_from([layer_outermost, block_outermost]),
    st.integers(1, 4),
    st.integers(1, 300),
)
chosen = st.sets(st.integers(0, BLOCKS - 1))


def owners(place: Placed) -> np.ndarray:
    """Which block each byte of the allocation belongs to, spelled out."""
    page = place.layer_stride // BLOCKS if place.layer_stride > place.block_stride else place.block_stride // len(place.layers)
    owner = np.full(page * BLOCKS * len(place.layers), -1)
    for layer in range(len(place.layers)):
        for block in range(BLOCKS):
            start = layer * place.layer_stride + block * place.block_stride
            owner[start : start + page] = block
    assert (owner >= 0).all()
    return owner


@given(placements, chosen)
def test_the_ranges_are_exactly_the_bytes_of_the_blocks(place: Placed, ids: set[int]) -> None:
    owner = owners(place)
    covered = np.zeros(len(owner), bool)
    for begin, end in block_ranges(ids, [place]):
        assert not covered[begin:end].any()
        covered[begin:end] = True
    assert (covered == np.isin(owner, list(ids))).all()


@given(placements, chosen, st.integers(0, 10 * PAGE))
def test_a_page_with_a_byte_of_another_block_stays(place: Placed, ids: set[int], address: int) -> None:
    owner = owners(place)
    for begin, end in whole_pages(block_ranges(ids, [place]), address, PAGE):
        assert begin % PAGE == end % PAGE == 0 and begin < end
        assert set(owner[begin - address : end - address]) <= ids
        assert address <= begin and end <= address + len(owner)


def test_blocks_that_lie_side_by_side_give_back_the_pages_they_share() -> None:
    place = layer_outermost(layers=2, page=PAGE // 2)
    assert whole_pages(block_ranges({2, 3}, [place]), 0, PAGE) == [(PAGE, 2 * PAGE), (7 * PAGE, 8 * PAGE)]
    assert whole_pages(block_ranges({2}, [place]), 0, PAGE) == []


def test_the_held_blocks_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert read_held(tmp_path / "board", BLOCKS) == []
    writer = HeldWriter(tmp_path / "board", BLOCKS)
    assert read_held(tmp_path / "board", BLOCKS) == []
    writer.write([3, 1, 11])
    assert read_held(tmp_path / "board", BLOCKS) == [3, 1, 11]
    writer.close()
