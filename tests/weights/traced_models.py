"""Program: prove traced plans against vLLM's own loaders. Writes one line of JSON per case: name, tp, pp, and what was wrong.

Each rank's model is built twice in a faked world: on meta to be traced, and in memory to be loaded, its parameters full of NaN before. The
map applied to the same random weights must give the same bits.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers

from rose_hpc.weights import layout as layouts
from rose_hpc.weights.destination import DestinationPlan, faults
from rose_hpc.weights.destination_plan import PlanRequest, rank_models
from rose_hpc.weights.layout import ImageLayout, build_layout
from rose_hpc.weights.placement import share
from rose_hpc.weights.tracing import TORCH_DTYPES, runtime_parameters, trace

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": 151,  # over 2 workers: padded
    "tie_word_embeddings": False,
    "dtype": "float32",
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
MODELS = {
    "qwen3": ("Qwen3", SMALL | {"head_dim": 32}),
    "qwen3_tied": ("Qwen3", SMALL | {"head_dim": 32, "tie_word_embeddings": True, "vocab_size": 64}),
    "qwen3_one_kv_head": ("Qwen3", SMALL | {"head_dim": 32, "tie_word_embeddings": True, "vocab_size": 515, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2", SMALL | {"tie_word_embeddings": True}),
    "llama": ("Llama", SMALL),
    "llama_tied": ("Llama", SMALL | {"tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3Moe", SMALL | {"head_dim": 32} | EXPERTS),
}


def write_model(folder: Path, name: str, dtype: str) -> tuple[str, ImageLayout]:
    """config.json of the model; its folder, and the layout that a trainer of it would publish."""
    family, settings = MODELS[name]
    model_class = getattr(transformers, f"{family}ForCausalLM")
    config = getattr(transformers, f"{family}Config")(architectures=[model_class.__name__], **settings)
    config.save_pretrained(folder / name)
    with torch.device("meta"):
        layout = build_layout(((n, p.shape) for n, p in model_class(config).named_parameters()), dtype)
    (folder / f"{name}.layout.json").write_text(layouts.to_json(layout))
    return str(folder / name), layout


def applied(plan: DestinationPlan, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the plan makes of the weights, straight from its definition."""
    out = {p.name: torch.full(p.shape, float("nan"), dtype=getattr(torch, p.dtype)) for p in plan.parameters}
    for c in plan.copies:
        source = weights[c.source].as_strided(c.shape, c.from_strides, c.from_start)
        out[c.runtime].as_strided(c.shape, c.to_strides, c.to_start).copy_(source)
    for k in plan.constants:
        out[k.runtime].as_strided(k.shape, k.to_strides, k.to_start).fill_(k.value)
    return out


def wrong_with(request: PlanRequest, layout: ImageLayout) -> list[str]:
    plans = [trace(model, layout) for model in rank_models(request)]
    wrong = [fault for plan in plans for fault in faults(plan, layout)]
    dtype = TORCH_DTYPES[layout.dtype]
    weights = {p.name: torch.randn(p.shape, generator=torch.Generator().manual_seed(p.offset_bytes)).to(dtype) for p in layout.parameters}
    for rank, model in enumerate(rank_models(request, "cpu")):
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        with torch.no_grad():
            model.load_weights((name, tensor.clone()) for name, tensor in weights.items())
        mapped = applied(plans[rank], weights)
        loaded = dict(runtime_parameters(model))
        wrong += [f"rank {rank} has other parameters" for _ in [0] if loaded.keys() != mapped.keys()]
        wrong += [f"rank {rank}: {n}" for n, p in loaded.items() if not torch.equal(p.data.view(torch.uint8), mapped[n].view(torch.uint8))]
    share(plans, layout)
    return wrong


def main(folder: Path, cases: list[str]) -> None:
    for case in cases:
        name, tensor_parallel, pipeline_parallel, dtype = case.split(":")
        model_dir, layout = write_model(folder, name, dtype)
        request = PlanRequest(model_dir, dtype, int(tensor_parallel), int(pipeline_parallel))
        print(json.dumps([case, wrong_with(request, layout)]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
