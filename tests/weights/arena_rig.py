"""A trainer in miniature: versions of a random image as delta and keyframe messages, for the arena's tests."""

import itertools

import numpy as np

from rose_hpc.weights import wire
from rose_hpc.weights.arena import Arena
from rose_hpc.weights.codec import StreamEncoder
from rose_hpc.weights.digest import digest_runs
from rose_hpc.weights.layout import Run, build_layout
from rose_hpc.weights.routing import plan_streams

LOCK_S = 5.0


def two_owners(image_bytes):
    """Rank 0 and rank 1 take turns, as row-sharded tensors do."""
    step = max(image_bytes // 6 // 4 * 4, 4)
    cuts = [*range(0, image_bytes, step), image_bytes]
    runs = [Run(a, b - a) for a, b in itertools.pairwise(cuts) if b > a]
    return {0: runs[0::2], 1: runs[1::2]}


class Trainer:
    """Holds the newest image. next() → messages of the version after it; old images and digests stay in `images`, `digests`."""

    def __init__(self, elements=3000, dtype="bfloat16", bucket_bytes=2048, seed=0, owned=two_owners):
        self.layout = build_layout([("a", (elements // 2,)), ("b", (elements - elements // 2,))], dtype)
        self.plan = plan_streams(owned(self.layout.image_bytes), [[Run(0, self.layout.image_bytes)]], self.layout.image_bytes)
        self.bucket_bytes, self.rng = bucket_bytes, np.random.default_rng(seed)
        self.image = self.rng.integers(0, 1 << 16, self.layout.image_bytes // 2, np.uint16)
        plan_id = wire.plan_id(self.plan.fingerprint)
        self.encoders = [StreamEncoder(s, plan_id, bucket_bytes) for s in self.plan.streams]
        self.streams = list(range(len(self.plan.streams)))
        self.version, self.images, self.digests, self.deltas = 0, {}, {}, {}
        self._remember([])

    def _remember(self, messages):
        self.images[self.version] = self.image.copy()
        self.digests[self.version] = digest_runs(self.image, [Run(0, self.layout.image_bytes)])
        self.deltas[self.version] = messages

    def next(self, density=0.05, dense_lanes=()):
        """dense_lanes: a slice of the image in which everything becomes noise, so that its buckets travel dense."""
        new = self.image.copy()
        where = self.rng.random(new.size) < density
        new[where] += self.rng.integers(1, 9, int(where.sum()), np.uint16)
        if dense_lanes:
            new[slice(*dense_lanes)] = self.rng.integers(0, 1 << 16, new[slice(*dense_lanes)].size, np.uint16)
        self.version += 1
        messages = []
        for encoder, stream in zip(self.encoders, self.plan.streams, strict=True):
            pieces = [new[r.offset_bytes // 2 : r.end_bytes // 2] for r in stream.runs]
            messages += [e.message for e in encoder.encode_delta(self.image, pieces, self.version, self.version - 1)]
        assert (self.image == new).all()
        self._remember(messages)
        return messages

    def keyframe(self, version=None):
        version = self.version if version is None else version
        return [e.message for encoder in self.encoders for e in encoder.encode_dense(self.images[version], version)]

    def arena(self, path, version=None):
        """A new arena that holds a version."""
        arena = Arena.create(path, self.layout)
        arena.set_plan(self.plan, self.bucket_bytes)
        self.fill(arena, version)
        return arena

    def fill(self, arena, version=None):
        version = self.version if version is None else version
        arena.begin_keyframe()
        for message in self.keyframe(version):
            arena.write_dense(message, version)
        assert arena.finish_keyframe(version, self.digests[version]).verified

    def store(self, arena, version=None):
        version = self.version if version is None else version
        for message in self.deltas[version]:
            arena.store_bucket(version, message)

    def commit(self, arena, version=None, digest=None):
        version = self.version if version is None else version
        self.store(arena, version)
        arena.commit_delta(version, version - 1, self.digests[version] if digest is None else digest, self.streams)

    def holds(self, arena, version):
        """Whether the image is that version to the last bit, and the state says so."""
        state = arena.state()
        is_right = (state.version, state.digest, state.verified) == (version, self.digests[version], True)
        return is_right and bool((arena.image() == self.images[version]).all())
