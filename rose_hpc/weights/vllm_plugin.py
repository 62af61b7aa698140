"""vLLM general plug-in: every vLLM process of this Python environment calls `register` once, ours and anybody else's.

It makes the weight-transfer backend `rose` known by name; the backend's module is imported only by an engine that asks for
it. In the processes that one of our engines starts (EngineCore, workers, model inspection) it also ties their life to
the engine's: SIGKILL of the engine must not leave a worker that holds a GPU. Where our engine is told to keep raw weights on a CPU, its
linear layers compute with their parameters as loaded, as on a GPU, instead of with a packed copy in oneDNN's format: then an update
writes only what changed, where it lies, and what runs can be hashed.

It does not change vLLM in any way for an engine that uses neither.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

from rose_hpc import lifeline

BACKEND = "rose"
RAW_WEIGHTS_VARIABLE = "ROSE_RAW_WEIGHTS"  # "1": set by our engine process for itself and its children
ENGINE_PID_VARIABLE = "ROSE_ENGINE_CHILD"  # set by our engine process to its own process id, inherited by its children


def register() -> None:
    """Register the backend unless it is there, bind a child of our engine to its parent, and keep weights raw where it says so."""
    _register_backend()
    engine_pid = os.environ.get(ENGINE_PID_VARIABLE)
    if engine_pid is not None and engine_pid != str(os.getpid()):
        _die_with_parent()
    if engine_pid is not None and os.environ.get(RAW_WEIGHTS_VARIABLE) == "1":
        _keep_raw_weights()


def _register_backend() -> None:
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return  # a vLLM from before weight transfer: nothing to offer it, and no reason to stop its user
    try:
        WeightTransferEngineFactory.register_engine(BACKEND, "rose_hpc.weights.vllm_backend", "RoseWeightTransferEngine")
    except ValueError:
        return  # already registered in this process


def _keep_raw_weights() -> None:
    """Before a model is loaded: vLLM looks the function up in its module each time it processes a layer. Only its CPU platform does."""
    from torch.nn.functional import linear
    from vllm.model_executor.layers import utils

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = linear

    utils.dispatch_cpu_unquantized_gemm = plain


def _die_with_parent() -> None:
    """SIGKILL on the parent's death; at once if it died while this process was still importing."""
    lifeline.die_with_parent(signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # adopted by init or by a subreaper
        os.kill(os.getpid(), signal.SIGKILL)
