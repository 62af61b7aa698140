"""A tiny Llama with random weights: the model of the serving side, unlike the policy in every respect.

Its architecture, its untied embeddings, its dtype and its byte-level tokenizer differ from the policy's, so that nothing that is
shared by mistake between the two engines goes unnoticed. What it says means nothing, and it may end a text at any moment: its clients
ask it to ignore <|eos|>.

Invariant: the same arguments give the same bits on the same machine.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rose_hpc.config import TinyLlamaConfig
from rose_hpc.errors import ConfigError
from rose_hpc.models.folder import new_folder

BYTES = 256
PAD, BOS, EOS, USER, ASSISTANT, SYSTEM = "<|pad|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>"
SPECIALS = (PAD, BOS, EOS, USER, ASSISTANT, SYSTEM)
VOCABULARY = 288  # bytes and specials, up to a multiple of 32: tensor-parallel ranks cut it into equal parts
CONTEXT_TOKENS = 8192
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tiny_llama(out_dir: Path, config: TinyLlamaConfig, seed: int) -> None:
    """Write out_dir: config, generation config, *.safetensors (bfloat16), tokenizer with chat template.

    out_dir appears whole or not at all. Raises FolderInUse when out_dir holds something, ConfigError for sizes that make no Llama.
    """
    with new_folder(out_dir) as folder, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = byte_tokenizer()
        model = LlamaForCausalLM(llama_config(config, tokenizer)).to(torch.bfloat16)
        model.generation_config = GenerationConfig(
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def llama_config(config: TinyLlamaConfig, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """Shape of the model. Raises ConfigError where attention cannot be built."""
    if config.heads % config.kv_heads:
        raise ConfigError("serving.tiny.heads must be a multiple of serving.tiny.kv_heads", got=f"{config.heads} and {config.kv_heads}")
    if config.head_dim % 2:
        raise ConfigError("serving.tiny.head_dim must be even: rotary embeddings turn pairs", got=config.head_dim)
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=3 * config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Any text, one token per byte of its UTF-8; the id is the byte. Specials come after, then reserved ids up to VOCABULARY.

    Nothing is added at either end. Specials written out in a text are recognised, as in other tokenizers.
    """
    tokenizer = Tokenizer(BPE({f"<0x{byte:02X}>": byte for byte in range(BYTES)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    reserved = [f"<|reserved{i}|>" for i in range(BYTES + len(SPECIALS), VOCABULARY)]
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in (*SPECIALS, *reserved)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
