"""The one place where a loaded model is made fast.

Decoder layers of known families are replaced by `FusedDecoderLayer`, every other linear layer by
`PackedLinear`. A replacement is kept only if it reproduces the original on random input; if not,
the original stays and a sentence says so. The weights are packed layer by layer and the originals
dropped, so the peak is the model plus one layer. An output matrix tied to the embeddings is packed
beside them. Nothing else is stored twice unless second layouts for single rows are asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from kvengine.forward_batch import ForwardBatch
from kvengine.fused_layer import FusedDecoderLayer
from kvengine.kv_pool import KvPool
from kvengine.packed_linear import PackedLinear, can_pack, needs_row_copy
from kvengine.span import Span
from kvproto.geometry import KvGeometry, PoolLayout

_FUSED_FAMILIES = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
_PROBE_ROWS = 9
_CACHED_ROWS = 6
# Float32 sums in another order differ by about 1e-6 of the largest value; a wrong layer by 1e-1.
_TOLERANCE = 1e-4


def _worst_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference as a share of the largest expected value."""
    scale = float(expected.abs().max()) or 1.0
    return float((actual - expected).abs().max()) / scale


@dataclass(slots=True)
class _LayerProbe:
    """Runs one decoder layer over a small pool of its own: a prefill, then one decode row."""

    model: PreTrainedModel
    geometry: KvGeometry

    def run(self, layer: nn.Module) -> tuple[torch.Tensor, frozenset[int | None]]:
        """Run the layer over the probe's rows.

        Returns:
            Its outputs and the K and V it wrote, in one row; the sliding windows it asked for.
        """
        pool = KvPool(PoolLayout(self.geometry, num_blocks=4, block_size=4))
        hidden_size = self.model.config.get_text_config().hidden_size
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(1, _PROBE_ROWS, hidden_size, generator=generator)
        blocks = (2, 0, 3)
        rotary_embedding: Any = self.model.base_model.rotary_emb
        parts: list[torch.Tensor] = []
        windows: frozenset[int | None] = frozenset()
        for begin, end in ((0, _CACHED_ROWS), (_CACHED_ROWS, 8), (8, _PROBE_ROWS)):
            batch = ForwardBatch([Span([0] * (end - begin), begin, blocks)], pool)
            rotary = rotary_embedding(hidden, position_ids=batch.position_ids)
            output = layer(
                hidden[:, begin:end].clone(),
                attention_mask=None,
                position_ids=batch.position_ids,
                position_embeddings=rotary,
                use_cache=False,
                kv_batch=batch,
            )
            parts.append(output.flatten())
            windows |= batch.sliding_windows
        parts.extend(region.flatten() for region in (*pool.keys, *pool.values))
        return torch.cat(parts), windows


def _fuse_decoder_layers(
    model: PreTrainedModel, geometry: KvGeometry, *, has_row_copies: bool
) -> list[str]:
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return []
    fallbacks: list[str] = []
    probe = _LayerProbe(model, geometry)
    for index, layer in enumerate(layers):
        if type(layer) not in _FUSED_FAMILIES:
            continue
        try:
            expected, windows = probe.run(layer)
            (sliding_window,) = windows
            fused = FusedDecoderLayer(layer, sliding_window, has_row_copies=has_row_copies)
            error = _worst_error(probe.run(fused)[0], expected)
        except (RuntimeError, AttributeError, TypeError, ValueError) as failure:
            fallbacks.append(f"Layer {index} keeps transformers' code: {failure}")
            continue
        if not error <= _TOLERANCE:
            fallbacks.append(
                f"Layer {index} keeps transformers' code: its fused version is off by {error:.1e}."
            )
            continue
        layers[index] = fused
    last = layers[-1]
    if isinstance(last, FusedDecoderLayer):
        last.is_last = True
    return fallbacks


def drops_rows(model: PreTrainedModel) -> bool:
    """Return whether the model's last layer returns only the rows that need logits."""
    layers = getattr(model.base_model, "layers", None)
    return (
        isinstance(layers, nn.ModuleList)
        and isinstance(layers[-1], FusedDecoderLayer)
        and layers[-1].is_last
    )


def _pack_linear(linear: nn.Linear, *, has_row_copy: bool) -> PackedLinear | None:
    """Return the packed twin of a linear layer, or None if it does not reproduce it."""
    packed = PackedLinear(linear.weight, linear.bias, has_row_copy=has_row_copy)
    for num_rows in (1, 3):
        x = torch.randn(num_rows, linear.in_features, generator=torch.Generator().manual_seed(0))
        if not _worst_error(packed(x), linear(x)) <= _TOLERANCE:
            return None
    return packed


def _pack_linears(model: PreTrainedModel, *, has_row_copies: bool) -> list[str]:
    fallbacks: list[str] = []
    for path, module in list(model.named_modules()):
        for name, child in list(module.named_children()):
            if type(child) is not nn.Linear:
                continue
            packed = _pack_linear(child, has_row_copy=has_row_copies)
            if packed is None:
                fallbacks.append(f"{path}.{name} keeps transformers' code: its twin is off.")
                continue
            setattr(module, name, packed)
    return fallbacks


def _leave_the_file(model: PreTrainedModel) -> None:
    """Copy the weights that stay as they are out of the mapped checkpoint.

    transformers maps the safetensors file; one tensor that still lies in it keeps every page of it
    in this process, those of the replaced layers included.
    """
    for module in model.modules():
        if type(module) is not nn.Linear:
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.clone()


def row_copies_nbytes(model: PreTrainedModel) -> int:
    """Return what second layouts for single rows would take: see ``PackedLinear``."""
    return sum(
        module.weight.numel() * module.weight.element_size()
        for module in model.modules()
        if type(module) is nn.Linear and needs_row_copy(module.out_features)
    )


def make_fast(
    model: PreTrainedModel, geometry: KvGeometry, *, has_row_copies: bool = False
) -> list[str]:
    """Replace layers of `model` in place by faster ones that compute the same.

    Args:
        model: loaded for paged attention, on the CPU.
        geometry: of its KV.
        has_row_copies: keep a second layout of some weights, which makes single rows faster.

    Returns:
        One sentence per layer that kept transformers' code although its family is known.
    """
    if not can_pack(model.dtype):
        return []
    with torch.inference_mode():
        fallbacks = _fuse_decoder_layers(model, geometry, has_row_copies=has_row_copies)
        _leave_the_file(model)
        return fallbacks + _pack_linears(model, has_row_copies=has_row_copies)
