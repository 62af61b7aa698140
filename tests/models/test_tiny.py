from __future__ import annotations

import json
import random
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rose_hpc.config import EnvConfig, TinyModelConfig
from rose_hpc.errors import ConfigError
from rose_hpc.models.expert import Turn
from rose_hpc.models.folder import FolderInUse
from rose_hpc.models.tiny import IGNORED, context_tokens, encode_episodes, make_tiny_qwen3
from rose_hpc.models.tokenizer import make_tokenizer
from rose_hpc.rollout.envs.frozen_lake import ACTIONS, WORDS, observation

SMALL = TinyModelConfig(hidden_size=32, layers=1, heads=2, kv_heads=1, warmup_steps=3)
ENV = EnvConfig(max_turns=6)


def weights_digest(folder: Path) -> str:
    return sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the default shape, warmed up far enough to know the format of a turn."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_qwen3(folder, TinyModelConfig(warmup_steps=40), ENV, seed=0)
    return folder


def test_transformers_loads_the_folder(model_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(model_folder, local_files_only=True)
    assert model.config.model_type == "qwen3"
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len(tokenizer) == model.config.vocab_size == 32
    assert tokenizer.decode(tokenizer.encode("<obs> row0 col1 <act> R <eos>")) == "<obs> row0 col1 <act> R <eos>"
    assert tokenizer.eos_token == "<eos>"
    assert tokenizer.pad_token == "<pad>"


def test_the_folder_states_where_a_turn_ends_and_how_to_sample(model_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder, local_files_only=True)
    sampling = GenerationConfig.from_pretrained(model_folder)
    shape = json.loads((model_folder / "config.json").read_text())
    assert sampling.eos_token_id == shape["eos_token_id"] == tokenizer.eos_token_id
    assert sampling.pad_token_id == shape["pad_token_id"] == tokenizer.pad_token_id
    assert (sampling.do_sample, sampling.top_k) == (True, 0)


def test_the_warmed_model_answers_with_an_action_and_eos(model_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(model_folder, local_files_only=True)
    actions = tokenizer.convert_tokens_to_ids(list(ACTIONS))
    with torch.no_grad():
        first = model(torch.tensor([tokenizer.encode(observation(0, 0))])).logits[0, -1].softmax(-1)
        second = model(torch.tensor([tokenizer.encode(observation(0, 0) + " D")])).logits[0, -1].softmax(-1)
    assert first[actions].sum() > 0.9
    assert second[tokenizer.eos_token_id] > 0.9


def test_the_same_seed_gives_the_same_bits_whatever_the_process_did_before(tmp_path: Path) -> None:
    make_tiny_qwen3(tmp_path / "a", SMALL, ENV, seed=5)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        make_tiny_qwen3(tmp_path / "b", SMALL, ENV, seed=5)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    make_tiny_qwen3(tmp_path / "c", SMALL, ENV, seed=6)
    assert weights_digest(tmp_path / "a") == weights_digest(tmp_path / "b") != weights_digest(tmp_path / "c")


def test_the_global_random_state_is_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    make_tiny_qwen3(tmp_path / "a", SMALL, ENV, seed=5)
    assert torch.equal(torch.rand(3), expected)


def test_progress_is_told_every_step_and_the_loss_falls(tmp_path: Path) -> None:
    told: list[tuple[int, int, float]] = []
    make_tiny_qwen3(tmp_path / "a", SMALL.model_copy(update={"warmup_steps": 15}), ENV, 0, lambda *step: told.append(step))
    assert [(done, steps) for done, steps, _ in told] == [(i, 15) for i in range(1, 16)]
    assert told[-1][2] < told[0][2] - 0.5


def test_a_folder_in_use_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(FolderInUse):
        make_tiny_qwen3(tmp_path, SMALL, ENV, 0, lambda *_: pytest.fail("worked all the same"))
    assert [f.name for f in tmp_path.iterdir()] == ["mine"]


def test_an_interrupted_warm_up_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(done: int, steps: int, loss: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_tiny_qwen3(tmp_path / "a", SMALL, ENV, 0, interrupt)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sizes", [{"heads": 4, "kv_heads": 3}, {"head_dim": 33}])
def test_sizes_that_make_no_attention_are_refused(tmp_path: Path, sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"model\.tiny"):
        make_tiny_qwen3(tmp_path / "a", SMALL.model_copy(update=sizes), ENV, 0)
    assert list(tmp_path.iterdir()) == []


def test_rows_hold_the_full_history_and_count_only_the_answers() -> None:
    tokenizer = make_tokenizer(WORDS)
    episodes = [[Turn(observation(0, 0), "D"), Turn(observation(1, 0), "R")], [Turn(observation(0, 0), "U")]]
    ids, labels = encode_episodes(tokenizer, episodes)
    assert tokenizer.decode(ids[0]) == "<obs> row0 col0 <act> D <eos> <obs> row1 col0 <act> R <eos>"
    assert tokenizer.decode(ids[1]) == "<obs> row0 col0 <act> U <eos>" + " <pad>" * 6
    assert [tokenizer.decode(row[row != IGNORED]) for row in labels] == ["D <eos> R <eos>", "U <eos>"]
    assert (labels != IGNORED).nonzero()[:, 1].tolist() == [4, 5, 10, 11, 4, 5]
    assert torch.equal(ids[labels != IGNORED], labels[labels != IGNORED])


@pytest.mark.parametrize(("max_turns", "expected"), [(1, 512), (85, 512), (86, 516), (200, 1200)])
def test_the_context_holds_the_longest_episode(max_turns: int, expected: int) -> None:
    assert context_tokens(EnvConfig(max_turns=max_turns)) == expected
