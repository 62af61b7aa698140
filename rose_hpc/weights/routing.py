"""Routing plan: which source sends which bytes of the image to a sink. Pure and deterministic.

Invariants (asserted by the tests)
- The segments of a plan tile the wanted runs exactly: every wanted byte once, no other byte.
- A source is asked only for bytes that it owns.
- Where several sources own a byte (replicas), the bytes are spread: the source with the least planned so far is taken.
- No segment is longer than bucket_bytes, and none cuts an element.
- The same input gives the same plan, whatever the order of the dicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rose_hpc.errors import LayoutError
from rose_hpc.weights.layout import Run


@dataclass(frozen=True, order=True)
class Segment:
    """One bucket's worth: these bytes come from this source."""

    run: Run
    source: int


def plan_routes(owned: Mapping[int, Sequence[Run]], wanted: Sequence[Run], bucket_bytes: int) -> list[Segment]:
    """Segments that bring `wanted` from the sources. owned: source → its runs, merged and sorted; wanted: merged and sorted.

    bucket_bytes must be a multiple of the element size. Raises LayoutError when nobody owns a wanted byte.
    """
    edges = sorted({e for runs in owned.values() for r in runs for e in (r.offset_bytes, r.end_bytes)})
    planned = dict.fromkeys(sorted(owned), 0)
    cursors = {source: _Cursor(runs) for source, runs in owned.items()}
    segments: list[Segment] = []
    for piece in _cut(wanted, edges, bucket_bytes):
        holders = [source for source in planned if cursors[source].covers(piece)]
        if not holders:
            raise LayoutError(
                "no source owns a part of the image", got=f"bytes {piece.offset_bytes} to {piece.end_bytes}", expected="one owner at least"
            )
        source = min(holders, key=lambda s: (planned[s], s))
        planned[source] += piece.nbytes
        segments.append(Segment(piece, source))
    return segments


class _Cursor:
    """Walks one source's sorted runs along with increasing pieces: amortised O(1) per piece."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs, self._at = runs, 0

    def covers(self, piece: Run) -> bool:
        while self._at < len(self._runs) and self._runs[self._at].end_bytes <= piece.offset_bytes:
            self._at += 1
        return (
            self._at < len(self._runs)
            and self._runs[self._at].offset_bytes <= piece.offset_bytes
            and piece.end_bytes <= self._runs[self._at].end_bytes
        )


def _cut(wanted: Sequence[Run], edges: Sequence[int], bucket_bytes: int) -> list[Run]:
    """Cut the wanted runs where ownership changes and at every bucket_bytes."""
    pieces: list[Run] = []
    at = 0
    for run in wanted:
        start = run.offset_bytes
        while start < run.end_bytes:
            while at < len(edges) and edges[at] <= start:
                at += 1
            stop = min(run.end_bytes, start + bucket_bytes, edges[at] if at < len(edges) else run.end_bytes)
            pieces.append(Run(start, stop - start))
            start = stop
    return pieces
