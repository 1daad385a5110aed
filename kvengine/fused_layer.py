"""A decoder layer of the Llama shape, with as few operators as torch's CPU kernels allow.

Computes what transformers' own layer computes (RMSNorm, grouped-query attention with rotary
embedding, SiLU-gated MLP, two residuals), checked against it when the model is loaded. Differences:

- q, k and v are one matrix product, gate and up another; both residual additions happen inside the
  matrix kernels.
- ``RMSNorm(x) * w`` followed by a linear layer W becomes ``x / rms(x)`` followed by ``W * w``: the
  weight of the norm is folded into the columns of W, and so is the root of the hidden size.
- ``1 / sqrt(mean(x^2) + eps)`` is ``sqrt(n) / hypot(|x|, sqrt(n * eps))``: 3 operators, not 6.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu

from kvengine.attention import paged_attention
from kvengine.forward_batch import ForwardBatch
from kvengine.packed_linear import PackedLinear


def _fold(norm: Any, *linears: nn.Linear) -> torch.Tensor:
    """Return the linears' weights stacked, with the norm's weight and sqrt(size) folded in."""
    scale = norm.weight.detach() * math.sqrt(norm.weight.numel())
    return torch.cat([linear.weight.detach() for linear in linears]) * scale


def _biases(*linears: nn.Linear) -> torch.Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    return torch.cat([linear.bias.detach() for linear in linears])


class FusedDecoderLayer(nn.Module):
    """Stands in for a transformers decoder layer with the same call.

    Args:
        layer: the original, float32; its weights are copied, and it may be dropped afterwards.
        sliding_window: what the original asks of attention.
        has_row_copies: see ``PackedLinear``.

    Attributes:
        is_last: no layer follows, so rows without logits may be dropped once K and V are written.
    """

    def __init__(
        self, layer: nn.Module, sliding_window: int | None, *, has_row_copies: bool = False
    ) -> None:
        super().__init__()
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp
        norms: Any = (layer.input_layernorm, layer.post_attention_layernorm)
        self.is_last = False
        self.layer_idx = int(attention.layer_idx)
        self.head_dim = int(attention.head_dim)
        self.scaling = float(attention.scaling)
        self.sliding_window = sliding_window
        self.q_width = int(attention.q_proj.out_features)
        self.kv_width = int(attention.k_proj.out_features)
        hidden_size = int(attention.q_proj.in_features)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        pack = functools.partial(PackedLinear, has_row_copy=has_row_copies)
        self.qkv = pack(_fold(norms[0], *projections), _biases(*projections))
        self.o = pack(attention.o_proj.weight, attention.o_proj.bias)
        self.gate_width = int(mlp.gate_proj.out_features)
        self.gate_up = pack(
            _fold(norms[1], mlp.gate_proj, mlp.up_proj), _biases(mlp.gate_proj, mlp.up_proj)
        )
        self.down = pack(mlp.down_proj.weight, mlp.down_proj.bias)
        self._floors = [
            torch.tensor(math.sqrt(hidden_size * norm.variance_epsilon)) for norm in norms
        ]
        self._head_norm: torch.Tensor | None = None
        if hasattr(attention, "q_norm"):
            num_q, num_k = self.q_width // self.head_dim, self.kv_width // self.head_dim
            weights = [attention.q_norm.weight] * num_q + [attention.k_norm.weight] * num_k
            self._head_norm = torch.stack([w.detach() for w in weights]) * math.sqrt(self.head_dim)
            self._head_floor = torch.tensor(
                math.sqrt(self.head_dim * attention.q_norm.variance_epsilon)
            )

    def _project(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v of the rows, each [num_rows, heads, head_dim], rotated."""
        num_rows, head_dim = x.shape[0], self.head_dim
        norms = torch.linalg.vector_norm(x, 2, -1, True).hypot_(self._floors[0])
        qkv = self.qkv(x / norms)
        qk_width = self.q_width + self.kv_width
        qk = qkv.narrow(1, 0, qk_width).view(num_rows, -1, head_dim)
        if self._head_norm is not None:
            norms = torch.linalg.vector_norm(qk, 2, -1, True).hypot_(self._head_floor)
            qk = (qk / norms).mul_(self._head_norm)
        # The halves swap places under a sine whose first half was negated beforehand.
        qk = torch.addcmul(qk * cos, torch.roll(qk, head_dim // 2, -1), sin)
        num_q = self.q_width // head_dim
        value = qkv.narrow(1, qk_width, self.kv_width).view(num_rows, -1, head_dim)
        return qk.narrow(1, 0, num_q), qk.narrow(1, num_q, qk.shape[1] - num_q), value

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        kv_batch: ForwardBatch,
        **_: Any,
    ) -> torch.Tensor:
        """Compute the layer.

        Args:
            hidden_states: the residual stream, [1, num_rows, hidden_size].
            position_embeddings: cosine and sine, each [1, num_rows, head_dim].
            kv_batch: the batch.

        Returns:
            [1, num_rows, hidden_size]; of the last layer only the rows of `kv_batch.tail()`, or
            none if no row needs logits.
        """
        x = hidden_states[0]
        query, key, value = self._project(x, *kv_batch.rotary(position_embeddings))
        if self.is_last and kv_batch.logits_rows.numel() < kv_batch.num_rows:
            kv_batch.write(self.layer_idx, key, value)
            if kv_batch.logits_rows.numel() == 0:
                return hidden_states[:, :0]
            kv_batch, rows = kv_batch.tail()
            x, query, key, value = (part.index_select(0, rows) for part in (x, query, key, value))
        attended = paged_attention(
            kv_batch,
            self.layer_idx,
            query,
            key,
            value,
            scale=self.scaling,
            sliding_window=self.sliding_window,
        )
        x = self.o.plus(attended, x)
        norms = torch.linalg.vector_norm(x, 2, -1, True).hypot_(self._floors[1])
        gate, up = self.gate_up(x / norms).split(self.gate_width, -1)
        x = self.down.plus(silu(gate).mul_(up), x)
        return x.unsqueeze(0)
