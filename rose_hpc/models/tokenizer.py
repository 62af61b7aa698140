"""A tokenizer of whole words, for environments that speak a few of them.

Text is words joined by one space, one token each; nothing is added at either end, and decoding gives the same text back.
Every id that a model of this vocabulary can sample has a word of its own, the unused ids too: otherwise an action
followed by one of them would decode to that action. A word outside the vocabulary raises: there is no unknown token,
because a policy trained on a silently changed prompt is worse than no policy.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
SPECIALS = (PAD, BOS, EOS)
VOCABULARY_MULTIPLE = 32  # tensor-parallel ranks cut the vocabulary into equal parts


def vocabulary(words: Sequence[str]) -> list[str]:
    """The words by token id: specials, `words`, then unused ones up to the next multiple of VOCABULARY_MULTIPLE."""
    used = [*SPECIALS, *words]
    return used + [f"<unused{i}>" for i in range(len(used), -(-len(used) // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE)]


def make_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Tokenizer over `vocabulary(words)`; words are distinct and hold no white space."""
    ids = {word: i for i, word in enumerate(vocabulary(words))}
    tokenizer = Tokenizer(WordLevel(ids, unk_token=""))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, clean_up_tokenization_spaces=False
    )
