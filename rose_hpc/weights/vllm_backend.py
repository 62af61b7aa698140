"""Receiver inside vLLM's workers: a committed version of the node's arena, verified, becomes the model's weights.

    rose_verify(version, digest)      map the image, recompute its digest; answers BY VALUE, the model is not touched
    start_weight_update()             nothing
    update_weights({version, digest}) load the verified image through vLLM's layerwise reload
    finish_weight_update()            nothing

Invariants
- No byte is loaded that has not been digested in this worker, and only while its digest is the expected one.
- A mismatch leaves the model as it was, and the next update works.

Why the reload starts in `update_weights` and not, as in vLLM's own backends, in `start_weight_update`: that call moves the
layers to the meta device, and after an error in the next one the model would be lost.

Why verification is a call of its own: with several workers vLLM's executor raises at the first failed answer and leaves
the others' unread, so that every later call would read its predecessor's answers. A worker must not raise for what can
be expected to go wrong. Who drives the backend without `rose_verify` gets the same check as an exception.

Every worker receives full Hugging Face tensors; vLLM's loaders cut them for tensor parallelism, fuse them and, on CPU,
repack them. It does not fetch: the relay has put the image into the arena before.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rose_hpc.errors import DigestMismatch, LayoutError, WeightsError
from rose_hpc.weights.arena import Arena
from rose_hpc.weights.digest import digest_image
from rose_hpc.weights.layout import ImageLayout

_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class ArenaLocation(WeightTransferInitInfo):
    """arena: folder of the node's arena. It need not exist yet."""

    arena: str


@dataclass
class ExpectedVersion(WeightTransferUpdateInfo):
    """The version to load and the trainer's digest over its whole image."""

    version: int
    digest: int


@dataclass(frozen=True)
class VerifiedImage:
    """A mapped image, uint8 [image_bytes], and the digest recomputed from these very bytes."""

    version: int
    digest: int
    layout: ImageLayout
    image: NDArray[np.uint8]


class RoseWeightTransferEngine(WeightTransferEngine[ArenaLocation, ExpectedVersion]):
    """One per vLLM worker. Holds at most one verified image, between `verify` and `receive_weights`."""

    init_info_cls = ArenaLocation
    update_info_cls = ExpectedVersion
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # It warns at every update of layers that own no parameters (rotary embeddings, tied heads); `_load` checks what matters
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        self._arena: Path | None = None
        self._verified: VerifiedImage | None = None

    def init_transfer_engine(self, init_info: ArenaLocation) -> None:
        self._arena = Path(init_info.arena)

    def verify(self, version: int, digest: int) -> VerifiedImage:
        """Digest the version's image and keep it mapped for the load that follows.

        Raises WeightsError when it is not in the arena, DigestMismatch when the bits are not the trainer's.
        """
        self._verified = None
        found = map_image(self._arena, version)
        if found.digest != digest:
            raise DigestMismatch(
                f"version {version} in {self._arena} is not what the trainer published",
                got=f"digest {found.digest:#018x}",
                expected=f"{digest:#018x}",
                remedy="transfer the version again; if it happens again, suspect this node's memory",
            )
        self._verified = found
        return found

    def start_weight_update(self) -> None:
        """Nothing: see the module's docstring."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As in the base class, which would ask for an accelerator's stream where there is none."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ExpectedVersion) -> None:
        """Load the version. Raises WeightsError or DigestMismatch with the model untouched.

        Raises LayoutError when parameters of the model are absent from the image: then the model is NOT whole any more.
        """
        verified = self._verified
        if verified is None or (verified.version, verified.digest) != (update_info.version, update_info.digest):
            verified = self.verify(update_info.version, update_info.digest)
        self._verified = None
        self._load(verified)

    def _load(self, verified: VerifiedImage) -> None:
        wanted = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)
        loaded: set[str] = self.model.load_weights(full_tensors(verified.layout, verified.image))
        finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_heads(self.model)
        if missing := wanted - loaded:
            raise LayoutError(
                "the image does not hold all of the model", got=f"without {sorted(missing)[:5]}", expected=f"{len(wanted)} parameters"
            )

    def finish_weight_update(self) -> None:
        """Nothing: the load is complete when `update_weights` returns."""

    def shutdown(self) -> None:
        self._verified = None


class RoseWorkerExtension:
    """Mixed into vLLM's worker class (`worker_extension_cls`): answers that the backend's own calls cannot give."""

    weight_transfer_engine: RoseWeightTransferEngine

    def rose_verify(self, version: int, digest: int) -> dict[str, Any]:
        """{"digest": recomputed, or None, "fault": why the version cannot be loaded, or None}. Never raises for a bad image."""
        try:
            return {"digest": self.weight_transfer_engine.verify(version, digest).digest, "fault": None}
        except (WeightsError, OSError, ValueError, KeyError) as error:  # the last two: a record or an image cut short
            return {"digest": None, "fault": str(error)}


def map_image(arena: Path | None, version: int) -> VerifiedImage:
    """Map a committed version and digest it. Raises WeightsError when there is no such arena or version.

    The arena is opened anew each time: a relay that was restarted may have made it again.
    """
    if arena is None:
        raise WeightsError("no arena given", expected="init_weight_transfer_engine before the first update")
    opened = Arena.open(arena)
    image = opened.map_version(version)
    return VerifiedImage(version, digest_image(opened.layout, image), opened.layout, image)


def repack_tied_heads(model: torch.nn.Module) -> None:
    """Process output heads that share the embedding's parameter again.

    Such a head has nothing of its own to load, so the reload puts it back as it was: on CPU it would go on with its packed
    copy of the OLD embedding. On a GPU there is no packed copy and this does nothing.
    """
    heads = [m for m in model.modules() if isinstance(m, ParallelLMHead)]
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, VocabParallelEmbedding) and m not in heads}
    for head in heads:
        if id(head.weight) in embeddings:
            head.quant_method.process_weights_after_loading(head)


def full_tensors(layout: ImageLayout, image: NDArray[np.uint8]) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, full tensor) in image order. The tensors alias the read-only mapping: never write to them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        flat = torch.from_numpy(image)
    for spec in layout.parameters:
        part = flat[spec.offset_bytes : spec.offset_bytes + spec.nbytes]
        yield spec.name, part.view(_TORCH_DTYPES[spec.dtype]).reshape(spec.shape)
