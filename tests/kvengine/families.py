"""Tiny random-weight models of several families."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 211
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 1,
    # Larger than the default: with it all logits are alike, and greedy choice would depend on the
    # last bit of a sum.
    "initializer_range": 0.3,
}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama_biased": lambda: LlamaConfig(
        **SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=False
    ),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=24),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES, sliding_window=24, layer_types=LAYER_TYPES, query_pre_attn_scalar=20
    ),
    "granite": lambda: GraniteConfig(
        **SIZES,
        attention_multiplier=0.2,
        residual_multiplier=0.7,
        embedding_multiplier=1.5,
        logits_scaling=2.0,
    ),
}
FUSED_FAMILIES = ("llama", "llama_biased", "mistral", "qwen2", "qwen3")


def write_tiny_model(family: str, folder: Path) -> Path:
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            # Fresh norms are all one and biases all zero, which hides a forgotten one.
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
    model.save_pretrained(folder)
    return folder
