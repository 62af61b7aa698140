"""Receiver inside vLLM's workers: a version of the node's arena becomes the model's weights, and is proved there.

    rose_begin(step, …), rose_answer()    describe, share, prepare, prove, release: while the model serves; vacate: while it does not
    start_weight_update()                 nothing
    update_weights({version, digest})     apply what was prepared (worker_update.py); prepares it itself when nobody did
    finish_weight_update()                nothing

Registered with vLLM's weight-transfer factory as backend `rose` (vllm_plugin.py).

Invariants
- A collective call occupies the engine's loop, so that nothing is generated meanwhile: steps that read, compute or wait run in a
  thread, begun by one call and answered to a later one. Only `update_weights` needs the pause. The exception is the proof of packed
  layers, which can only be had by running them, and not beside the model: each `rose_answer` does a little of it.
- A worker never raises for what can be expected to go wrong: with several workers vLLM's executor raises at the first failed
  answer and leaves the others' unread, so that every later call would read its predecessor's answers. Who drives the backend
  without `rose_begin` gets the same checks as exceptions.

It does not fetch: the relay has put the version into the arena before. What layers do to weights is vllm_layers.py's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from rose_hpc.errors import WeightsError
from rose_hpc.weights import runtime_memory, vllm_layers
from rose_hpc.weights.destination import DestinationPlan, Ints
from rose_hpc.weights.host_pages import give_back_tensors, trim
from rose_hpc.weights.layout import ImageLayout
from rose_hpc.weights.runtime_memory import Lanes
from rose_hpc.weights.runtime_weights import RuntimeWeights
from rose_hpc.weights.tracing import runtime_parameters, trace
from rose_hpc.weights.worker_update import Answer, WorkerUpdate

SLICE_S = 0.01  # of a probe at each poll: about a step of a small model
STEPS = ("describe", "share", "prepare", "prove", "release", "vacate")


@dataclass
class ArenaLocation(WeightTransferInitInfo):
    """arena: folder of the node's arena. It need not exist yet."""

    arena: str


@dataclass
class ExpectedVersion(WeightTransferUpdateInfo):
    """The version to load and the trainer's digest over its whole image."""

    version: int
    digest: int


class VllmModel:
    """worker_update.Model over a model that vLLM has loaded. config: the worker's VllmConfig."""

    def __init__(self, model: torch.nn.Module, config: Any) -> None:
        self._model, self._config = model, config
        try:
            self._meta: torch.nn.Module | str = vllm_layers.meta_copy(config)
        except Exception as error:  # the edge to models of any kind: this one is loaded anew each time, and its updates say so
            self._meta = f"it cannot be built without memory: {type(error).__name__}: {error}"

    def trace(self, layout: ImageLayout) -> DestinationPlan:
        return DestinationPlan((), (), flags=(self._meta,)) if isinstance(self._meta, str) else trace(self._meta, layout)

    def packed(self) -> list[str]:
        return vllm_layers.packed_layers(self._model)

    def weights(self, plan: DestinationPlan, layout: ImageLayout, slots: Ints) -> RuntimeWeights:
        return RuntimeWeights(dict(runtime_parameters(self._model)), plan, layout, slots)

    def reload(self, layout: ImageLayout, image: Lanes) -> None:
        vllm_layers.reload(self._model, self._config.model_config, layout, image)

    def probe(self, plan: DestinationPlan, layout: ImageLayout, image: Lanes, seed: int) -> Iterator[vllm_layers.Probe | None]:
        return vllm_layers.probe(self._model, plan, layout, image, seed)

    def give_back(self) -> int:
        """Buffers stay: no image brings them again. On other devices than CPUs nothing happens here (coserve/residency.py)."""
        vllm_layers.drop_packed(self._model)
        given = give_back_tensors(parameter.detach() for _, parameter in runtime_parameters(self._model))
        trim()
        return given


