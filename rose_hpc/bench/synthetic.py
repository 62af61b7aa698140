"""Updates of a chosen density on a given image: positions independent or clustered, values drawn from the frequencies of real changes.

Invariants (asserted by the tests)
- Positions are sorted and distinct, deltas never 0: exactly these lanes change.
- The density is the asked one but for sampling noise, for both kinds of positions.
- The same seed gives the same update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from rose_hpc.bench.entropy import frequency_entropy_bits
from rose_hpc.errors import WeightsError

CLUSTER_LANES = 256  # changes of a clustered update come in groups of so many lanes …
CLUSTER_DENSITY = 0.5  # … of which so many change; elsewhere nothing does
INITIAL_STD = 0.02  # of an image made up here: a usual initialisation


class Positions(StrEnum):
    """How the changed lanes lie."""

    IID = "iid"
    CLUSTERED = "clustered"


@dataclass(frozen=True)
class Change:
    """One update. lanes: int64 [k], sorted, distinct; deltas: uint16 [k], (new − old) mod 2^16, never 0."""

    lanes: NDArray[np.int64]
    deltas: NDArray[np.uint16]

    def apply(self, image: NDArray[np.uint16]) -> None:
        """Bring an image forward in place."""
        image[self.lanes] += self.deltas

    def undo(self, image: NDArray[np.uint16]) -> None:
        """Bring an image back in place."""
        image[self.lanes] -= self.deltas


@dataclass(frozen=True)
class ValueTable:
    """How often each difference occurred. deltas: uint16 [m], distinct, not 0; counts: int64 [m]."""

    deltas: NDArray[np.uint16]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, changes: Sequence[NDArray[np.uint16]]) -> ValueTable:
        """Pool the differences of several updates. Raises WeightsError when nothing changed."""
        counts = np.zeros(1 << 16, np.int64)
        for deltas in changes:
            counts += np.bincount(deltas, minlength=1 << 16)
        present = np.flatnonzero(counts[1:]) + 1
        if not len(present):
            raise WeightsError("no value has changed", remedy="take a larger learning rate or more steps")
        return cls(present.astype(np.uint16), counts[present])

    @property
    def entropy_bits(self) -> float:
        return frequency_entropy_bits(self.counts)

    def draw(self, rng: np.random.Generator, size: int) -> NDArray[np.uint16]:
        """uint16 [size], independent, by frequency."""
        edges = np.cumsum(self.counts)
        return self.deltas[np.searchsorted(edges, rng.integers(0, edges[-1], size), side="right")]


def make_change(rng: np.random.Generator, lanes: int, density: float, positions: Positions, values: ValueTable) -> Change:
    """An update of an image of `lanes` lanes. Raises WeightsError on a density outside of 0..CLUSTER_DENSITY."""
    if not 0 <= density <= CLUSTER_DENSITY:
        raise WeightsError("no such density", got=density, expected=f"0 to {CLUSTER_DENSITY}")
    where = iid_lanes(rng, lanes, density) if positions is Positions.IID else clustered_lanes(rng, lanes, density)
    return Change(where, values.draw(rng, len(where)))


def iid_lanes(rng: np.random.Generator, lanes: int, density: float) -> NDArray[np.int64]:
    """Each lane with this probability, independently: the gaps between changes are geometric."""
    if density == 0:
        return np.zeros(0, np.int64)
    expected = lanes * density
    gaps = rng.geometric(density, int(expected + 8 * expected**0.5) + 16)
    where = np.cumsum(gaps) - 1
    return where[: np.searchsorted(where, lanes)]


def clustered_lanes(rng: np.random.Generator, lanes: int, density: float) -> NDArray[np.int64]:
    """As many groups of CLUSTER_LANES neighbours as it takes, chosen at random, in which every lane changes with CLUSTER_DENSITY."""
    every = -(-lanes // CLUSTER_LANES)
    groups = np.sort(rng.choice(every, round(every * density / CLUSTER_DENSITY), replace=False))
    changed = rng.random((len(groups), CLUSTER_LANES), dtype=np.float32) < CLUSTER_DENSITY
    group, inside = np.nonzero(changed)
    where = groups[group] * CLUSTER_LANES + inside
    return where[where < lanes]


def random_image(rng: np.random.Generator, lanes: int) -> NDArray[np.uint16]:
    """uint16 [lanes]: bfloat16 bits of normal values, as of a freshly initialised policy."""
    bits = (rng.standard_normal(lanes, np.float32) * np.float32(INITIAL_STD)).view(np.uint32)
    return (bits >> np.uint32(16)).astype(np.uint16)  # truncated: rounding would not change what is measured
