"""The arena of a relay's node as the relay sees it: perhaps not there yet, made by the trainer or from a parent's manifest."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rose_hpc.errors import LayoutError, WeightsError
from rose_hpc.weights.arena import Arena
from rose_hpc.weights.codec import StreamEncoder
from rose_hpc.weights.layout import from_json
from rose_hpc.weights.relay_messages import Manifest
from rose_hpc.weights.routing import Stream, from_bytes
from rose_hpc.weights.wire import plan_id


@dataclass(frozen=True)
class IncomingKeyframe:
    """A keyframe on its way into the image. written: (stream, bucket) that are there, and may be passed on."""

    version: int
    written: set[tuple[int, int]] = field(default_factory=set)


class RelayArena:
    """is_source: a trainer's node, whose image other processes write. recover_s: longest wait for readers when an apply is finished."""

    def __init__(self, path: Path, is_source: bool, recover_s: float) -> None:
        self.path, self.is_source, self._recover_s = path, is_source, recover_s
        self._arena: Arena | None = None
        self._encoders: dict[int, StreamEncoder] = {}
        self.incoming: IncomingKeyframe | None = None

    @property
    def arena(self) -> Arena | None:
        """Opened when it has appeared with its plan; what a killed predecessor left half-way is finished first."""
        if self._arena is None and Arena.is_ready(self.path):
            arena = Arena.open(self.path)
            if not self.is_source:
                arena.recover(self._recover_s)
            self._arena = arena
        return self._arena

    def arena_here(self) -> Arena:
        """Raises WeightsError while there is none."""
        if self.arena is None:
            raise WeightsError("no arena yet", got=self.path)
        return self.arena

    @property
    def version(self) -> int:
        """The verified version that lies here; −1 for none, and on a trainer's node, where `shards` tells."""
        if self.is_source or self.arena is None:
            return -1
        state = self.arena.state()
        return state.version if state.verified else -1

    @property
    def plan_fingerprint(self) -> str:
        return "" if self.arena is None else self.arena.plan.fingerprint

    def make(self, manifest: Manifest) -> Arena:
        """The arena for what a manifest announces. Raises LayoutError when it does not fit what is here already."""
        arena = self._made(manifest) if manifest.layout else self.arena_here()
        if arena.bucket_bytes != manifest.bucket_bytes:
            raise LayoutError("a peer cuts other buckets", got=manifest.bucket_bytes, expected=arena.bucket_bytes)
        return arena

    def _made(self, manifest: Manifest) -> Arena:
        """A manifest that brings layout and plan: the same ones come once from each parent."""
        layout = from_json(manifest.layout)
        plan = from_bytes(manifest.plan, layout.image_bytes)
        if self.arena is not None and self.arena.layout.fingerprint == layout.fingerprint and self.plan_fingerprint == plan.fingerprint:
            return self.arena
        arena = Arena.create(self.path, layout) if self._arena is None else self._arena
        if arena.layout.fingerprint != layout.fingerprint:
            raise LayoutError("a parent has another layout", got=layout.fingerprint[:12], expected=arena.layout.fingerprint[:12])
        arena.set_plan(plan, manifest.bucket_bytes)
        self._arena = arena
        self._encoders.clear()
        return arena

    def dense_bucket(self, stream: Stream, version: int, index: int) -> bytes:
        """One keyframe bucket of what the image holds."""
        arena = self.arena_here()
        if stream.stream_id not in self._encoders:
            self._encoders[stream.stream_id] = StreamEncoder(stream, plan_id(arena.plan.fingerprint), arena.bucket_bytes)
        return self._encoders[stream.stream_id].dense_bucket(arena.image(), version, index).message