class RoseWeightTransferEngine(WeightTransferEngine[ArenaLocation, ExpectedVersion]):
    """One per vLLM worker; it is made right after the model was loaded, in the thread and with the configuration of that."""

    init_info_cls = ArenaLocation
    update_info_cls = ExpectedVersion
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, vllm_config, device, model, *args, **kwargs)
        # It warns at every update of layers that own no parameters (rotary embeddings, tied heads); `reload` checks what matters
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        self._loaded = VllmModel(model, vllm_config)
        runtime_memory.warm_up()
        self._update: WorkerUpdate | None = None

    def init_transfer_engine(self, init_info: ArenaLocation) -> None:
        self._update = WorkerUpdate(Path(init_info.arena), self._loaded)

    def step(self, name: str, args: tuple[Any, ...]) -> Answer:
        """One of STEPS. A fault is an answer."""
        if self._update is None:
            return {"fault": "no arena given: init_weight_transfer_engine comes first"}
        if name not in STEPS:
            return {"fault": f"no such step: {name}"}
        answer: Answer = getattr(self._update, name)(*args)
        return answer

    def begin(self, name: str, args: tuple[Any, ...]) -> _Job:
        """Begin a step; see RoseWorkerExtension."""
        if name == "prove" and self._update is not None and self._update.is_probed:
            return _SlicedJob(self._update.probing())
        return _ThreadJob(self, name, args)

    def start_weight_update(self) -> None:
        """Nothing: see the module's docstring."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As in the base class, which would ask for an accelerator's stream where there is none."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ExpectedVersion) -> None:
        """Load the version. Raises WeightsError with the model untouched when it was not prepared and cannot be."""
        version, digest = update_info.version, update_info.digest
        if self._update is None or not self._update.has_prepared(version, digest):
            self._load_alone(version, digest)
        else:
            self._update.apply(version, digest)

    def _load_alone(self, version: int, digest: int) -> None:
        """For a driver that knows only vLLM's own calls: everything in the pause, through a full reload, unproved."""
        for name, args in (("describe", ()), ("prepare", (version, digest, True))):
            if fault := self.step(name, args)["fault"]:
                raise WeightsError(f"version {version} refused", got=fault)
        if self._update is not None:
            self._update.apply(version, digest)
            self._update.release()

    def finish_weight_update(self) -> None:
        """Nothing: the load is complete when `update_weights` returns."""

    def shutdown(self) -> None:
        if self._update is not None:
            self._update.release()


class RoseWorkerExtension:
    """Mixed into vLLM's worker class (`worker_extension_cls`): steps that are begun by one call and answered to a later one."""

    weight_transfer_engine: RoseWeightTransferEngine
    rank: int

    def rose_begin(self, name: str, args: list[Any]) -> Answer:
        """Begin a step. {"fault": "busy"} while the one before is not over. share: a list with the slots of every worker."""
        job: _Job | None = getattr(self, "_rose_job", None)
        if job is not None and job.is_alive():
            return {"fault": "busy"}
        mine = [np.frombuffer(args[0][self.rank], np.int64)] if name == "share" else args
        self._rose_job = self.weight_transfer_engine.begin(name, tuple(mine))
        return {"fault": None}

    def rose_answer(self) -> Answer | None:
        """The answer of the step that was begun last; None while it goes on."""
        job: _Job | None = getattr(self, "_rose_job", None)
        return {"fault": "nothing was begun"} if job is None else job.poll()


class _Job(Protocol):
    def is_alive(self) -> bool: ...

    def poll(self) -> Answer | None:
        """The answer; None while there is none yet."""


class _ThreadJob(threading.Thread):
    """A step in a thread of its own."""

    def __init__(self, engine: RoseWeightTransferEngine, name: str, args: tuple[Any, ...]) -> None:
        super().__init__(name=f"rose-{name}", daemon=True)
        self._engine, self._step, self._args = engine, name, args
        self._answer: Answer | None = None
        self.start()

    def run(self) -> None:
        try:
            self._answer = self._engine.step(self._step, self._args)
        except Exception as error:  # the edge of the thread: nobody else would hear of it
            self._answer = unexpected(self.name, error)

    def poll(self) -> Answer | None:
        return self._answer


class _SlicedJob:
    """A step that goes on for a moment at each poll, in the engine's own thread."""

    def __init__(self, steps: Iterator[Answer | None]) -> None:
        self._steps = steps
        self._answer: Answer | None = None

    def is_alive(self) -> bool:
        return False  # a caller that gave up on it may begin another step

    def poll(self) -> Answer | None:
        end_s = time.monotonic() + SLICE_S
        try:
            while self._answer is None and time.monotonic() < end_s:
                self._answer = next(self._steps)
        except Exception as error:  # a worker must not raise, see above
            self._answer = unexpected("rose-prove", error)
        return self._answer


def unexpected(what: str, error: Exception) -> Answer:
    """A fault that nobody foresaw: its trace belongs in the log."""
    logging.getLogger(__name__).error("%s failed", what, exc_info=error)
    return {"fault": f"{type(error).__name__}: {error}"}
