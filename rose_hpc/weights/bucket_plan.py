"""Where every bucket of a policy belongs, and whether a header is that of such a bucket. Pure.

A header comes from a peer: nothing of it is used, least of all in a file's name, before it was compared with the plan here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rose_hpc.errors import WeightsError
from rose_hpc.weights import wire
from rose_hpc.weights.layout import Runs
from rose_hpc.weights.routing import RoutingPlan, Stream
from rose_hpc.weights.wire import BucketHeader, Kind


@dataclass(frozen=True)
class BucketPlan:
    """Where every bucket belongs: the routing plan and how its streams are cut."""

    plan: RoutingPlan
    bucket_bytes: int
    _covers: dict[tuple[int, ...], str] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def plan_id(self) -> int:
        return wire.plan_id(self.plan.fingerprint)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Buckets of each stream, by id."""
        return tuple(s.buckets(self.bucket_bytes) for s in self.plan.streams)

    @cached_property
    def _stream_bytes(self) -> tuple[int, ...]:
        return tuple(s.nbytes for s in self.plan.streams)

    def stream(self, stream_id: int) -> Stream:
        """Raises WeightsError when the plan has no such stream."""
        if not 0 <= stream_id < len(self.counts):
            raise WeightsError("no such stream in the routing plan", got=stream_id, expected=f"0 to {len(self.counts) - 1}")
        return self.plan.streams[stream_id]

    def runs(self, streams: tuple[int, ...]) -> Runs:
        """What these streams cover of the image: sorted, neighbours joined. Raises LayoutError when two overlap."""
        return Runs.joined(self.plan.streams[s].runs for s in streams).merged()

    def covers(self, streams: tuple[int, ...]) -> str:
        """A name for what these streams cover: the same exactly when the bytes are, whatever plan they belong to."""
        if streams not in self._covers:
            runs = self.runs(streams)
            self._covers[streams] = hashlib.sha256(runs.offsets.tobytes() + runs.sizes.tobytes()).hexdigest()
        return self._covers[streams]

    def check_place(self, stream_id: int, index: int) -> None:
        """Raises WeightsError when there is no such bucket."""
        self.stream(stream_id)
        if not 0 <= index < self.counts[stream_id]:
            raise WeightsError(f"stream {stream_id} has no such bucket", got=index, expected=f"0 to {self.counts[stream_id] - 1}")

    def check(self, header: BucketHeader, version: int) -> None:
        """Raises WeightsError unless the header is that of a bucket of this plan and version."""
        self.check_place(header.stream_id, header.index)
        first = header.index * self.bucket_bytes
        nbytes = min(self.bucket_bytes, self._stream_bytes[header.stream_id] - first)
        got = (header.plan, header.version, header.first_lane, header.lanes)
        expected = (self.plan_id, version, first // wire.LANE_BYTES, nbytes // wire.LANE_BYTES)
        if got != expected:
            raise WeightsError(
                f"bucket {header.index} of stream {header.stream_id} does not belong here",
                got="plan {:#x}, version {}, lanes from {}, {} lanes".format(*got),
                expected="plan {:#x}, version {}, lanes from {}, {} lanes".format(*expected),
            )


def check_delta(plan: BucketPlan, header: BucketHeader, version: int, base: int | None = None) -> None:
    """Raises WeightsError unless this is a bucket of a delta: of this plan and version, against an older base (this one, if given)."""
    plan.check(header, version)
    if not 0 <= header.base < version or (base is not None and header.base != base):
        raise WeightsError(
            f"bucket {header.index} of stream {header.stream_id} of version {version} starts from another version",
            got=f"base {header.base}",
            expected="a delta" if base is None else f"base {base}",
        )


def check_dense(plan: BucketPlan, header: BucketHeader, version: int) -> None:
    """Raises WeightsError unless this is a bucket of a keyframe of this plan and version."""
    plan.check(header, version)
    if header.kind != Kind.DENSE or header.base != wire.NO_BASE:
        raise WeightsError(
            "not a bucket of a keyframe", got=f"{header.kind.name}, base {header.base}", expected=f"DENSE, base {wire.NO_BASE}"
        )


def sorted_streams(plan: BucketPlan, streams: Sequence[int]) -> tuple[int, ...]:
    """The ids in order. Raises WeightsError when one is unknown or named twice."""
    for stream_id in streams:
        plan.stream(stream_id)
    if len(set(streams)) != len(streams):
        raise WeightsError("a stream is named twice", got=sorted(streams)[:8])
    return tuple(sorted(streams))
