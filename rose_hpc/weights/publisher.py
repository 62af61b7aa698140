"""Trainer side of the weight path: each rank updates its part of the node's image and stores what changed. No rank gathers a tensor.

    publisher = WeightPublisher(module, arena=Path("/dev/shm/…/trainer"), rank=0, world_size=2, wire_dtype="bfloat16")
    publisher.publish(version=1)           # every rank; then the relays carry the version

    no base ──▶ write the rank's runs densely, record base −1 ──▶ has base v ──▶ encode against the image in place, record base v ──▶ …
      ▲                                                               │
      └──── an error midway, a version that does not go forward, buckets of an earlier life under the same version ────┘

Ownership is read from placements (source_layout.py); every rank plans the same streams from it (routing.py), and one that finds
another plan in the arena refuses to publish. Tied parameters appear once, under the name that the module lists first. Values are
cast to the wire dtype block by block: beyond the image itself, the messages of a bucket and the encoder's scratch for one, a
publish needs room for a block, or for one local shard where that is not contiguous.

Publishers of several ranks write their own runs of one image at once: they hold its lock SHARED; a relay that reads a keyframe
holds it EXCLUSIVE. The digest over a rank's streams is kept by adding changes; every full_digest_every versions it is computed
anew from the image, which finds memory corruption.

What it does not do: tell anyone (the caller has the PublishedShard), move bytes between nodes, or wait for other ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from rose_hpc.errors import DigestMismatch, LayoutError, WeightsError
from rose_hpc.weights import wire
from rose_hpc.weights.arena import Arena, ShardRecord
from rose_hpc.weights.codec import StreamEncoder
from rose_hpc.weights.digest import combine, digest_runs
from rose_hpc.weights.layout import ImageLayout, Run, Runs, build_layout
from rose_hpc.weights.routing import Stream, plan_streams
from rose_hpc.weights.source_layout import LocalSlices, read_source, slices_of

Lanes = NDArray[np.uint16]
LANE_BYTES = 2
BLOCK_ELEMENTS = 1 << 20  # cast, gathered or scattered at a time: some MiB, large against the cost of a step
_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class PublishedShard:
    """What this rank published. digest: over its streams, adds up over ranks mod 2^64; shard_bytes: dense; encoded_bytes: messages.

    changes: lanes (16 bits) that differ from the base; base: version before, or −1 when this was written densely. stream_bytes:
    stream → its part of encoded_bytes.
    """

    version: int
    digest: int
    shard_bytes: int
    encoded_bytes: int = 0
    changes: int = 0
    base: int = wire.NO_BASE
    stream_bytes: Mapping[int, int] = field(default_factory=dict)


class WeightPublisher:
    """Publishes versions of a module or of a mapping name → tensor. One instance per trainer rank; its states are drawn above."""

    def __init__(
        self,
        source: torch.nn.Module | Mapping[str, torch.Tensor],
        arena: Path | str,
        rank: int = 0,
        world_size: int = 1,
        wire_dtype: str = "bfloat16",
        retained_versions: int = 4,
        bucket_bytes: int = 128 << 20,
        demands: Sequence[Sequence[Run]] | None = None,
        threads: int = 1,
        full_digest_every: int = 16,
        resume_from: int | None = None,
        deadline_s: float = 60.0,
    ) -> None:
        """demands: what kinds of sinks want, in image runs; None: all want everything. threads: for coding and digests.

        deadline_s: how long a publish waits for a relay that reads a keyframe out of the image.
        resume_from: a version that the arena's image already holds; used as base if the rank's record and digest agree, else ignored.
        Raises LayoutError (placements, mesh, another layout or plan in the arena), WeightsError, EnvironmentFault (no room).
        """
        if not 0 <= rank < world_size:
            raise LayoutError("rank outside the world", got=rank, expected=f"0 to {world_size - 1}")
        if retained_versions < 1 or full_digest_every < 1:
            raise WeightsError("retained_versions and full_digest_every are at least 1", got=(retained_versions, full_digest_every))
        self._tensors = dict(source.named_parameters()) if isinstance(source, torch.nn.Module) else dict(source)
        self._rank, self._retained, self._threads, self._full_every = rank, retained_versions, threads, full_digest_every
        self._deadline_s = deadline_s
        layout = build_layout(((n, t.shape) for n, t in self._tensors.items()), wire_dtype)
        parts = read_source(self._tensors, layout, rank, world_size)
        plan = plan_streams(parts.owned, [[Run(0, layout.image_bytes)]] if demands is None else demands, layout.image_bytes)
        self._plan_fingerprint = plan.fingerprint
        self._arena = Arena.create(Path(arena), layout)
        self._arena.set_plan(plan, bucket_bytes)
        plan_id = wire.plan_id(plan.fingerprint)
        self._streams = [
            _OwnStream(s, slices_of(parts.local, s.runs, layout), StreamEncoder(s, plan_id, bucket_bytes, threads))
            for s in plan.streams
            if s.source == rank
        ]
        self._room = torch.empty(BLOCK_ELEMENTS, dtype=_TORCH_DTYPES[layout.dtype])  # kept: malloc does not reuse aligned memory well
        self._base: int | None = None
        self._digest, self._since_full = 0, 0
        if resume_from is not None:
            self._resume(resume_from)

    @property
    def layout_fingerprint(self) -> str:
        return self._arena.layout.fingerprint

    @property
    def plan_fingerprint(self) -> str:
        """The same on every rank and every relay that carries this policy."""
        return self._plan_fingerprint

    def publish(self, version: int) -> PublishedShard:
        """Bring this rank's part of the image to the tensors' values of now, as `version`; store and record what changed.

        Raises TransferTimeout (a relay holds the image), EnvironmentFault (no room), LayoutError (another rank plans otherwise),
        DigestMismatch (the image is corrupt). After an error the next version is written densely.
        """
        self._check_plan()
        base = self._usable_base(version)
        self._base = None
        if base is None:
            self._forget_later(version)
        with self._arena.reading(self._deadline_s):
            image = self._arena.image(writable=True)
            shard = self._write_dense(image, version) if base is None else self._write_delta(image, version, base)
            self._check_digest(image, shard)
        self._arena.record_shard(
            ShardRecord(
                version,
                self._rank,
                shard.digest,
                shard.base,
                tuple(s.stream.stream_id for s in self._streams),
                shard.encoded_bytes,
                shard.changes,
            )
        )
        self._arena.prune(self._retained)
        self._base, self._digest = version, shard.digest
        return shard

    def _check_plan(self) -> None:
        if (found := self._arena.plan.fingerprint) != self._plan_fingerprint:
            raise LayoutError(
                f"rank {self._rank} does not plan what another rank plans",
                got=found[:12],
                expected=self._plan_fingerprint[:12],
                remedy="give every rank the same module, placements, demands and wire dtype",
            )

    def _forget_later(self, version: int) -> None:
        """After going back: later versions that this rank published in an earlier life lead nowhere any more."""
        for later in self._arena.versions():
            if later > version and any(shard.rank == self._rank for shard in self._arena.shards(later)):
                self._arena.discard(later)

    def _usable_base(self, version: int) -> int | None:
        """The version that a delta can be made against, or None."""
        if self._base is None or version <= self._base:
            return None
        own = {s.stream.stream_id for s in self._streams}
        return None if own & self._arena.stored(version).keys() else self._base  # an earlier life's buckets would be kept

    def _write_dense(self, image: Lanes, version: int) -> PublishedShard:
        for own in self._streams:
            scatter(image, own.stream.runs, self._pieces(own))
        nothing = dict.fromkeys((own.stream.stream_id for own in self._streams), 0)
        return PublishedShard(version, self._full_digest(image), self._shard_bytes, stream_bytes=nothing)

    def _write_delta(self, image: Lanes, version: int, base: int) -> PublishedShard:
        digest, changes = self._digest, 0
        sizes = dict.fromkeys((own.stream.stream_id for own in self._streams), 0)
        for own in self._streams:
            for encoded in own.encoder.encode_delta(image, self._pieces(own), version, base):
                self._arena.store_bucket(version, encoded.message)
                digest = combine([digest, encoded.digest_change])
                sizes[own.stream.stream_id] += len(encoded.message)
                changes += encoded.changes
        return PublishedShard(version, digest, self._shard_bytes, sum(sizes.values()), changes, base, sizes)

    def _check_digest(self, image: Lanes, shard: PublishedShard) -> None:
        self._since_full = 0 if shard.base < 0 else self._since_full + 1
        if self._since_full < self._full_every:
            return
        self._since_full = 0
        if (found := self._full_digest(image)) != shard.digest:
            raise DigestMismatch(
                f"rank {self._rank}: the image changed beside the publisher: memory corruption, or another writer",
                got=f"{found:016x} in version {shard.version}",
                expected=f"{shard.digest:016x}, by adding up changes since the last full digest",
                remedy="the next version is written densely; check the node's memory (EDAC, dmesg) if this comes back",
            )

    def _full_digest(self, image: Lanes) -> int:
        return combine([digest_runs(image, own.stream.runs, self._threads) for own in self._streams])

    def _resume(self, version: int) -> None:
        record = next((s for s in self._arena.shards(version) if s.rank == self._rank), None)
        if record is None or record.streams != tuple(s.stream.stream_id for s in self._streams):
            return
        with self._arena.reading(self._deadline_s):
            digest = self._full_digest(self._arena.image())
        if digest == record.digest:
            self._base, self._digest = version, digest

    @property
    def _shard_bytes(self) -> int:
        return sum(own.stream.nbytes for own in self._streams)

    def _pieces(self, own: _OwnStream) -> Iterator[Lanes]:
        for part in own.parts:
            yield from wire_pieces(self._tensors[part.name], part.slices, self._arena.layout, self._room)


@dataclass(frozen=True)
class _OwnStream:
    """A stream of this rank: where its bytes lie in the local tensors, and its encoder."""

    stream: Stream
    parts: tuple[LocalSlices, ...]
    encoder: StreamEncoder


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's values, flattened row-major: a view wherever they are contiguous."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().reshape(-1)


def wire_pieces(tensor: torch.Tensor, slices: Runs, layout: ImageLayout, room: torch.Tensor) -> Iterator[Lanes]:
    """The slices of a tensor's local values in the wire dtype, in order, as lanes on the host: uint16.

    slices: byte ranges of the flattened local tensor in the wire dtype. Values that are in it already, on the CPU, in one range, are
    one view; others go through `room` (BLOCK_ELEMENTS of the wire dtype), a block at a time: a piece holds until the next is asked
    for.
    """
    flat, dtype, item = _flat(tensor), _TORCH_DTYPES[layout.dtype], layout.item_bytes
    if len(slices) == 1 and flat.dtype == dtype and flat.device.type == "cpu":
        start = int(slices.offsets[0]) // item
        yield flat[start : start + int(slices.sizes[0]) // item].view(torch.int16).numpy().view("<u2")
        return
    for ranges in blocks(Runs(slices.offsets // item, slices.sizes // item), BLOCK_ELEMENTS):
        start = int(ranges.offsets[0])
        where = slice(start, start + ranges.nbytes) if len(ranges) == 1 else torch.from_numpy(ranges.expanded()).to(flat.device)
        yield room[: ranges.nbytes].copy_(flat[where]).view(torch.int16).numpy().view("<u2")


def scatter(image: Lanes, runs: Runs, pieces: Iterable[Lanes]) -> None:
    """Write pieces, which are the runs' concatenation, into the image. Raises LayoutError when they are shorter or longer."""
    at = 0
    for piece in (part[i : i + 2 * BLOCK_ELEMENTS] for part in pieces for i in range(0, part.size, 2 * BLOCK_ELEMENTS)):
        targets = runs.span(at, at + piece.nbytes)
        if targets.nbytes != piece.nbytes:
            break
        lanes = Runs(targets.offsets // LANE_BYTES, targets.sizes // LANE_BYTES)
        if len(lanes) == 1:
            image[int(lanes.offsets[0]) : int(lanes.ends[0])] = piece
        else:
            image[lanes.expanded()] = piece
        at += piece.nbytes
    if at != runs.nbytes:
        raise LayoutError("the values are not the runs' size", got=f"more or less than {at} bytes", expected=f"{runs.nbytes}")


def blocks(ranges: Runs, most: int) -> Iterator[Runs]:
    """The ranges cut into blocks of at most `most` positions; a long range is cut, and is alone in its blocks but the last."""
    ends = np.cumsum(ranges.sizes)
    at = 0
    while at < ranges.nbytes:
        whole = int(np.searchsorted(ends, at + most, "right"))  # ranges that end within the block: all of them, and no part of the next
        end = int(ends[np.searchsorted(ends, at, "right")])
        stop = at + most if end > at + most else int(ends[whole - 1])
        yield ranges.span(at, stop)
        at = stop
