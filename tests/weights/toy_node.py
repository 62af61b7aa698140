"""An arena with a trainer behind it, and the workers of an engine over toy models: an update without vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from toy_workers import DTYPES, Group, Toy, ToyWorker, bits

from rose_hpc.errors import TransferTimeout
from rose_hpc.weights import wire
from rose_hpc.weights.arena import Arena
from rose_hpc.weights.codec import StreamEncoder
from rose_hpc.weights.destination import DestinationPlan, Ints, from_bytes
from rose_hpc.weights.layout import ImageLayout
from rose_hpc.weights.placement import Sharing, share
from rose_hpc.weights.publisher import WeightPublisher
from rose_hpc.weights.runtime_memory import Lanes
from rose_hpc.weights.runtime_weights import RuntimeWeights
from rose_hpc.weights.tracing import trace
from rose_hpc.weights.worker_update import WorkerUpdate

TOY = Toy((Group((16, 8, 8), 16, "rows", 0, False), Group((16,), 16, "columns", 1, False), Group((5,), 6, "all", 0, False)), 2, "float32")


class ToyModel:
    """worker_update.Model over a toy worker."""

    def __init__(self, toy: Toy, rank: int, packed: bool = False) -> None:
        self.toy, self.rank, self._packed = toy, rank, packed
        self.worker: ToyWorker = toy.worker(rank)
        self.probed = SimpleNamespace(faults=(), unknown=())

    def trace(self, layout: ImageLayout) -> DestinationPlan:
        return trace(self.toy.worker(self.rank, "meta"), layout)

    def packed(self) -> list[str]:
        return ["p0"] if self._packed else []

    def weights(self, plan: DestinationPlan, layout: ImageLayout, slots: Ints) -> RuntimeWeights:
        return RuntimeWeights(dict(self.worker.named_parameters()), plan, layout, slots)

    def reload(self, layout: ImageLayout, image: Lanes) -> None:
        self.worker = self.toy.loaded(self.rank, image)

    def probe(self, plan: DestinationPlan, layout: ImageLayout, image: Lanes, seed: int) -> Iterator[Any]:
        yield None
        yield self.probed

    def give_back(self) -> int:
        with torch.no_grad():
            return sum(parameter.zero_().nbytes for parameter in self.worker.parameters())


class Node:
    """An arena with a trainer behind it, and the workers of one engine."""

    def __init__(self, folder: Path, packed: bool = False) -> None:
        self.tensors = {s.name: torch.randn(s.shape).to(DTYPES[TOY.dtype]) for s in TOY.layout.parameters}
        self._publisher = WeightPublisher(self.tensors, folder / "trainer", wire_dtype=TOY.dtype, bucket_bytes=64)
        self._source = Arena.open(folder / "trainer")
        self.arena = Arena.create(folder / "arena", self._source.layout)
        self.arena.set_plan(self._source.plan, self._source.bucket_bytes)
        self.models = [ToyModel(TOY, rank, packed) for rank in range(TOY.workers)]
        self.workers = [WorkerUpdate(folder / "arena", model) for model in self.models]
        self.version = 0
        self.digest = 0
        self.sharing: Sharing | None = None

    def change(self, elements: int = 1, keyframe: bool = False) -> None:
        """Publish a version in which some elements of every tensor differ, and bring it into the arena."""
        self.version += 1
        for tensor in self.tensors.values():
            tensor.view(-1)[:elements] += 1
        shard = self._publisher.publish(self.version)
        self.digest = shard.digest
        if keyframe or shard.base < 0:
            self.arena.prune(0)
            self.arena.begin_keyframe()
            for stream in self._source.plan.streams:
                for encoded in StreamEncoder(stream, wire.plan_id(self._source.plan.fingerprint), 64).encode_dense(
                    self._source.image(), self.version
                ):
                    self.arena.write_dense(encoded.message)
            self.arena.finish_keyframe(self.version, shard.digest)
            return
        stored = self._source.stored(self.version)
        for stream_id, indices in stored.items():
            for index in indices:
                message = self._source.bucket(self.version, stream_id, index)
                assert message is not None
                self.arena.store_bucket(self.version, message)
        self.arena.commit_delta(self.version, shard.base, shard.digest, tuple(stored))
        self.arena.apply(self.version, deadline_s=5)

    def describe(self) -> None:
        answers = [worker.describe() for worker in self.workers]
        assert all(a["fault"] is None for a in answers)
        if not answers[0]["reload"]:
            self.sharing = share([from_bytes(a["plan"]) for a in answers], self.arena.layout)
            for worker, slots in zip(self.workers, self.sharing.slots, strict=True):
                assert worker.share(slots)["fault"] is None

    def prepare(self, dense: bool = False) -> list[dict[str, Any]]:
        return [worker.prepare(self.version, self.digest, dense) for worker in self.workers]

    def apply(self) -> None:
        for worker in self.workers:
            worker.apply(self.version, self.digest)

    def total(self, answers: list[dict[str, Any]]) -> int:
        assert self.sharing is not None and all(a["fault"] is None for a in answers)
        return self.sharing.total([a["digests"] for a in answers])

    def is_current(self) -> bool:
        image = self.arena.image()
        return all(bits(m.worker) == bits(TOY.loaded(m.rank, image)) for m in self.models)


def is_locked(node: Node) -> bool:
    try:
        with node.arena.writing(0.01):
            return False
    except TransferTimeout:
        return True
