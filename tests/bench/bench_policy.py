"""A made-up policy in the form of real_versions.py, small enough for tests; and whether a link can be shaped here."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rose_hpc.bench.real_versions import LEARNING_RATES, STEPS
from rose_hpc.bench.shaped_link import check_possible
from rose_hpc.bench.synthetic import Positions, ValueTable, make_change, random_image
from rose_hpc.errors import EnvironmentFault

CHANGED = 0.01
VALUES = ValueTable.of([np.array([1] * 9 + [0xFFFF] * 9 + [2, 0xFFFE], np.uint16)])


def write_policy(folder: Path, shapes: Sequence[tuple[str, tuple[int, ...]]]) -> Path:
    """FOLDER as `make_versions` would leave it, with updates drawn at random; returns it."""
    rng, lanes = np.random.default_rng(0), sum(math.prod(shape) for _, shape in shapes)
    folder.mkdir()
    (folder / "parameters.json").write_text(json.dumps(shapes))
    np.save(folder / "image.npy", random_image(rng, lanes))
    for learning_rate in LEARNING_RATES:
        at = folder / f"lr-{learning_rate:g}"
        at.mkdir()
        for step in range(STEPS):
            change = make_change(rng, lanes, max(CHANGED, 10 / lanes), Positions.IID, VALUES)
            np.save(at / f"{step}.lanes.npy", change.lanes)
            np.save(at / f"{step}.deltas.npy", change.deltas)
    return folder


def can_shape() -> bool:
    try:
        check_possible()
    except EnvironmentFault:
        return False
    return True
