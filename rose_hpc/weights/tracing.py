"""Recorder of vLLM's own weight loaders: which element of which Hugging Face tensor they copy where, without any data.

    model on meta ┐
    HF tensors    ┘──model.load_weights under the recorder──▶ DestinationPlan

Every tensor that takes part is on torch's meta device: nothing is decoded, allocated or written, and a model of any size takes
tens of milliseconds. What the loaders do is caught below autograd, where a fused, cut or transposed copy is one strided `copy_` from
a view of a source into a view of a parameter.

What a copy cannot express is FLAGGED with the name being loaded, never guessed: a loader that computes a new tensor out of a source
(clone, exp, a cast), reads a value of it, or writes a parameter in any other way. A flagged plan must not be used in
place (destination.faults).

It does not build models (destination_plan.py) and knows no vLLM: any module with vLLM's `load_weights` will do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rose_hpc.weights.destination import ConstantBox, CopyBox, DestinationPlan, RuntimeParameter
from rose_hpc.weights.layout import ImageLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_FILLS = {torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default}


def trace(model: torch.nn.Module, layout: ImageLayout) -> DestinationPlan:
    """The plan of one worker. model: on the meta device, as vLLM builds it, before any processing of loaded weights.

    Only this thread's tensor operations are affected meanwhile. What load_weights raises becomes a flag.
    """
    recorder = _Recorder(model)
    flags = [f"{name} is not on the meta device" for name, p in model.named_parameters() if not p.is_meta]
    if not flags:
        try:
            with torch.no_grad(), recorder:
                model.load_weights(recorder.sources(layout))  # type: ignore[operator]
        except Exception as error:  # the edge to loaders of any model: whatever they cannot do on meta
            flags.append(f"loading {recorder.loading}: {type(error).__name__}: {error}")
    flags += recorder.flags
    if not recorder.unchanged(model):
        flags.append("a parameter was replaced while loading")
    return DestinationPlan(_parameters(model), tuple(recorder.copies), tuple(recorder.constants), tuple(dict.fromkeys(flags)))


def runtime_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Each parameter once, a shared one under the first of its names; those without elements left out."""
    for name, parameter in model.named_parameters():
        if parameter.numel():
            yield name, parameter


def dtype_name(dtype: torch.dtype) -> str:
    """As in layout.ITEM_BYTES, for dtypes that are there."""
    return str(dtype).removeprefix("torch.")


def _parameters(model: torch.nn.Module) -> tuple[RuntimeParameter, ...]:
    return tuple(RuntimeParameter(name, tuple(p.shape), dtype_name(p.dtype)) for name, p in runtime_parameters(model))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records writes into the model's parameters and does not execute them. Tensors are known by their storage."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[CopyBox] = []
        self.constants: list[ConstantBox] = []
        self.flags: list[str] = []
        self.loading = "the first tensor"
        self._targets: dict[int, tuple[str, torch.Tensor]] = {}
        self._source_of: dict[int, str] = {}
        self._kept: list[torch.Tensor] = []  # a freed storage's address would be given to the next one
        for name, parameter in runtime_parameters(model):
            if _storage(parameter) in self._targets or not parameter.is_contiguous():
                self.flags.append(f"{name} shares its memory with another parameter, or is not contiguous")
            self._targets.setdefault(_storage(parameter), (name, parameter))

    def sources(self, layout: ImageLayout) -> Iterator[tuple[str, torch.Tensor]]:
        """The image's tensors on meta, as a checkpoint would give them."""
        for spec in layout.parameters:
            tensor = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta")
            self._kept.append(tensor)
            self._source_of[_storage(tensor)] = self.loading = spec.name
            yield spec.name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        written = list(_tensors(_written(func, args, kwargs)))
        if len(written) == 1 and written[0] is args[0] and _storage(args[0]) in self._targets:
            self._write(func, args[0], args[1] if len(args) > 1 else None)
            return args[0]
        reads_source = self._reads_source(args) or self._reads_source(kwargs.values())
        if any(_storage(t) in self._targets or _storage(t) in self._source_of for t in written) or (written and reads_source):
            self._flag(f"{func} writes into a parameter, a buffer or a loaded tensor")
        result = func(*args, **kwargs)
        if reads_source:
            self._check_result(func, result)
        return result

    def unchanged(self, model: torch.nn.Module) -> bool:
        """The parameters are the same tensors as before: none was replaced behind the dispatcher's back."""
        return {_storage(p): n for n, p in runtime_parameters(model)} == {key: name for key, (name, _) in self._targets.items()}

    def _write(self, func: Any, target: torch.Tensor, value: Any) -> None:
        if target.numel() == 0:
            return
        name, parameter = self._targets[_storage(target)]
        start, strides = int(target.storage_offset() - parameter.storage_offset()), tuple(target.stride())
        source = self._source_of.get(_storage(value)) if isinstance(value, torch.Tensor) else None
        if func is torch.ops.aten.copy_.default and source is not None:
            value = value.expand(target.shape)
            self.copies.append(
                CopyBox(name, source, tuple(target.shape), start, strides, int(value.storage_offset()), tuple(value.stride()))
            )
        elif func in _FILLS:
            filled = 0.0 if value is None else float(value)
            self.constants.append(ConstantBox(name, filled, tuple(target.shape), start, strides))
        else:
            self._flag(f"{func} into {name}")

    def _reads_source(self, values: Iterable[Any]) -> bool:
        return any(_storage(t) in self._source_of for t in _tensors(values))

    def _check_result(self, func: Any, result: Any) -> None:
        """A view of a source is one still; anything else that comes out of one is no copy."""
        results = list(_tensors(result if isinstance(result, (list, tuple)) else [result]))
        if not results or any(_storage(t) not in self._source_of for t in results):
            self._flag(f"{func} of a loaded tensor")

    def _flag(self, what: str) -> None:
        self.flags.append(f"loading {self.loading}: {what}")


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The arguments that the operator's schema says it writes."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[position] if position < len(args) else kwargs.get(argument.name)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
