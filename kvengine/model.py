"""Load a decoder-only transformers model and state the facts that its peers must share."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from kvengine.attention import ATTENTION_NAME
from kvengine.checkpoint import weight_files, weights_digest
from kvengine.errors import ModelLoadError
from kvengine.kv_pool import torch_dtype
from kvproto.geometry import KvGeometry, config_digest

_SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# Config keys that change what attention computes, in ways that paged attention does not follow.
_REFUSED_CONFIG_KEYS = {
    "attn_logit_softcapping": "softcapping of attention logits",
    "use_bidirectional_attention": "bidirectional attention",
    "attention_chunk_size": "chunked local attention",
    "num_kv_shared_layers": "KV shared between layers",
    "kv_lora_rank": "latent attention",
    "alibi": "ALiBi position biases",
}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is true of a loaded model, for the handshake and for the scheduler.

    Attributes:
        name: the folder's name.
        weights_digest: of config and weights, see `checkpoint.weights_digest`.
        config_digest: of config.json alone; the router computes the same without torch.
        geometry: shape of the KV of one token.
        vocab_size: rows of the output layer.
        max_model_len: most tokens of one sequence, prompt and output together.
        eos_token_ids: tokens that end a sequence.
    """

    name: str
    weights_digest: str
    config_digest: str
    geometry: KvGeometry
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]

    def facts(self) -> dict[str, str | int]:
        """Return the facts that both ends of a handoff must agree on."""
        return {
            **self.geometry.facts(),
            "weights_digest": self.weights_digest,
            "config_digest": self.config_digest,
        }

    def limited(self, max_model_len: int) -> ModelFacts:
        """Return the same facts with a shorter model length."""
        return replace(self, max_model_len=min(self.max_model_len, max_model_len))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(
            f"{path} cannot be read as JSON ({error}): copy the model folder again."
        ) from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} is not a JSON object: copy the model folder again.")
    return content


def _refuse_unsupported(config: PreTrainedConfig, name: str) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise ModelLoadError(f"{name} is an encoder-decoder model: serve a decoder-only one.")
    for key, feature in _REFUSED_CONFIG_KEYS.items():
        if getattr(config, key, None):
            raise ModelLoadError(
                f"{name} uses {feature} ({key} in config.json), which paged attention does not "
                "compute: serve another model."
            )
    unknown = set(getattr(config, "layer_types", None) or ()) - _SERVED_LAYER_TYPES
    if unknown:
        raise ModelLoadError(
            f"{name} has layers of type {', '.join(sorted(unknown))}, which keep no paged KV: "
            "serve a model whose layers are full or sliding attention."
        )


def _refuse_larger_tokenizer(model_dir: Path, vocab_size: int) -> None:
    """Refuse a tokenizer that can make token ids which the model has no embedding for."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        return
    tokenizer = _read_json(path)
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else range(len(vocabulary))
    largest = max([*ids, *(token["id"] for token in tokenizer.get("added_tokens", []))], default=0)
    if largest >= vocab_size:
        raise ModelLoadError(
            f"The tokenizer in {model_dir} makes token ids up to {largest}, but the model has "
            f"{vocab_size} embeddings: the two files do not belong together."
        )


def _load(model_dir: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load weights with transformers, refusing any that are missing or misshapen."""
    progress_bar_was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model_dir,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        raise ModelLoadError(
            f"transformers cannot load {model_dir} as a causal language model "
            f"({str(error).splitlines()[0]}): serve a decoder-only model that it knows."
        ) from error
    finally:
        if progress_bar_was_on:
            transformers_logging.enable_progress_bar()
    model: PreTrainedModel
    model, loading = loaded
    missing = sorted(loading["missing_keys"]) + [str(k) for k in loading["mismatched_keys"]]
    if missing:
        raise ModelLoadError(
            f"The weights in {model_dir} do not fit its config.json ({len(missing)} tensors are "
            f"missing or misshapen, first {missing[0]}): copy the model folder again."
        )
    return model.eval().requires_grad_(False)


def attention_modules(model: torch.nn.Module, name: str) -> dict[str, torch.nn.Module]:
    """Return the attention modules by module path, in layer order.

    Raises:
        ModelLoadError: the modules do not carry layer indices 0, 1, 2 and so on.
    """
    found = {
        path: module
        for path, module in model.named_modules()
        if hasattr(module, "layer_idx") and hasattr(module, "k_proj")
    }
    if not found or [module.layer_idx for module in found.values()] != list(range(len(found))):
        raise ModelLoadError(
            f"{name} has no attention layers of the usual form (k_proj, layer_idx): serve a model "
            "of another family."
        )
    return found


def _geometry(
    model: PreTrainedModel, config: PreTrainedConfig, dtype_name: str, name: str
) -> KvGeometry:
    modules = attention_modules(model, name)
    head_dims = {int(module.head_dim) for module in modules.values()}  # type: ignore[arg-type]
    widths = {
        int(projection.out_features)  # type: ignore[union-attr, arg-type]
        for module in modules.values()
        for projection in (module.k_proj, module.v_proj)
    }
    if len(head_dims) != 1 or len(widths) != 1 or len(modules) != config.num_hidden_layers:
        raise ModelLoadError(
            f"{name} has layers with different KV shapes: serve a model whose layers are alike."
        )
    (head_dim,), (width,) = head_dims, widths
    return KvGeometry.uniform(
        num_layers=len(modules),
        num_kv_heads=width // head_dim,
        head_dim=head_dim,
        dtype=dtype_name,
        layer_names=tuple(modules),
        windows_tokens=[
            int(getattr(module, "sliding_window", None) or 0) for module in modules.values()
        ],
    )


def _eos_token_ids(model: PreTrainedModel, config: Mapping[str, Any]) -> tuple[int, ...]:
    generation = model.generation_config
    ids = generation.eos_token_id if generation is not None else None
    if ids is None:
        ids = config.get("eos_token_id")
    if ids is None:
        return ()
    return tuple(int(token) for token in (ids if isinstance(ids, list) else [ids]))


def load_model(model_dir: Path | str, dtype: str) -> tuple[PreTrainedModel, ModelFacts]:
    """Load the model of a folder for paged attention, with its facts.

    Args:
        model_dir: a transformers folder with safetensors weights.
        dtype: torch's name of the dtype to compute in, for example "float32".

    Raises:
        ModelLoadError: the folder is incomplete; the architecture is unknown or uses attention
            that this engine does not compute; the weights or the tokenizer do not fit the config.
    """
    folder = Path(model_dir)
    weight_files(folder)
    name = folder.resolve().name
    config_json = _read_json(folder / "config.json")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise ModelLoadError(
            f"transformers does not know the architecture of {folder} "
            f"({str(error).splitlines()[0]}): serve a decoder-only model that it knows."
        ) from error
    _refuse_unsupported(config.get_text_config(), name)
    _refuse_larger_tokenizer(folder, config.get_text_config().vocab_size)
    model = _load(folder, torch_dtype(dtype))
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise ModelLoadError(
            f"{type(model).__name__} cannot compute logits for chosen rows only: serve a model of "
            "another family."
        )
    text_config = model.config.get_text_config()
    facts = ModelFacts(
        name=name,
        weights_digest=weights_digest(folder),
        config_digest=config_digest(config_json),
        geometry=_geometry(model, text_config, dtype, name),
        vocab_size=int(text_config.vocab_size),
        max_model_len=int(text_config.max_position_embeddings),
        eos_token_ids=_eos_token_ids(model, config_json),
    )
    return model, facts
