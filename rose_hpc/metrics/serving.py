"""Figures of the serving side: percentiles over requests, and what the lent devices did. Pure, on arrays.

A percentile is interpolated linearly between the two nearest values (numpy's default), over the requests that have one: a request
without a first token has no time to it. It is not lost: it counts as failed, and as a violation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def percentile_or_none(values: ArrayLike, percent: float) -> float | None:
    """NaN is left out; None where nothing is left."""
    known = np.asarray(values, np.float64)
    known = known[~np.isnan(known)]
    return float(np.percentile(known, percent)) if len(known) else None


def percentiles(name: str, values: ArrayLike, percents: Sequence[int]) -> dict[str, float | None]:
    """{"NAME_p50_s": …} for times in seconds."""
    return {f"{name}_p{percent}_s": percentile_or_none(values, percent) for percent in percents}


def weighted_mean_or_none(values: ArrayLike, weights: NDArray[np.float64]) -> float | None:
    """Mean of the values that are not NaN; a plain one where their weights are all 0; None where nothing is left."""
    array = np.asarray(values, np.float64)
    known = ~np.isnan(array)
    if not known.any():
        return None
    total = weights[known].sum()
    return float((array[known] * weights[known]).sum() / total) if total > 0 else float(array[known].mean())


def spans_s(times_s: ArrayLike, owners: Sequence[Any]) -> NDArray[np.float64]:
    """How long each row speaks for: since the row before it of the same owner; 0 for an owner's first row."""
    times = np.asarray(times_s, np.float64)
    spans, last_s = np.zeros(len(times)), dict[Any, float]()
    for i, owner in enumerate(owners):
        spans[i] = max(0.0, times[i] - last_s.get(owner, times[i]))
        last_s[owner] = times[i]
    return spans
