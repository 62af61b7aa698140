from __future__ import annotations

import numpy as np
import pytest

from rose_hpc.bench.synthetic import CLUSTER_LANES, Change, Positions, ValueTable, make_change, random_image
from rose_hpc.errors import WeightsError

LANES = 1 << 21
VALUES = ValueTable.of([np.array([1, 1, 1, 0xFFFF], np.uint16)])


def change(density: float, positions: Positions, lanes: int = LANES, seed: int = 0) -> Change:
    return make_change(np.random.default_rng(seed), lanes, density, positions, VALUES)


@pytest.mark.parametrize("positions", Positions)
@pytest.mark.parametrize("density", [0.001, 0.003, 0.01, 0.03, 0.1])
def test_the_asked_fraction_changes_and_nothing_else(density: float, positions: Positions) -> None:
    made = change(density, positions)
    assert len(made.lanes) / LANES == pytest.approx(density, rel=0.15)
    assert np.all(np.diff(made.lanes) > 0) and made.lanes[0] >= 0 and made.lanes[-1] < LANES
    assert np.all(made.deltas != 0)


def test_clustered_changes_lie_in_few_groups() -> None:
    groups = {kind: len(np.unique(change(0.01, kind).lanes // CLUSTER_LANES)) for kind in Positions}
    assert groups[Positions.CLUSTERED] < LANES / CLUSTER_LANES * 0.04 < groups[Positions.IID] / 10


@pytest.mark.parametrize("positions", Positions)
@pytest.mark.parametrize("lanes", [1, 7, CLUSTER_LANES + 1, 1001])
def test_an_odd_end_is_respected(positions: Positions, lanes: int) -> None:
    for seed in range(20):
        assert np.all(change(0.4, positions, lanes, seed).lanes < lanes)


@pytest.mark.parametrize("positions", Positions)
def test_no_density_changes_nothing(positions: Positions) -> None:
    assert len(change(0.0, positions).lanes) == 0


@pytest.mark.parametrize("density", [-0.1, 0.6])
def test_a_density_that_cannot_be_made_is_refused(density: float) -> None:
    with pytest.raises(WeightsError):
        change(density, Positions.CLUSTERED)


def test_an_update_is_undone_exactly_also_where_bits_wrap_around() -> None:
    image = np.array([0, 0xFFFF, 5, 6], np.uint16)
    update = Change(np.array([0, 1, 3]), np.array([0xFFFF, 1, 7], np.uint16))
    update.apply(image)
    assert image.tolist() == [0xFFFF, 0, 5, 13]
    update.undo(image)
    assert image.tolist() == [0, 0xFFFF, 5, 6]


def test_the_same_seed_gives_the_same_update() -> None:
    one, other = change(0.01, Positions.IID, seed=3), change(0.01, Positions.IID, seed=3)
    assert np.array_equal(one.lanes, other.lanes) and np.array_equal(one.deltas, other.deltas)


def test_values_come_as_often_as_they_were_seen() -> None:
    table = ValueTable.of([np.array([3, 3, 3, 9], np.uint16), np.array([3, 3, 3, 9], np.uint16)])
    drawn = table.draw(np.random.default_rng(0), 100_000)
    assert set(drawn.tolist()) == {3, 9}
    assert np.mean(drawn == 3) == pytest.approx(0.75, abs=0.01)
    assert table.entropy_bits == pytest.approx(0.811278, rel=1e-5)


def test_no_change_makes_no_table() -> None:
    with pytest.raises(WeightsError):
        ValueTable.of([np.zeros(0, np.uint16)])


def test_a_random_image_holds_small_finite_weights() -> None:
    values = (random_image(np.random.default_rng(0), 10_000).astype(np.uint32) << 16).view(np.float32)
    assert np.isfinite(values).all() and 0.015 < values.std() < 0.025
