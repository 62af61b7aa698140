from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from rose_hpc.config import TinyLlamaConfig
from rose_hpc.errors import ConfigError
from rose_hpc.models.folder import FolderInUse
from rose_hpc.models.llama import SPECIALS, VOCABULARY, byte_tokenizer, make_tiny_llama

SMALL = TinyLlamaConfig(hidden_size=64, layers=2, heads=2, kv_heads=1, head_dim=32)
TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    make_tiny_llama(folder, SMALL, seed=0)
    return folder


def test_transformers_loads_a_llama_with_untied_embeddings_in_bfloat16(llama_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_folder, local_files_only=True)
    assert (model.config.model_type, model.config.architectures, model.dtype) == ("llama", ["LlamaForCausalLM"], torch.bfloat16)
    assert not model.config.tie_word_embeddings
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert model.config.vocab_size == VOCABULARY == len(AutoTokenizer.from_pretrained(llama_folder, local_files_only=True))
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


def test_the_tokenizer_comes_back_from_the_folder_with_its_specials_and_template(llama_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llama_folder, local_files_only=True)
    assert tokenizer.encode("Grüße") == list("Grüße".encode())
    assert tokenizer.convert_tokens_to_ids(list(SPECIALS)) == list(range(256, 256 + len(SPECIALS)))
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == "<|bos|><|user|>hi<|eos|><|assistant|>"


@settings(deadline=None)
@given(st.text().filter(lambda text: "<|" not in text))  # specials written out are specials
def test_a_text_is_its_bytes_and_comes_back_the_same(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_every_id_that_the_model_can_sample_has_a_text() -> None:
    texts = [TOKENIZER.decode([token]) for token in range(VOCABULARY)]
    assert all(texts)
    assert texts[:128] == [chr(token) for token in range(128)]


def test_the_same_seed_gives_the_same_weights_and_leaves_the_global_random_state_alone(tmp_path: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        make_tiny_llama(tmp_path / name, SMALL, seed)
    assert torch.equal(torch.rand(3), expected)
    digests = [sha256((tmp_path / name / "model.safetensors").read_bytes()).hexdigest() for name in "abc"]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("sizes", [{"heads": 4, "kv_heads": 3}, {"head_dim": 33}])
def test_sizes_that_make_no_attention_are_refused(tmp_path: Path, sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"serving\.tiny"):
        make_tiny_llama(tmp_path / "a", SMALL.model_copy(update=sizes), 0)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(FolderInUse):
        make_tiny_llama(tmp_path, SMALL, 0)
    assert [f.name for f in tmp_path.iterdir()] == ["mine"]
