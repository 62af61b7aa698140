"""Planner of destination layouts: the plans of all workers of an engine, traced in one process without any of its weights.

    plans_of(...)  ──spawns──▶  python -m rose_hpc.weights.destination_plan FOLDER  ──writes──▶  FOLDER/rank0.json …

The child builds vLLM's own model on the meta device, once per tensor- and pipeline-parallel rank, in a FAKED world: torch's "fake"
process group and a few of vLLM's communication classes replaced. It is a process of its own so that nothing of this
ever touches a live engine. Engines do not need it: each of their workers traces itself (vllm_backend.py). It is for who
plans transfers without being an engine.

Plans are files of canonical JSON (destination.to_bytes), validated when they are read; no pickle.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rose_hpc.errors import LayoutError, TransferTimeout
from rose_hpc.weights import layout as layouts
from rose_hpc.weights.destination import DestinationPlan, from_bytes, to_bytes
from rose_hpc.weights.layout import ImageLayout


@dataclass(frozen=True)
class PlanRequest:
    """An engine to plan for. model_dir: folder with config.json, whose weights are not read; dtype: of the engine."""

    model_dir: str
    dtype: str
    tensor_parallel: int = 1
    pipeline_parallel: int = 1


def plans_of(request: PlanRequest, layout: ImageLayout, deadline_s: float = 120.0) -> list[DestinationPlan]:
    """The plan of every rank, in vLLM's order: tensor-parallel ranks of the first pipeline stage first.

    Raises LayoutError when there is no model or the planner fails, TransferTimeout when it takes longer than deadline_s.
    """
    if not (Path(request.model_dir) / "config.json").is_file():
        raise LayoutError("no model here", got=request.model_dir, expected="a folder with config.json")
    with tempfile.TemporaryDirectory(prefix="rose-plan-") as folder:
        (Path(folder) / "request.json").write_text(json.dumps(asdict(request)))
        (Path(folder) / "layout.json").write_text(layouts.to_json(layout))
        command = [sys.executable, "-m", "rose_hpc.weights.destination_plan", folder]
        try:
            done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=deadline_s)
        except subprocess.TimeoutExpired as error:
            raise TransferTimeout(f"planning for {request.model_dir} took more than {deadline_s:g} s") from error
        if done.returncode != 0:
            raise LayoutError(f"no destination plan for {request.model_dir}", got=done.stderr[-2000:])
        return [from_bytes(_plan_file(folder, rank).read_bytes()) for rank in range(_world_size(request))]


def environment() -> dict[str, str]:
    """Of the child: quiet, offline, without plug-ins or bound cores."""
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": "", "OMP_NUM_THREADS": "1"}
    return os.environ | quiet | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def _plan_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank{rank}.json"


def _world_size(request: PlanRequest) -> int:
    return request.tensor_parallel * request.pipeline_parallel


# ── in the child ──


def rank_models(request: PlanRequest, device: str = "meta") -> Iterator[Any]:
    """The model of every rank, one after the other, none loaded. Replaces parts of torch and vLLM in this process for good."""
    from vllm.config import set_current_vllm_config

    _fake_communication(_world_size(request))
    config = _engine_config(request)
    for rank in range(_world_size(request)):
        with set_current_vllm_config(config), _fake_world(request, rank):
            yield build_model(config, device)
        config.compilation_config.static_forward_context.clear()


def build_model(config: Any, device: str = "meta") -> Any:
    """The model that vLLM would build for this config and this rank, not loaded. Wants an initialised (or faked) world.

    config: a VllmConfig that no other model is registered in.
    """
    import torch
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_default_torch_dtype(config.model_config.dtype), torch.device(device):
        return initialize_model(config)


def _engine_config(request: PlanRequest) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=request.model_dir,
        dtype=request.dtype,  # type: ignore[arg-type]
        tensor_parallel_size=request.tensor_parallel,
        pipeline_parallel_size=request.pipeline_parallel,
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
    ).create_engine_config()


def _fake_communication(world_size: int) -> None:
    """No rank but ours exists: what would talk to the others is replaced by nothing."""
    import torch.distributed as dist
    import vllm.distributed.parallel_state as parallel_state
    from vllm.distributed.device_communicators import cpu_communicator, shm_broadcast

    new_group = dist.new_group

    def fake_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        return new_group(ranks, backend="fake")

    def plain_init(self: Any, *args: Any, **kwargs: Any) -> None:
        super(cpu_communicator.CpuCommunicator, self).__init__(*args, **kwargs)

    replaced = [
        (dist, "new_group", fake_group),
        (cpu_communicator.CpuCommunicator, "__init__", plain_init),
        (shm_broadcast.MessageQueue, "create_from_process_group", staticmethod(lambda *args, **kwargs: None)),
        (parallel_state, "in_the_same_node_as", lambda *args, **kwargs: [True] * world_size),
    ]
    for owner, name, stand_in in replaced:
        setattr(owner, name, stand_in)


@contextmanager
def _fake_world(request: PlanRequest, rank: int) -> Iterator[None]:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.distributed import parallel_state

    size = _world_size(request)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        parallel_state.init_distributed_environment(size, rank, "fake://", 0, backend="fake")
        parallel_state.initialize_model_parallel(request.tensor_parallel, request.pipeline_parallel)
        yield
    finally:
        parallel_state.destroy_model_parallel()  # type: ignore[no-untyped-call]
        parallel_state.destroy_distributed_environment()  # type: ignore[no-untyped-call]


def main(folder: str) -> int:
    """Entry point of the child; the exit status."""
    from rose_hpc.weights.tracing import trace

    request = PlanRequest(**json.loads((Path(folder) / "request.json").read_text()))
    layout = layouts.from_json((Path(folder) / "layout.json").read_text())
    for rank, model in enumerate(rank_models(request)):
        _plan_file(folder, rank).write_bytes(to_bytes(trace(model, layout)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
