"""Attention over the paged pool, under the name "pd_paged" in transformers' attention interface.

K and V of the new tokens are written to the pool first, then every row attends over its own
sequence. Supported: grouped query heads, causal with a context offset, sliding windows, any
scaling. Everything else a model may ask of its attention is refused, not ignored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from kvengine.attention_plan import DecodeGroup, PrefillGroup
from kvengine.errors import InvalidBatch, ModelLoadError
from kvengine.forward_batch import ForwardBatch

ATTENTION_NAME = "pd_paged"


def _attend_decode(
    group: DecodeGroup, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend for rows of one token each.

    The pool is read as a table of [num_slots * num_kv_heads] vectors. The scores are one sampled
    dense product at the stored (query head, key) pairs; the weighted sum of the values is an
    embedding bag over the same pairs. Neither copies K or V.

    Args:
        group: rows and pairs.
        query: [num_rows, num_query_heads, head_dim] of the group's rows, any strides.
        keys: the layer's [num_slots, num_kv_heads, head_dim].
        values: the same shape.
        scale: factor on the scores.

    Returns:
        [num_rows, num_query_heads * head_dim].
    """
    num_rows, num_query_heads, head_dim = query.shape
    scored = torch.sparse.sampled_addmm(
        group.scores,
        query.reshape(num_rows * num_query_heads, head_dim),
        keys.view(-1, head_dim).t(),
        beta=0.0,
        alpha=scale,
    )
    scores = scored.values().view(num_rows, num_query_heads, group.num_keys)
    if group.padding is not None:
        scores = scores.add_(group.padding)
    weights = torch.softmax(scores, -1)
    summed = torch.embedding_bag(
        values.view(-1, head_dim), group.pairs, group.offsets, False, 0, False, weights.view(-1)
    )[0]
    return summed.view(num_rows, num_query_heads * head_dim)


def _group_keys(
    group: PrefillGroup, new_rows: torch.Tensor, pool_rows: torch.Tensor
) -> torch.Tensor:
    """Return [num_spans, num_kv_heads, num_keys, head_dim], as a view whenever possible."""
    if group.is_fresh:
        rows = new_rows.narrow(0, group.first_row, group.num_spans * group.num_rows)
    elif len(group.runs) == 1:
        rows = pool_rows.narrow(0, *group.runs[0])
    else:
        rows = torch.cat([pool_rows.narrow(0, slot, length) for slot, length in group.runs])
    return rows.unflatten(0, (group.num_spans, -1)).transpose(1, 2)


def _attend_prefill(
    group: PrefillGroup, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend for the rows of one group.

    Args:
        group: the spans.
        query: [num_spans * num_rows, num_query_heads, head_dim], the group's rows.
        keys: [num_spans, num_kv_heads, num_keys, head_dim].
        values: the same shape.
        scale: factor on the scores.

    Returns:
        [num_spans, num_rows, num_query_heads, head_dim].
    """
    if group.num_rows == 1:
        # All query heads of one KV head see the same keys: they are its rows, no head is repeated.
        num_kv_heads = keys.shape[1]
        folded = query.unflatten(1, (num_kv_heads, -1))
        return scaled_dot_product_attention(folded, keys, values, scale=scale).view(
            group.num_spans, 1, -1, query.shape[-1]
        )
    return scaled_dot_product_attention(
        query.unflatten(0, (group.num_spans, group.num_rows)).transpose(1, 2),
        keys,
        values,
        attn_mask=group.mask,
        is_causal=group.is_causal,
        scale=scale,
        enable_gqa=True,
    ).transpose(1, 2)


def paged_attention(
    batch: ForwardBatch,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Write K and V of the batch's rows, then attend.

    Args:
        batch: rows, positions and blocks.
        layer: index of the layer.
        query: [num_rows, num_query_heads, head_dim], heads contiguous within a row.
        key: [num_rows, num_kv_heads, head_dim].
        value: [num_rows, num_kv_heads, head_dim].
        scale: factor on the scores.
        sliding_window: each row sees this many last keys, itself included; None for all.

    Returns:
        [num_rows, num_query_heads * head_dim].
    """
    batch.write(layer, key, value)
    num_rows, num_query_heads, head_dim = query.shape
    plan = batch.plan(num_query_heads, sliding_window, query.dtype)
    keys, values = batch.pool.keys[layer], batch.pool.values[layer]
    if len(plan.decode_groups) == 1 and not plan.prefill_groups:
        return _attend_decode(plan.decode_groups[0], query, keys, values, scale)
    output = query.new_empty(num_rows, num_query_heads, head_dim)
    flat = output.view(num_rows, num_query_heads * head_dim)
    for group in plan.decode_groups:
        rows = query.narrow(0, group.first_row, group.num_rows)
        flat.narrow(0, group.first_row, group.num_rows).copy_(
            _attend_decode(group, rows, keys, values, scale)
        )
    for spans in plan.prefill_groups:
        num_group_rows = spans.num_spans * spans.num_rows
        attended = _attend_prefill(
            spans,
            query.narrow(0, spans.first_row, num_group_rows),
            _group_keys(spans, key, keys),
            _group_keys(spans, value, values),
            scale,
        )
        if num_group_rows == num_rows:
            return attended.reshape(num_rows, num_query_heads * head_dim)
        output.narrow(0, spans.first_row, num_group_rows).copy_(attended.flatten(0, 1))
    return flat


def _transformers_entry(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    kv_batch: ForwardBatch | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Serve transformers' attention interface: [1, heads, rows, head_dim] in, [1, rows, ...] out.

    Raises:
        InvalidBatch: called without a batch, so not by the engine.
        ModelLoadError: the model asks for something this attention does not compute.
    """
    if kv_batch is None:
        raise InvalidBatch(
            f"The attention '{ATTENTION_NAME}' was called without kv_batch: run the model through "
            "the engine."
        )
    if attention_mask is not None:
        raise ModelLoadError(
            f"{type(module).__name__} passes its own attention mask, which paged attention does "
            "not compute: serve another model."
        )
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ModelLoadError(
                f"{type(module).__name__} asks for '{name}', which paged attention does not "
                "compute: serve another model."
            )
    head_dim = query.shape[-1]
    attended = paged_attention(
        kv_batch,
        int(module.layer_idx),  # type: ignore[arg-type]
        query[0].transpose(0, 1).contiguous(),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=head_dim**-0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
    )
    return attended.view(1, attended.shape[0], -1, head_dim), None


AttentionInterface.register(ATTENTION_NAME, _transformers_entry)
