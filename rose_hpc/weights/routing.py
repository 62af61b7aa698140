"""Routing plan: which source sends which bytes of the image, as streams. Pure and deterministic: every rank computes the same.

A STREAM is what one source sends to one class of receivers: a sorted list of image runs. Its STREAM SPACE is their
concatenation, cut into buckets of at most bucket_bytes.

Invariants (asserted by the tests)
- Every wanted byte is in exactly one stream, a byte that nobody wants in none; bytes are conserved.
- A source sends only bytes that it holds. All bytes of a stream are wanted by the same demands.
- Bytes that several sources hold (replicas) are shared out, least loaded first, in long pieces that cut no element: sources
  that hold the same end up within 2 × CUT_BYTES of each other.
- The same input gives the same plan and fingerprint, whatever the order of the dict or of the demands; another plan gives
  another fingerprint.

Nothing loops over runs in Python: a large model sharded on its last dim has millions.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rose_hpc.errors import LayoutError
from rose_hpc.weights.layout import Run, Runs

CUT_BYTES = 4  # shared bytes are cut at multiples of this from the run's start: no element of any wire dtype is cut
MAX_STREAMS = 65_536  # a peer that announces more is refused
MAX_SOURCE = 1 << 20
_BITS = 62  # holders per int64 word of a bit mask
_MAGIC = b"RSP1"
_COUNT = struct.Struct("<4sI")  # magic, streams


@dataclass(frozen=True)
class Stream:
    """What one source sends to one class of receivers.

    source: trainer rank; runs: sorted, disjoint image runs, given as any sequence of `Run` and kept as arrays.
    """

    stream_id: int
    source: int
    runs: Runs

    def __post_init__(self) -> None:
        object.__setattr__(self, "runs", Runs.of(self.runs))
        if not self.runs.is_sorted():
            raise LayoutError(f"the runs of stream {self.stream_id} are not in order", got=self.runs, expected="increasing, none empty")

    @property
    def nbytes(self) -> int:
        return self.runs.nbytes

    def buckets(self, bucket_bytes: int) -> int:
        """How many buckets of at most bucket_bytes (dense) its stream space is cut into."""
        return -(-self.nbytes // bucket_bytes)


@dataclass(frozen=True)
class RoutingPlan:
    """All streams of one policy, by id. Streams never share a byte."""

    streams: tuple[Stream, ...]

    def __post_init__(self) -> None:
        if [s.stream_id for s in self.streams] != list(range(len(self.streams))):
            raise LayoutError("streams are numbered by their place", got=[s.stream_id for s in self.streams][:8], expected="0, 1, 2, …")

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical bytes, hexadecimal."""
        return hashlib.sha256(to_bytes(self)).hexdigest()


# ── planning ──


def plan_streams(owned: Mapping[int, Sequence[Run]], demands: Sequence[Sequence[Run]], image_bytes: int) -> RoutingPlan:
    """Streams that bring every wanted byte from a source that holds it.

    owned: source → its runs (replicas may overlap each other's); demands: what each kind of sink wants, usually one, the
    whole image. Raises LayoutError: nobody holds a wanted byte, a run outside the image, a source's own runs overlap.
    """
    sources = sorted(owned)
    held = [_checked(owned[s], image_bytes, f"source {s}") for s in sources]
    wanted = [_checked(d, image_bytes, "a demand") for d in demands]
    atoms = _atoms([*held, *wanted])
    demand_class = _classes(_masks(atoms, wanted))
    holders = _masks(atoms, held)
    _all_held(atoms, demand_class, holders)
    pieces = _shared_out(atoms, demand_class, holders, sources)
    return RoutingPlan(_as_streams(pieces))


@dataclass(frozen=True)
class _Piece:
    """Bytes that one source sends to one class of receivers."""

    source: int
    demand: int
    runs: Runs


def _checked(runs: Sequence[Run], image_bytes: int, whose: str) -> Runs:
    merged = Runs.of(runs).merged()
    if not merged.is_sorted() or (len(merged) and int(merged.ends[-1]) > image_bytes):
        raise LayoutError(f"{whose} has bytes outside of the image", got=merged, expected=f"inside {image_bytes} bytes")
    return merged


def _atoms(covers: Sequence[Runs]) -> Runs:
    """The image cut wherever anyone's ownership or demand changes, from the first such place to the last."""
    edges = np.unique(np.concatenate([[0], *(part for runs in covers for part in (runs.offsets, runs.ends))]))
    return Runs(edges[:-1], np.diff(edges))


