"""What vLLM's layers do to loaded weights: which models may be written in place, how the others are reloaded and checked.

A layer is RAW when what it computes with is its parameters as they were loaded. It is PACKED when some other form of them was made
after loading: on a CPU, linear layers in oneDNN's format (vllm_plugin.py prevents that where the configuration says so) and experts
permuted for a grouped kernel; quantised layers anywhere. Writing a packed layer's parameters in place succeeds and is
silently wrong. Only layers that are KNOWN to be raw count as raw: a new kind of layer is packed until somebody has looked.

Packed weights cannot be hashed, but most can be read back: the product of one-hot rows and a linear layer is the layer's
columns, exactly, because everything else adds up zeros; and a permutation can be made again and compared. `probe` does both.

It knows the insides of vLLM 0.32's layers; with another release, run the engine tests first.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rose_hpc.errors import LayoutError
from rose_hpc.weights.destination import DestinationPlan
from rose_hpc.weights.destination_plan import build_model
from rose_hpc.weights.layout import ImageLayout
from rose_hpc.weights.runtime_memory import Lanes
from rose_hpc.weights.runtime_weights import image_elements
from rose_hpc.weights.tracing import TORCH_DTYPES, runtime_parameters

PROBE_OPERATIONS = 200_000_000  # multiply-adds per layer: some milliseconds on one core
LEAST_COLUMNS = 8
_RAW_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


def meta_copy(config: Any) -> torch.nn.Module:
    """A second model as vLLM builds it, on the meta device. config: the worker's VllmConfig, which stays as it is."""
    mine = copy.copy(config)
    mine.compilation_config = copy.copy(config.compilation_config)
    mine.compilation_config.static_forward_context = {}  # layers register themselves here by name, each name once
    mine.compilation_config.static_all_moe_layers = []
    model: torch.nn.Module = build_model(mine)
    return model


def packed_layers(model: torch.nn.Module) -> list[str]:
    """Names of the layers that are not known to be raw, in the model's order."""
    return [name for name, layer in model.named_modules() if not _is_raw(layer)]


def _is_raw(layer: torch.nn.Module) -> bool:
    if is_deferred_attention_layer(layer):
        return type(layer) is Attention
    method = getattr(layer, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase):
        return True
    return type(method) in _RAW_METHODS and not _runs_packed(layer)


def _runs_packed(layer: torch.nn.Module) -> bool:
    """On a CPU a processed layer computes with its `cpu_linear`."""
    return getattr(layer, "cpu_linear", torch.nn.functional.linear) is not torch.nn.functional.linear


def drop_packed(model: torch.nn.Module) -> None:
    """Free what linear layers have packed for themselves. They raise from here on, until the model is reloaded."""
    layers: list[Any] = list(model.modules())
    for layer in layers:
        if type(getattr(layer, "quant_method", None)) in _RAW_METHODS and _runs_packed(layer):
            layer.cpu_linear = _dropped


def _dropped(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    raise RuntimeError("this layer's weights were given back")


# ── reload ──


def reload(model: torch.nn.Module, model_config: Any, layout: ImageLayout, image: Lanes) -> None:
    """Load the whole image through vLLM's own loaders, which cut, fuse and pack. Raises LayoutError: it lacks parameters of the model.

    After any error the model is NOT whole any more.
    """
    wanted = {name for name, _ in model.named_parameters()}
    initialize_layerwise_reload(model)
    loaded: set[str] = model.load_weights(full_tensors(layout, image))  # type: ignore[operator]
    finalize_layerwise_reload(model, model_config)  # type: ignore[no-untyped-call]
    _repack_tied_heads(model)
    _repack_experts(model)
    if missing := wanted - loaded:
        raise LayoutError(
            "the image does not hold all of the model", got=f"without {sorted(missing)[:5]}", expected=f"{len(wanted)} parameters"
        )


def full_tensors(layout: ImageLayout, image: Lanes) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, full tensor) in image order. The tensors alias the read-only mapping: never write to them."""
    elements = image_elements(image, layout)
    for spec in layout.parameters:
        start = spec.offset_bytes // layout.item_bytes
        yield spec.name, elements[start : start + spec.numel].view(TORCH_DTYPES[spec.dtype]).reshape(spec.shape)


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """Process output heads that share the embedding's parameter again.

    Such a head has nothing of its own to load, so the reload puts it back as it was: on CPU it would go on with its packed
    copy of the OLD embedding. On a GPU there is no packed copy and this does nothing.
    """
    heads = [m for m in model.modules() if isinstance(m, ParallelLMHead)]
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, VocabParallelEmbedding) and m not in heads}
    for head in heads:
        if id(head.weight) in embeddings:
            head.quant_method.process_weights_after_loading(head)


def _repack_experts(model: torch.nn.Module) -> None:
    """Pack reloaded experts again: vLLM packs them the first time only, and would run on with plain ones in a packed kernel."""
    for _, layer in _cpu_experts(model):
        layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def _cpu_experts(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, layer in model.named_modules():
        if isinstance(getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod) and layer.w13_weight.device.type == "cpu":
            yield name, layer


# ── probe ──


@dataclass(frozen=True)
class Probe:
    """What was found in the layers. checked, unknown: parameters by name; faults: which of them are not the image's."""

    checked: int
    unknown: tuple[str, ...]
    faults: tuple[str, ...]


