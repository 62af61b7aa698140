"""A trainer's version into a sink's arena on the same machine, without relays between: for the warm-up, benchmarks and tests."""

from __future__ import annotations

from rose_hpc.weights import wire
from rose_hpc.weights.arena import Arena, ArenaState
from rose_hpc.weights.codec import StreamEncoder


def copy_keyframe(source: Arena, sink: Arena, version: int, digest: int) -> ArenaState:
    """All that the source's image holds, bucket by bucket, as a relay would bring it. version, digest: the trainer's of now.

    Raises what the steps of a keyframe raise (arena.py).
    """
    plan_id = wire.plan_id(source.plan.fingerprint)
    sink.begin_keyframe()
    for stream in source.plan.streams:
        for encoded in StreamEncoder(stream, plan_id, source.bucket_bytes).encode_dense(source.image(), version):
            sink.write_dense(encoded.message, version)
    return sink.finish_keyframe(version, digest)