def _masks(atoms: Runs, covers: Sequence[Runs]) -> NDArray[np.int64]:
    """Which of the covers hold each atom: bit masks int64 [words, atoms], cover k in word k // 62. Exact: a sum of edges."""
    masks = np.zeros((max(1, -(-len(covers) // _BITS)), len(atoms) + 1), np.int64)
    for k, runs in enumerate(covers):
        bit = np.int64(1 << (k % _BITS))
        masks[k // _BITS, np.searchsorted(atoms.offsets, runs.offsets)] += bit  # merged runs: no index twice
        masks[k // _BITS, np.searchsorted(atoms.offsets, runs.ends)] -= bit
    return np.cumsum(masks, axis=1)[:, :-1]


def _classes(masks: NDArray[np.int64]) -> NDArray[np.int64]:
    """A number for each atom, equal exactly where the masks are; 0 exactly where they are empty."""
    classes = np.zeros(masks.shape[1], np.int64)
    for word in masks:
        values, inverse = np.unique(word, return_inverse=True)
        _, classes = np.unique(classes * len(values) + inverse, return_inverse=True)
    return np.where(masks.any(axis=0), classes + 1, 0)


def _all_held(atoms: Runs, demand_class: NDArray[np.int64], holders: NDArray[np.int64]) -> None:
    missing = np.flatnonzero((demand_class > 0) & ~holders.any(axis=0))
    if missing.size:
        first = atoms[int(missing[0])]
        raise LayoutError(
            "no source owns a part of the image", got=f"bytes {first.offset_bytes} to {first.end_bytes}", expected="one owner at least"
        )


def _shared_out(atoms: Runs, demand_class: NDArray[np.int64], holders: NDArray[np.int64], sources: Sequence[int]) -> list[_Piece]:
    """Every wanted atom, or a part of one, to one of its holders. Atoms with fewer holders are placed first."""
    planned = dict.fromkeys(sources, 0)
    pieces: list[_Piece] = []
    groups = _groups(demand_class, holders)
    for demand, holding, members in sorted(
        ((d, [sources[k] for k in h], m) for d, h, m in groups), key=lambda g: (len(g[1]), g[1], g[2][0])
    ):
        runs = Runs(atoms.offsets[members], atoms.sizes[members]).joined_neighbours()
        shares = _shares(runs.nbytes, [planned[s] for s in holding])
        for source, share in zip(holding, _cut(runs, shares), strict=True):
            planned[source] += share.nbytes
            pieces.append(_Piece(source, demand, share))
    return pieces


def _groups(demand_class: NDArray[np.int64], holders: NDArray[np.int64]) -> Iterator[tuple[int, list[int], NDArray[np.int64]]]:
    """(demand class, holders, its atoms) for every combination that occurs and is wanted."""
    wanted = np.flatnonzero(demand_class)
    _, group = np.unique(_classes(np.vstack([demand_class, holders])[:, wanted]), return_inverse=True)
    order = np.argsort(group, kind="stable")
    for part in np.split(order, np.flatnonzero(np.diff(group[order])) + 1) if len(order) else []:
        members = wanted[part]
        first = members[0]
        bits = [w * _BITS + b for w, word in enumerate(holders[:, first].tolist()) for b in range(_BITS) if word >> b & 1]
        yield int(demand_class[first]), bits, members


def _shares(nbytes: int, planned: Sequence[int]) -> list[int]:
    """Split nbytes over holders so that the fullest is as low as it can be: fill the emptiest up to a common level."""
    order = sorted(range(len(planned)), key=lambda k: (planned[k], k))
    filled = len(order)
    while filled > 1 and sum(planned[k] for k in order[:filled]) + nbytes < filled * planned[order[filled - 1]]:
        filled -= 1  # the fullest of them is above the level already
    total = sum(planned[k] for k in order[:filled]) + nbytes
    shares = [0] * len(planned)
    for place, k in enumerate(order[:filled]):
        shares[k] = (total * (place + 1) // filled - total * place // filled) - planned[k]
    return shares


def _cut(runs: Runs, shares: Sequence[int]) -> list[Runs]:
    """The runs dealt out in their order, about shares[k] bytes to the k-th; cuts fall on CUT_BYTES from a run's start."""
    starts = runs.starts_in_concatenation()
    bounds = [0]
    for share in np.cumsum(shares)[:-1].tolist():
        at = int(np.searchsorted(starts, share, side="right")) - 1
        down = (share - int(starts[at])) % CUT_BYTES if share < runs.nbytes else 0
        bounds.append(max(bounds[-1], share - down))
    bounds.append(runs.nbytes)
    return [runs.span(low, high) for low, high in itertools.pairwise(bounds)]


def _as_streams(pieces: Iterable[_Piece]) -> tuple[Stream, ...]:
    """Pieces of equal (source, demand class) joined; ids follow the source, then the first byte."""
    together: dict[tuple[int, int], list[Runs]] = {}
    for piece in pieces:
        together.setdefault((piece.source, piece.demand), []).append(piece.runs)
    joined = [(source, Runs.joined(parts).merged()) for (source, _), parts in together.items()]
    ordered = sorted(((s, r) for s, r in joined if len(r)), key=lambda j: (j[0], int(j[1].offsets[0])))
    return tuple(Stream(k, source, runs) for k, (source, runs) in enumerate(ordered))


# ── asking ──


def wanted_streams(plan: RoutingPlan, wanted: Sequence[Run]) -> tuple[int, ...]:
    """Ids of the streams that carry the wanted runs, in increasing order.

    Raises LayoutError when a stream is wanted in part or a wanted byte is in no stream: the plan was not made for this sink.
    """
    asked = Runs.of(wanted).merged()
    overlap = {s.stream_id: int((_below(asked, s.runs.ends) - _below(asked, s.runs.offsets)).sum()) for s in plan.streams}
    for stream in plan.streams:
        if overlap[stream.stream_id] not in (0, stream.nbytes):
            raise LayoutError(
                f"stream {stream.stream_id} is wanted in part",
                got=f"{overlap[stream.stream_id]} bytes of it",
                expected=f"0 or {stream.nbytes}",
            )
    if sum(overlap.values()) != asked.nbytes:
        raise LayoutError("the plan does not carry all wanted bytes", got=f"{sum(overlap.values())} bytes", expected=f"{asked.nbytes}")
    return tuple(k for k, nbytes in overlap.items() if nbytes)


def _below(runs: Runs, points: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many bytes of the (sorted) runs lie before each point."""
    starts = np.append(runs.starts_in_concatenation(), runs.nbytes)
    at = np.searchsorted(runs.offsets, points, side="right")
    inside = np.minimum(points - np.append(0, runs.offsets)[at], np.append(0, runs.sizes)[at])
    return np.where(at > 0, starts[np.maximum(at - 1, 0)] + inside, 0)


# ── the plan as bytes ──


def to_bytes(plan: RoutingPlan) -> bytes:
    """Canonical form, little-endian: magic "RSP1", u32 streams; i64 per stream: source, runs; then all offsets, all sizes (i64).

    A stream's id is its place.
    """
    parts = [_COUNT.pack(_MAGIC, len(plan.streams))]
    parts += [struct.pack("<qq", s.source, len(s.runs)) for s in plan.streams]
    for field in ("offsets", "sizes"):
        parts += [getattr(s.runs, field).astype("<i8", copy=False).tobytes() for s in plan.streams]
    return b"".join(parts)


def from_bytes(content: bytes, image_bytes: int) -> RoutingPlan:
    """Inverse of `to_bytes`, for bytes from a peer.

    Raises LayoutError unless every run lies inside the image on even bytes, in canonical order, and no two share a byte.
    """
    magic, count = _COUNT.unpack_from(content) if len(content) >= _COUNT.size else (b"", 0)
    if magic != _MAGIC or count > MAX_STREAMS or len(content) < _COUNT.size + 16 * count:
        raise _not_a_plan(f"{len(content)} bytes, magic {magic!r}, {count} streams")
    heads = np.frombuffer(content, "<i8", 2 * count, _COUNT.size).reshape(count, 2)
    sources, lengths = heads[:, 0].tolist(), heads[:, 1].tolist()
    room = (len(content) - _COUNT.size - 16 * count) // 16
    if any(not 0 <= s <= MAX_SOURCE for s in sources) or any(not 0 < n <= room for n in lengths):
        raise _not_a_plan("a source or a number of runs out of range")
    total = sum(lengths)
    if len(content) != _COUNT.size + 16 * count + 16 * total:
        raise _not_a_plan(f"{len(content)} bytes for {total} runs")
    offsets, sizes = np.frombuffer(content, "<i8", 2 * total, _COUNT.size + 16 * count).reshape(2, total)
    _check_runs(offsets, sizes, image_bytes)
    cuts = np.cumsum([0, *lengths]).tolist()
    streams = tuple(
        Stream(k, s, Runs(offsets[a:b], sizes[a:b])) for k, (s, a, b) in enumerate(zip(sources, cuts[:-1], cuts[1:], strict=True))
    )
    _check_canonical(streams)
    return RoutingPlan(streams)


def _check_runs(offsets: NDArray[np.int64], sizes: NDArray[np.int64], image_bytes: int) -> None:
    inside = (offsets >= 0) & (offsets < image_bytes) & (sizes > 0) & (sizes <= image_bytes)  # before any sum: none overflows
    if not inside.all() or (offsets + sizes > image_bytes).any() or ((offsets | sizes) & 1).any():
        raise _not_a_plan(f"a run outside of {image_bytes} bytes or on an odd byte")


def _check_canonical(streams: Sequence[Stream]) -> None:
    keys = [(s.source, int(s.runs.offsets[0])) for s in streams]
    if keys != sorted(keys) or any(len(s.runs.joined_neighbours()) != len(s.runs) for s in streams):
        raise _not_a_plan("streams or runs that are not in canonical form")
    Runs.joined(s.runs for s in streams).merged()  # raises when two streams share a byte


def _not_a_plan(got: str) -> LayoutError:
    return LayoutError("not a routing plan", got=got, expected="the canonical bytes of one")
