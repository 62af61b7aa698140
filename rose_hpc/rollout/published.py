"""Which versions the trainer has published, and what leads to them: deltas along a chain, or a keyframe. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rose_hpc.weights.relay_messages import KEYFRAME

NOTHING = -1


@dataclass(frozen=True)
class Published:
    """A version as the trainer wrote it. streams: rank → stream → encoded bytes; base −1: there are no deltas to it."""

    version: int
    base: int
    digest: int
    image_bytes: int
    streams: Mapping[int, Mapping[int, int]]

    @property
    def stream_bytes(self) -> dict[int, int]:
        return {stream: nbytes for streams in self.streams.values() for stream, nbytes in streams.items()}


@dataclass(frozen=True)
class Stage:
    """What a sink needs next: the deltas from `base`, or a keyframe."""

    version: int
    base: int


class PublishedVersions:
    """The newest ones. retained: how many are kept, as many as arenas keep deltas of."""

    def __init__(self, retained: int) -> None:
        self.retained = retained
        self._published: dict[int, Published] = {}

    def add(self, published: Published) -> None:
        """Older ones than arenas keep are forgotten."""
        self._published[published.version] = published
        for version in sorted(self._published)[: -self.retained]:
            del self._published[version]

    def __contains__(self, version: int) -> bool:
        return version in self._published

    def __getitem__(self, version: int) -> Published:
        """Raises KeyError: never published, or forgotten."""
        return self._published[version]

    def next_stage(self, held: int, version: int) -> Stage:
        """From what a sink holds towards a published version: the first delta of the chain, or a keyframe where there is none."""
        chain = [p for p in self._published.values() if p.base == held and held < p.version <= version]
        if held == NOTHING or not chain or not self.leads(held, version):
            return Stage(version, KEYFRAME)
        return Stage(chain[0].version, held)

    def leads(self, held: int, version: int) -> bool:
        """Whether the deltas from one version to another are all kept."""
        at = version
        while at != held and at in self._published:
            at = self._published[at].base
        return at == held
