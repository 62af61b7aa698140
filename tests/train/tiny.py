"""A tiny random Qwen3 with sizes that do not divide evenly, training rows for it, and one rank's learner."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from rose_hpc.config import TrainConfig
from rose_hpc.messages import Row
from rose_hpc.train.learner import Learner
from rose_hpc.train.policy import mesh_of, shard_policy

CPU = torch.device("cpu")
VOCABULARY = 151


def tiny_model(seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=130,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


def tiny_rows(lengths: list[int], seed: int = 0) -> list[Row]:
    """Rows of these lengths: random tokens, every second one sampled, log-probabilities near those of a random model."""
    rng = np.random.default_rng(seed)
    return [_row(rng, length) for length in lengths]


def _row(rng: np.random.Generator, length: int) -> Row:
    mask = (np.arange(length) % 2).astype(np.uint8)
    logprobs = ((-5.0 + 0.3 * rng.standard_normal(length)) * mask).astype(np.float32)
    return Row(rng.integers(0, VOCABULARY, length).astype(np.int32), mask, logprobs, float(np.float32(rng.standard_normal())))


def tiny_learner(rank: int, world_size: int, **settings: object) -> Learner:
    """A learner over the same initial weights, whatever the number of ranks. Joins the process group that is there."""
    config = TrainConfig.model_validate({"minibatches": 2, "warmup_steps": 3, "learning_rate": 1e-3, **settings})
    policy = shard_policy(tiny_model(), mesh_of(world_size, CPU), config.compute_dtype)
    return Learner(policy, config, rank=rank, world_size=world_size, device=CPU, temperature=0.8, seed=5)


def local_parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of this rank's shards."""
    return {name: p.to_local().detach().clone() for name, p in module.named_parameters()}


def local_gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of this rank's gradient shards."""
    return {name: p.grad.to_local().clone() for name, p in module.named_parameters()}


def joined(shards: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Shards of all ranks, each a range of rows, laid end to end."""
    return {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}
