"""A keyframe on its way into an image: every bucket dense, in any order, straight to its place.

Invariants
- Only whole messages of one version, of the arena's plan, are written.
- A keyframe is complete when every bucket of every stream that it has touched was written; which streams those are decides
  what the image holds.

Progress is in memory: while it lasts the image is nothing, and one that was interrupted begins anew.
"""

from __future__ import annotations

from rose_hpc.errors import WeightsError
from rose_hpc.weights import wire
from rose_hpc.weights.arena_apply import Decoders
from rose_hpc.weights.bucket_plan import BucketPlan, check_dense
from rose_hpc.weights.codec_parts import Lanes
from rose_hpc.weights.wire import BucketHeader


class Keyframe:
    """One keyframe being received."""

    def __init__(self, decoders: Decoders) -> None:
        self._decoders = decoders
        self._version: int | None = None
        self._written: dict[int, set[int]] = {}

    @property
    def plan(self) -> BucketPlan:
        return self._decoders.plan

    def write(self, message: bytes | memoryview, version: int | None, image: Lanes) -> BucketHeader:
        """One bucket into the image. Raises WeightsError, with the image untouched, for what does not belong here."""
        header, _ = wire.unpack(message)
        for expected in (version, self._version):
            if expected is not None and header.version != expected:
                raise WeightsError("a bucket of another keyframe", got=f"version {header.version}", expected=f"version {expected}")
        check_dense(self.plan, header, header.version)
        self._decoders[header.stream_id].apply(message, image, digest=False, header=header)
        self._version = header.version
        self._written.setdefault(header.stream_id, set()).add(header.index)
        return header

    def streams(self, version: int) -> tuple[int, ...]:
        """The streams that were written, by id. Raises WeightsError while buckets are missing, or when it is another version."""
        counts = self.plan.counts
        missing = [(s, i) for s in sorted(self._written) for i in range(counts[s]) if i not in self._written[s]]
        if self._version != version or missing:
            raise WeightsError(
                f"the keyframe of version {version} is not complete",
                got=f"version {self._version}, without {len(missing)} buckets, of (stream, index) {missing[:4]}",
                expected="every bucket of its streams",
            )
        return tuple(sorted(self._written))
