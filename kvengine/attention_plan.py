"""What one forward pass attends to, worked out once and used by every layer.

Spans of one token (decode) and longer spans (prefill) take different roads. The decode rows of
all sequences become one sparse matrix whose stored entries are exactly the (query head, key slot)
pairs to score: nothing is gathered, and the work in Python does not depend on the number of
sequences. Prefill spans attend one by one, over views; fresh ones of equal length together.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvengine.span import Span
from kvproto.geometry import PoolLayout, slot_runs

# Decode rows whose context is below this share of the longest in their group start a new group:
# a group is padded to its longest row, so this bounds the wasted work.
_MIN_GROUP_FILL = 0.75
# The sampled product exists for these only; other dtypes attend span by span.
_SPARSE_DTYPES = (torch.float32, torch.float64)

# Once per process torch says that sparse CSR tensors are new. Nobody can act on it, so it is said
# here, where no user hears it.
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Sparse CSR", category=UserWarning)
    torch.sparse_csr_tensor([0, 1], [0], [0.0], size=(1, 1), check_invariants=False)


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows of similar context length.

    Attributes:
        first_row: first row of the batch in this group.
        num_rows: rows in the group.
        num_keys: keys scored per query head, padding included.
        scores: sparse CSR [num_rows * num_query_heads, num_slots * num_kv_heads]; its values are
            overwritten by every layer.
        pairs: int64 [num_rows * num_query_heads * num_keys], the columns of `scores`.
        offsets: int64 [num_rows * num_query_heads], where each query head's pairs start.
        padding: [num_rows, 1, num_keys], 0 for a key and -inf for padding; None if there is none.
    """

    first_row: int
    num_rows: int
    num_keys: int
    scores: torch.Tensor
    pairs: torch.Tensor
    offsets: torch.Tensor
    padding: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PrefillGroup:
    """A span of several rows, or neighbouring spans of equal length that are all fresh.

    Attributes:
        first_row: first row of the batch in this group.
        num_spans: spans in the group; 1 unless all of them are fresh and causal.
        num_rows: rows of each span.
        is_fresh: every key is in the span itself, so K and V come from the activations.
        runs: (first slot, number of slots) of the keys in token order, unless fresh.
        is_causal: row i sees keys 0..i, without a mask.
        mask: [num_rows, num_keys], 0 to attend and -inf not to; None if `is_causal`, or if every
            row sees every key.
    """

    first_row: int
    num_spans: int
    num_rows: int
    is_fresh: bool
    runs: list[tuple[int, int]]
    is_causal: bool
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The whole batch: decode rows first, then prefill spans, both in groups."""

    decode_groups: list[DecodeGroup]
    prefill_groups: list[PrefillGroup]


def _first_key(query_position: int, sliding_window: int | None) -> int:
    return 0 if sliding_window is None else max(0, query_position + 1 - sliding_window)


def _group_ends(num_keys: Sequence[int]) -> list[int]:
    """Cut key counts in descending order into groups; return the end of each group."""
    ends: list[int] = []
    longest = num_keys[0]
    for row, count in enumerate(num_keys):
        if count < longest * _MIN_GROUP_FILL:
            ends.append(row)
            longest = count
    ends.append(len(num_keys))
    return ends


def _decode_group(
    spans: Sequence[Span],
    first_row: int,
    layout: PoolLayout,
    num_query_heads: int,
    sliding_window: int | None,
    dtype: torch.dtype,
) -> DecodeGroup:
    first_keys = [_first_key(span.num_cached_tokens, sliding_window) for span in spans]
    counts = [
        span.num_context_tokens - first for span, first in zip(spans, first_keys, strict=True)
    ]
    num_keys, num_rows = max(counts), len(spans)
    # Padding repeats slot 0: any slot is readable, and its score is thrown away.
    slots = torch.zeros(num_rows, num_keys, dtype=torch.int64)
    for row, (span, first, count) in enumerate(zip(spans, first_keys, counts, strict=True)):
        column = 0
        for slot, length in slot_runs(span.block_table, first, count, layout.block_size):
            torch.arange(slot, slot + length, out=slots[row, column : column + length])
            column += length
    num_kv_heads = layout.geometry.num_kv_heads
    heads = torch.arange(num_kv_heads).view(1, num_kv_heads, 1, 1)
    pairs = (slots.view(num_rows, 1, 1, num_keys) * num_kv_heads + heads).expand(
        num_rows, num_kv_heads, num_query_heads // num_kv_heads, num_keys
    )
    pairs = pairs.reshape(-1)
    offsets = torch.arange(0, pairs.numel() + 1, num_keys)
    scores = torch.sparse_csr_tensor(
        offsets,
        pairs,
        torch.zeros(pairs.numel(), dtype=dtype),
        size=(num_rows * num_query_heads, layout.num_slots * num_kv_heads),
        check_invariants=False,
    )
    padding = None
    if min(counts) < num_keys:
        is_padding = torch.arange(num_keys) >= torch.tensor(counts).view(-1, 1, 1)
        padding = torch.zeros(is_padding.shape, dtype=dtype).masked_fill_(is_padding, float("-inf"))
    return DecodeGroup(first_row, num_rows, num_keys, scores, pairs, offsets[:-1], padding)


def _prefill_group(
    span: Span,
    first_row: int,
    layout: PoolLayout,
    sliding_window: int | None,
    dtype: torch.dtype,
) -> PrefillGroup:
    num_rows, first_position = len(span.token_ids), span.num_cached_tokens
    first_key = _first_key(first_position, sliding_window)
    num_keys = span.num_context_tokens - first_key
    is_fresh = first_key == first_position
    is_causal = is_fresh and (sliding_window is None or num_rows <= sliding_window)
    mask = None
    if not is_causal and num_rows > 1:
        queries = torch.arange(first_position, first_position + num_rows).view(-1, 1)
        keys = torch.arange(first_key, first_key + num_keys)
        hidden = keys > queries
        if sliding_window is not None:
            hidden |= keys <= queries - sliding_window
        mask = torch.zeros(num_rows, num_keys, dtype=dtype).masked_fill_(hidden, float("-inf"))
    runs = [] if is_fresh else slot_runs(span.block_table, first_key, num_keys, layout.block_size)
    return PrefillGroup(first_row, 1, num_rows, is_fresh, runs, is_causal, mask)


def make_plan(
    spans: Sequence[Span],
    layout: PoolLayout,
    *,
    num_query_heads: int,
    sliding_window: int | None,
    dtype: torch.dtype,
) -> AttentionPlan:
    """Plan attention for spans in batch order: one-token spans by falling context, then the rest.

    Args:
        spans: the batch.
        layout: of the pool that holds the keys.
        num_query_heads: a multiple of the geometry's num_kv_heads.
        sliding_window: each query sees this many last keys, itself included; None for all.
        dtype: of the queries, used for masks and scores.
    """
    num_decode = 0
    # A sequence that decodes alone is cheaper dense: one call over a view, no sparse matrix.
    is_alone = len(spans) == 1 and len(spans[0].token_ids) == 1
    if dtype in _SPARSE_DTYPES and not is_alone:
        num_decode = next(
            (row for row, span in enumerate(spans) if len(span.token_ids) > 1), len(spans)
        )
    groups: list[DecodeGroup] = []
    if num_decode:
        counts = [
            span.num_context_tokens - _first_key(span.num_cached_tokens, sliding_window)
            for span in spans[:num_decode]
        ]
        begin = 0
        for end in _group_ends(counts):
            groups.append(
                _decode_group(
                    spans[begin:end], begin, layout, num_query_heads, sliding_window, dtype
                )
            )
            begin = end
    prefill: list[PrefillGroup] = []
    row = num_decode
    for span in spans[num_decode:]:
        group = _prefill_group(span, row, layout, sliding_window, dtype)
        row += group.num_rows
        previous = prefill[-1] if prefill else None
        if (
            previous is not None
            and previous.is_causal
            and group.is_causal
            and previous.num_rows == group.num_rows
        ):
            prefill[-1] = replace(previous, num_spans=previous.num_spans + 1)
        else:
            prefill.append(group)
    return AttentionPlan(groups, prefill)
