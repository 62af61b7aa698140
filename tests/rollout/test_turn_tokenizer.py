"""The policy's tokenizer as the controller reads it from the model's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from rose_hpc.rollout.tokenizer import TurnTokenizer


@pytest.mark.parametrize(
    ("figures", "vocabulary"), [(None, 3), ({}, 3), ({"vocab_size": 32}, 32), ({"vocab_size": 9, "text_config": {"vocab_size": 64}}, 64)]
)
def test_the_vocabulary_is_what_the_policy_has_embeddings_of(tmp_path: Path, figures: dict[str, object] | None, vocabulary: int) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<eos>": 0, "a": 1, "b": 2}, unk_token="<eos>"))
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    if figures is not None:
        (tmp_path / "config.json").write_text(json.dumps(figures))
    assert TurnTokenizer(tmp_path).vocabulary == vocabulary
