"""The configurations of the published experiments: they load, say what was published, and pass every check before a start.

The models are stand-ins: a folder with the real config.json figures and the real tensors' shapes, but no bytes of weights.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from rose_hpc.config import RunConfig, load
from rose_hpc.launch import preflight

CONFIGS = Path(__file__).parents[2] / "configs"
QWEN3_8B = {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288}
QWEN3_32B = {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64, "intermediate_size": 25600}
VOCABULARY, KV_HEADS, HEAD_DIM = 151936, 8, 128


def qwen3_shapes(model: dict[str, int]) -> dict[str, list[int]]:
    """Shapes of all tensors, as Qwen3 has them; embeddings are not tied."""
    hidden, ffn, heads = model["hidden_size"], model["intermediate_size"], model["num_attention_heads"] * HEAD_DIM
    shapes = {"model.embed_tokens.weight": [VOCABULARY, hidden], "lm_head.weight": [VOCABULARY, hidden], "model.norm.weight": [hidden]}
    for layer in range(model["num_hidden_layers"]):
        parts = {
            "self_attn.q_proj": [heads, hidden],
            "self_attn.k_proj": [KV_HEADS * HEAD_DIM, hidden],
            "self_attn.v_proj": [KV_HEADS * HEAD_DIM, hidden],
            "self_attn.o_proj": [hidden, heads],
            "self_attn.q_norm": [HEAD_DIM],
            "self_attn.k_norm": [HEAD_DIM],
            "mlp.gate_proj": [ffn, hidden],
            "mlp.up_proj": [ffn, hidden],
            "mlp.down_proj": [hidden, ffn],
            "input_layernorm": [hidden],
            "post_attention_layernorm": [hidden],
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    return shapes


def make_folder(folder: Path, model: dict[str, int]) -> Path:
    """A model's folder as preflight reads it."""
    folder.mkdir()
    figures = {**model, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "max_position_embeddings": 40960}
    (folder / "config.json").write_text(json.dumps(figures))
    (folder / "tokenizer.json").write_text("{}")
    header = json.dumps(
        {name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for name, shape in qwen3_shapes(model).items()}
    ).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return folder


def paper_run(name: str, model: dict[str, int], tmp_path: Path) -> RunConfig:
    folder = make_folder(tmp_path / name.partition(".")[0], model)
    return load(CONFIGS / name, [f"model.path={folder}", f"weights.arena_root={tmp_path}"])


@pytest.fixture
def frozenlake(tmp_path: Path) -> RunConfig:
    return paper_run("qwen3_8b_frozenlake.toml", QWEN3_8B, tmp_path)


@pytest.fixture
def alfworld(tmp_path: Path) -> RunConfig:
    return paper_run("qwen3_32b_alfworld.toml", QWEN3_32B, tmp_path)


def test_the_8b_configuration_says_what_was_published(frozenlake: RunConfig) -> None:
    c = frozenlake
    assert (c.env.name, c.sampling.groups * c.sampling.group_size, c.sampling.group_size) == ("frozen_lake", 256, 16)
    assert (c.train.ranks, c.rollout.dedicated, c.rollout.engine.tensor_parallel) == (8, 8, 1)
    assert c.borrow is not None and c.borrow.leases * c.borrow.engine.tensor_parallel == 16
    assert c.rollout.engine.max_model_len == c.borrow.engine.max_model_len == 32 << 10
    assert c.rollout.engine.max_concurrency == c.borrow.engine.max_concurrency == 16


def test_the_32b_configuration_says_what_was_published(alfworld: RunConfig) -> None:
    c = alfworld
    assert (c.env.name, c.sampling.groups * c.sampling.group_size, c.sampling.group_size) == ("alfworld", 1024, 16)
    assert (c.train.ranks, c.rollout.dedicated * c.rollout.engine.tensor_parallel, c.rollout.engine.tensor_parallel) == (32, 16, 4)
    assert c.borrow is not None and c.borrow.leases * c.borrow.engine.tensor_parallel == 64
    assert c.rollout.engine.max_model_len == c.borrow.engine.max_model_len == 32 << 10
    assert c.rollout.engine.max_concurrency == 16 * c.rollout.engine.tensor_parallel


def test_the_stand_in_has_as_many_parameters_as_the_model(tmp_path: Path) -> None:
    assert preflight.parameter_count(make_folder(tmp_path / "8b", QWEN3_8B)) == 8_190_735_360
    assert preflight.parameter_count(make_folder(tmp_path / "32b", QWEN3_32B)) == 32_762_123_264


@pytest.mark.parametrize(("name", "model"), [("qwen3_8b_frozenlake.toml", QWEN3_8B), ("qwen3_32b_alfworld.toml", QWEN3_32B)])
def test_every_check_before_the_start_passes(name: str, model: dict[str, int], tmp_path: Path) -> None:
    preflight.check(paper_run(name, model, tmp_path))


@pytest.mark.parametrize(
    ("name", "model", "parameters", "per_token"),
    [("qwen3_8b_frozenlake.toml", QWEN3_8B, 8.19e9, 147_456), ("qwen3_32b_alfworld.toml", QWEN3_32B, 32.76e9, 65_536)],
)
def test_weights_and_kv_cache_fit_into_80_gb(name: str, model: dict[str, int], parameters: float, per_token: int, tmp_path: Path) -> None:
    run = paper_run(name, model, tmp_path)
    assert run.borrow is not None and run.model.path is not None
    for engine in (run.rollout.engine, run.borrow.engine):
        needed = preflight.least_kv_bytes(engine, preflight.read_model_config(run.model.path))
        assert needed == (32768 + engine.block_size) * per_token
        assert 2 * parameters / engine.tensor_parallel + engine.kv_cache_bytes < 80e9
        assert engine.kv_cache_bytes > 2 * needed
    assert preflight.arena_bytes(run, run.model.path) == pytest.approx(3 * 2 * parameters, rel=1e-3)


def test_whole_episodes_leave_room_in_the_context(frozenlake: RunConfig, alfworld: RunConfig) -> None:
    for run in (frozenlake, alfworld):
        assert run.env.max_turns * run.sampling.max_new_tokens < 0.8 * run.rollout.engine.max_model_len
