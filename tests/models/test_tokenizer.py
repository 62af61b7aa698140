from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_hpc.models.tokenizer import VOCABULARY_MULTIPLE, make_tokenizer, vocabulary
from rose_hpc.rollout.envs.frozen_lake import WORDS, observation

TOKENIZER = make_tokenizer(WORDS)


@given(st.lists(st.sampled_from(vocabulary(WORDS))))
@settings(max_examples=100, deadline=None)
def test_text_survives_encoding_and_decoding(words: list[str]) -> None:
    ids = TOKENIZER.encode(" ".join(words))
    assert len(ids) == len(words)
    assert TOKENIZER.decode(ids) == " ".join(words)


def test_nothing_is_added_at_either_end() -> None:
    assert TOKENIZER.convert_ids_to_tokens(TOKENIZER.encode(observation(0, 1))) == ["<obs>", "row0", "col1", "<act>"]


def test_special_tokens_have_their_roles() -> None:
    assert (TOKENIZER.pad_token, TOKENIZER.bos_token, TOKENIZER.eos_token) == ("<pad>", "<bos>", "<eos>")
    assert TOKENIZER.decode(TOKENIZER.encode("R <eos>"), skip_special_tokens=True) == "R"


def test_an_unused_token_after_an_action_does_not_decode_to_that_action() -> None:
    action = TOKENIZER.encode("R")
    for unused in range(len(vocabulary(WORDS)) - 7, len(vocabulary(WORDS))):
        assert TOKENIZER.decode([*action, unused], skip_special_tokens=True) != "R"


def test_a_word_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(Exception, match="UNK"):
        TOKENIZER.encode("row0 penguin")


@given(st.integers(0, 200))
def test_vocabularies_are_whole_multiples_with_distinct_words(count: int) -> None:
    words = [f"w{i}" for i in range(count)]
    ids = vocabulary(words)
    assert len(ids) % VOCABULARY_MULTIPLE == 0
    assert len(set(ids)) == len(ids) < count + 3 + VOCABULARY_MULTIPLE
    assert ids[3 : 3 + count] == words
