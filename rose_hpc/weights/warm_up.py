"""Compile the kernels of the weight path once, into numba's cache: `python -m rose_hpc.weights.warm_up`, part of `make setup`.

Without it the first process that publishes or applies compiles them itself (half a minute on a slow core), inside a step.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from rose_hpc.weights import kernels, runtime_memory
from rose_hpc.weights.arena import Arena
from rose_hpc.weights.arena_copy import copy_keyframe
from rose_hpc.weights.codec import StreamDecoder
from rose_hpc.weights.codec_parts import Lanes
from rose_hpc.weights.layout import Run
from rose_hpc.weights.publisher import WeightPublisher

ELEMENTS = 1 << 16
CHANGED = (7, 300)  # every so manieth element: sparse, and sparser


def warm_up(folder: Path) -> None:
    """Publish, store, apply and read small versions once in every way that there is. folder: for two arenas, left to the caller."""
    runtime_memory.warm_up()
    weights = {"w": torch.zeros(ELEMENTS, dtype=torch.bfloat16)}
    bits = weights["w"].view(torch.int16)
    halves = [[Run(0, ELEMENTS)], [Run(ELEMENTS, ELEMENTS)]]
    publisher = WeightPublisher(weights, folder / "source", bucket_bytes=1 << 16, demands=halves, full_digest_every=2)
    digest = publisher.publish(0).digest
    source = Arena.open(folder / "source")
    sink = Arena.create(folder / "sink", source.layout)
    sink.set_plan(source.plan, source.bucket_bytes)
    streams = [s.stream_id for s in source.plan.streams]
    copy_keyframe(source, sink, 0, digest)
    for version, every in enumerate(CHANGED, start=1):
        bits[::every] += 1
        digest = publisher.publish(version).digest
        for stream in source.plan.streams:
            for index in range(stream.buckets(source.bucket_bytes)):
                if (message := source.bucket(version, stream.stream_id, index)) is not None:
                    sink.store_bucket(version, message)
                    _decode(StreamDecoder(stream, source.bucket_bytes), message, sink.image().copy())
        sink.commit_delta(version, version - 1, digest, streams)
        sink.apply(version, deadline_s=5.0, collect=True)
    sink.changed_lanes(0, len(CHANGED))


def _decode(decoder: StreamDecoder, message: memoryview, image: Lanes) -> None:
    """As an apply that goes on after a kill does, too."""
    decoder.apply(message, image)
    lanes, differences = decoder.changes(message)
    kernels.count_applied(kernels.read_only(image), lanes, differences, np.uint64(0))
    kernels.add_changes(image, lanes, differences)


def main() -> int:
    """Process entry."""
    with tempfile.TemporaryDirectory() as folder:
        warm_up(Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
