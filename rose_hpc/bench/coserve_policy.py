"""The policy of the rollout engines in `rose-hpc bench coserve`: a small Qwen3 with random weights, in an arena as a relay leaves it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rose_hpc.messages import UpdateRequest
from rose_hpc.weights.arena import Arena
from rose_hpc.weights.arena_copy import copy_keyframe
from rose_hpc.weights.publisher import WeightPublisher

VOCABULARY = 1024
CONTEXT_TOKENS = 2048
BUCKET_BYTES = 1 << 20
VERSION = 1


@dataclass(frozen=True)
class Policy:
    """Where engines find it, and the update that applies it."""

    model_dir: Path
    arena: Path
    update: UpdateRequest


def make_policy(folder: Path, seed: int) -> Policy:
    """Write the configuration and the arena with one verified version. folder: new."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: torch.nn.Module = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]
    config.save_pretrained(folder / "model")
    shard = WeightPublisher(model.to(torch.bfloat16), folder / "trainer", bucket_bytes=BUCKET_BYTES).publish(VERSION)
    source = Arena.open(folder / "trainer")
    sink = Arena.create(folder / "arena", source.layout)
    sink.set_plan(source.plan, source.bucket_bytes)
    copy_keyframe(source, sink, VERSION, shard.digest)
    return Policy(folder / "model", folder / "arena", UpdateRequest(VERSION, shard.digest))
