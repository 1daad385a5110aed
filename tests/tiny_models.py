"""Tiny random-weight models with a byte tokenizer, as ordinary Hugging Face folders."""

from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

EOS_TOKEN_ID = 256
BOS_TOKEN_ID = 257
VOCAB_SIZE = 260
MAX_MODEL_LEN = 2304

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_MODEL_LEN,
    "eos_token_id": EOS_TOKEN_ID,
    "bos_token_id": BOS_TOKEN_ID,
    "pad_token_id": EOS_TOKEN_ID,
    # Larger than the default 0.02: with it all logits are alike, and a test of greedy choice would
    # depend on the last bit of a sum.
    "initializer_range": 0.3,
}

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def _llama() -> PretrainedConfig:
    return LlamaConfig(**_SIZES, tie_word_embeddings=True)


def _qwen3() -> PretrainedConfig:
    return Qwen3Config(**_SIZES, tie_word_embeddings=False)


def _gemma3() -> PretrainedConfig:
    return Gemma3TextConfig(
        **_SIZES,
        sliding_window=32,
        tie_word_embeddings=False,
        layer_types=[*["sliding_attention"] * 2, "full_attention", "sliding_attention"],
        query_pre_attn_scalar=16,
    )


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
}


def make_tiny_model(family: str, folder: Path) -> Path:
    """Write a model of ``family`` and its tokenizer into ``folder`` and return it."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=torch.float32)
    model.generation_config.eos_token_id = EOS_TOKEN_ID
    model.save_pretrained(folder)
    make_byte_tokenizer().save_pretrained(folder)
    return folder


def make_byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    vocab |= {"<|end|>": EOS_TOKEN_ID, "<|begin|>": BOS_TOKEN_ID}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", bos_token="<|begin|>"
    )
    fast.chat_template = _CHAT_TEMPLATE
    assert fast.eos_token_id == EOS_TOKEN_ID
    assert fast.bos_token_id == BOS_TOKEN_ID
    return fast
