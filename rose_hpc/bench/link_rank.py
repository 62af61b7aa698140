"""A trainer rank of the link benchmark: real publisher, real control plane, made-up training steps.

    python -m rose_hpc.bench.link_rank SPEC.json

    ── line on stdin: CHANGE or DUMP ──▶ done, a line on stdout ──▶ … ; a CHANGE is followed by one PublishVersion over the control API

It holds its quarter of every parameter's rows as a DTensor over four ranks, as FSDP2 would; a CHANGE alters that fraction of its lanes, by
differences drawn from real ones. End of standard input ends it.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from rose_hpc.bench.link_image import LinkImage
from rose_hpc.bench.synthetic import Positions, make_change
from rose_hpc.config import Section, read_spec
from rose_hpc.control import WorkerChannel
from rose_hpc.errors import ControlError, RoseError
from rose_hpc.lifeline import die_with_parent, report_failure
from rose_hpc.messages import PublishVersion, VersionWritten, WorkerUp
from rose_hpc.weights.publisher import WeightPublisher

GROUP_DEADLINE_S = 60


class LinkRankSpec(Section):
    """shapes: of the image's parameters, in order; real: folder of the real versions; the others as in a trainer's specification."""

    rank: int
    world_size: int
    control_dir: Path
    rendezvous: Path
    arena: Path
    shapes: list[tuple[str, tuple[int, ...]]]
    real: Path
    seed: int
    bucket_bytes: int
    lease_ttl_s: float
    publish_deadline_s: float


class LinkRank:
    """Parameters, publisher and channel of one rank."""

    def __init__(self, spec: LinkRankSpec) -> None:
        self._spec, self._rng = spec, np.random.default_rng([spec.seed, spec.rank])
        image = LinkImage(spec.shapes, spec.real)
        self._values = image.values()
        self._lanes = image.rows_of(spec.rank, spec.world_size)
        self._publisher = WeightPublisher(self._sharded(image), spec.arena, spec.rank, spec.world_size, bucket_bytes=spec.bucket_bytes)
        self._channel = WorkerChannel(spec.control_dir, f"trainer-{spec.rank}", spec.lease_ttl_s)

    def run(self) -> None:
        """Until standard input ends."""
        self._channel.hello(WorkerUp(world_size=self._spec.world_size))
        for line in sys.stdin:
            request: dict[str, Any] = json.loads(line)
            if "dump" in request:
                np.save(request["dump"], self._lanes, allow_pickle=False)
            else:
                self._change(float(request["density"]))
            print("done", flush=True)
            if "dump" not in request:
                self._publish_when_told()

    def _sharded(self, image: LinkImage) -> dict[str, DTensor]:
        """Name → this rank's rows as a DTensor; all are views of one array."""
        mesh = DeviceMesh("cpu", list(range(self._spec.world_size)))
        values = torch.from_numpy(self._lanes.view(np.int16)).view(torch.bfloat16)
        tensors, first = {}, 0
        for name, shape in image.shapes:
            local = (shape[0] // self._spec.world_size, *shape[1:])
            count = math.prod(local)
            tensors[name] = DTensor.from_local(values[first : first + count].view(local), mesh, [Shard(0)], run_check=False)
            first += count
        return tensors

    def _change(self, density: float) -> None:
        if density:
            make_change(self._rng, len(self._lanes), density, Positions.IID, self._values).apply(self._lanes)
        gc.collect()  # not while the clock runs

    def _publish_when_told(self) -> None:
        end_s = time.monotonic() + self._spec.publish_deadline_s
        while time.monotonic() < end_s:
            command = self._channel.next()
            if isinstance(command, PublishVersion):
                self._channel.reply(command.call_id, self._publish(command.version))
                return
            if command is not None:
                raise ControlError("not a command for a rank of the benchmark", got=type(command).__name__, expected="publish_version")
        raise ControlError("nobody asked for the version", got=f"nothing in {self._spec.publish_deadline_s:g} s")

    def _publish(self, version: int) -> VersionWritten:
        start = time.perf_counter()
        shard = self._publisher.publish(version)
        seconds = time.perf_counter() - start
        return VersionWritten(version, shard.digest, shard.shard_bytes, seconds, shard.base, dict(shard.stream_bytes))


def truth(dumps: list[NDArray[np.uint16]], image: LinkImage) -> NDArray[np.uint16]:
    """The whole image, put together from what every rank dumped, in the order of the ranks."""
    whole, first, at = np.empty(image.lanes, np.uint16), 0, 0
    for _, shape in image.shapes:
        count = math.prod(shape) // len(dumps)
        for dump in dumps:
            whole[at : at + count] = dump[first : first + count]
            at += count
        first += count
    return whole


def main(spec_file: str) -> int:
    """Process entry. Exit status: 0 at the end of standard input, else that of the error."""
    die_with_parent()
    torch.set_num_threads(1)
    try:
        spec = read_spec(Path(spec_file), LinkRankSpec)
        torch.distributed.init_process_group("gloo", init_method=f"file://{spec.rendezvous}", rank=spec.rank, world_size=spec.world_size)
        LinkRank(spec).run()
    except RoseError as error:
        return report_failure(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