def probe(model: torch.nn.Module, plan: DestinationPlan, layout: ImageLayout, image: Lanes, seed: int) -> Iterator[Probe | None]:
    """Compare what the layers compute with to the image, a layer a step: None after each, the result last.

    Only between steps of the engine: oneDNN's packed products are not to be run by two threads at once (wrong results, measured).
    seed: which columns of large layers are read back. A parameter that the plan does not cover, or whose layer cannot be read back, is
    unknown.
    """
    check = _Check(model, plan, layout, image, np.random.default_rng(seed))
    for name, layer in model.named_modules():
        if not _is_raw(layer):
            check.layer(name, layer)
            yield None
    for parameter in plan.parameters:
        check.raw(parameter.name)
        yield None
    unknown = tuple(p.name for p in plan.parameters if p.name not in check.found)
    yield Probe(len(check.found), unknown, tuple(name for name, same in check.found.items() if not same))


class _Check:
    """found: parameter → whether it is the image's, for those that were looked at."""

    def __init__(
        self, model: torch.nn.Module, plan: DestinationPlan, layout: ImageLayout, image: Lanes, random: np.random.Generator
    ) -> None:
        self.found: dict[str, bool] = {}
        self._live = dict(runtime_parameters(model))
        self._names = {id(p): name for name, p in self._live.items()}
        self._plan, self._layout, self._random = plan, layout, random
        self._elements = image_elements(image, layout)
        self._packed: set[str] = set()

    def layer(self, name: str, layer: Any) -> None:
        """A packed one."""
        if isinstance(getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod):
            self._experts(name, layer)
        elif type(getattr(layer, "quant_method", None)) in _RAW_METHODS:
            self._linear(self._names.get(id(layer.weight), f"{name}.weight"), layer)
        else:
            self._packed |= {f"{name}.{parameter}" for parameter, _ in layer.named_parameters(recurse=False)}

    def raw(self, name: str) -> None:
        """Bit by bit, where it lies in memory as it was loaded."""
        live, expected = self._live.get(name), None if name in self._packed else self._expected(name)
        if live is None or expected is None:
            return
        same = live.shape == expected.shape and torch.equal(live.detach().cpu().view(torch.uint8), expected.view(torch.uint8))
        self.found[name] = same and self.found.get(name, True)

    def _expected(self, name: str) -> torch.Tensor | None:
        """The parameter as the loaders would leave it; None where the plan does not say all of it."""
        parameter = self._plan.by_name.get(name)
        copies = [c for c in self._plan.copies if c.runtime == name]
        if parameter is None or self._plan.flags or any(c.source not in self._layout.by_name for c in copies):
            return None
        tensor = torch.zeros(parameter.shape, dtype=getattr(torch, parameter.dtype))
        for box in self._plan.constants:
            if box.runtime == name:
                tensor.as_strided(box.shape, box.to_strides, box.to_start).fill_(box.value)
        for c in copies:
            spec = self._layout.by_name[c.source]
            start = spec.offset_bytes // self._layout.item_bytes + c.from_start
            source = self._elements.view(TORCH_DTYPES[spec.dtype]).as_strided(c.shape, c.from_strides, start)
            tensor.as_strided(c.shape, c.to_strides, c.to_start).copy_(source)
        return tensor

    def _linear(self, name: str, layer: Any) -> None:
        """Columns of the weight, read back through the packed product. −0.0 comes back as 0.0, a NaN as some NaN."""
        expected = self._expected(name)
        if expected is None or expected.ndim != 2:
            self._packed.add(name)
            return
        rows, columns = expected.shape
        count = min(columns, max(LEAST_COLUMNS, PROBE_OPERATIONS // (rows * columns)))
        chosen = torch.from_numpy(np.sort(self._random.choice(columns, count, replace=False)))
        one_hot = torch.zeros(count, columns, dtype=expected.dtype)
        one_hot[torch.arange(count), chosen] = 1
        product = layer.cpu_linear(one_hot, layer.weight, None)
        self.found[name] = torch.equal(torch.nan_to_num(product), torch.nan_to_num(expected[:, chosen].t()))

    def _experts(self, name: str, layer: Any) -> None:
        """Pack what the image says once more, and compare with what runs."""
        names = [f"{name}.w13_weight", f"{name}.w2_weight"]
        expected = [tensor for tensor in map(self._expected, names) if tensor is not None]
        self._packed |= set(names)
        if layer.w13_weight.device.type != "cpu" or len(expected) < len(names):
            return
        again = torch.nn.Module()
        for short, tensor in zip(("w13_weight", "w2_weight"), expected, strict=True):
            again.register_parameter(short, torch.nn.Parameter(tensor, requires_grad=False))
        layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(again)
        for full, short in zip(names, ("w13_weight", "w2_weight"), strict=True):
            live, packed = getattr(layer, short).detach(), getattr(again, short).detach()
            self.found[full] = live.shape == packed.shape and torch.equal(live.view(torch.uint8), packed.view(torch.uint8))
