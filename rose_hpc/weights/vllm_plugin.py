"""vLLM general plug-in: every vLLM process of this Python environment calls `register` once, ours and anybody else's.

It makes the weight-transfer backend `rose` known by name; the backend's module is imported only by an engine that asks for
it. In the processes that one of our engines starts (EngineCore, workers, model inspection) it also ties their life to
the engine's: SIGKILL of the engine must not leave a worker that holds a GPU.

It does not change vLLM in any way for an engine that uses neither.
"""

from __future__ import annotations

import multiprocessing
import os
import signal

from rose_hpc import lifeline

BACKEND = "rose"
ENGINE_PID_VARIABLE = "ROSE_ENGINE_CHILD"  # set by our engine process to its own process id, inherited by its children


def register() -> None:
    """Register the backend unless it is there, and bind a child of our engine to its parent."""
    _register_backend()
    engine_pid = os.environ.get(ENGINE_PID_VARIABLE)
    if engine_pid is not None and engine_pid != str(os.getpid()):
        _die_with_parent()


def _register_backend() -> None:
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return  # a vLLM from before weight transfer: nothing to offer it, and no reason to stop its user
    try:
        WeightTransferEngineFactory.register_engine(BACKEND, "rose_hpc.weights.vllm_backend", "RoseWeightTransferEngine")
    except ValueError:
        return  # already registered in this process


def _die_with_parent() -> None:
    """SIGKILL on the parent's death; at once if it died while this process was still importing."""
    lifeline.die_with_parent(signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # adopted by init or by a subreaper
        os.kill(os.getpid(), signal.SIGKILL)
