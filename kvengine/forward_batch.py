"""A forward pass over several sequences at once: its rows, where K and V go, who attends to what.

The rows of all spans are laid end to end as one sequence of length ``num_rows``; positions and
attention come from here, never from the row number. Nothing about the batch is global: the model
receives it as the keyword argument ``kv_batch``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvengine.attention_plan import AttentionPlan, make_plan
from kvengine.kv_pool import KvPool
from kvengine.span import Span
from kvproto.geometry import slot_runs

__all__ = ["ForwardBatch", "Span"]

# Up to this many runs, a copy per run is cheaper than one indexed copy.
_MAX_COPIED_RUNS = 4


class ForwardBatch:
    """The spans of one forward pass, in the order the engine computes them.

    One-token spans come first, longest context first; the plan relies on it.

    Args:
        spans: checked spans, at least one.
        pool: where K and V are written and read.
        on_layer: called with the layer's index right after its K and V are in the pool.
        is_written: K and V of the rows are in the pool already; `write` does nothing.

    Attributes:
        num_rows: tokens of all spans.
        input_ids: int64 [1, num_rows].
        position_ids: int64 [1, num_rows].
        logits_rows: int64 [n], the last row of every span that needs logits, in the order in
            which the caller gave the spans.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        pool: KvPool,
        on_layer: Callable[[int], None] | None = None,
        *,
        is_written: bool = False,
    ) -> None:
        order = sorted(
            range(len(spans)),
            key=lambda index: (
                len(spans[index].token_ids) > 1,
                -spans[index].num_context_tokens,
            ),
        )
        self._spans = [spans[index] for index in order]
        self._pool = pool
        self._on_layer = on_layer
        self._is_written = is_written
        self._tail: tuple[ForwardBatch, torch.Tensor] | None = None
        self._plans: dict[int | None, AttentionPlan] = {}
        tokens: list[int] = []
        positions: list[int] = []
        # (first row, first slot, number of rows) of every contiguous piece of the pool to write
        self._writes: list[tuple[int, int, int]] = []
        last_rows = [0] * len(spans)
        for index, span in zip(order, self._spans, strict=True):
            row = len(tokens)
            runs = slot_runs(
                span.block_table,
                span.num_cached_tokens,
                len(span.token_ids),
                pool.layout.block_size,
            )
            for slot, length in runs:
                self._writes.append((row, slot, length))
                row += length
            tokens.extend(span.token_ids)
            positions.extend(range(span.num_cached_tokens, span.num_context_tokens))
            last_rows[index] = len(tokens) - 1
        self._given_spans = spans
        self._last_rows = last_rows
        self.num_rows = len(tokens)
        self.input_ids = torch.tensor([tokens])
        self.position_ids = torch.tensor([positions])
        self.logits_rows = torch.tensor(
            [row for row, span in zip(last_rows, spans, strict=True) if span.needs_logits],
            dtype=torch.int64,
        )
        self._rotary: tuple[torch.Tensor, torch.Tensor] | None = None
        self._slots: torch.Tensor | None = None
        if len(self._writes) > _MAX_COPIED_RUNS:
            self._slots = torch.cat(
                [torch.arange(slot, slot + length) for _, slot, length in self._writes]
            )

    @property
    def pool(self) -> KvPool:
        """The pool that this batch reads and writes."""
        return self._pool

    @property
    def sliding_windows(self) -> frozenset[int | None]:
        """The sliding windows that attention has asked for so far; None stands for no window."""
        return frozenset(self._plans)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put one layer's new K and V into the pool, then report the layer.

        Args:
            layer: its index.
            key: [num_rows, num_kv_heads, head_dim], any strides.
            value: the same shape.
        """
        if self._is_written:
            return
        for region, rows in ((self._pool.keys[layer], key), (self._pool.values[layer], value)):
            if self._slots is not None:
                region.index_copy_(0, self._slots, rows)
                continue
            for row, slot, length in self._writes:
                region.narrow(0, slot, length).copy_(rows.narrow(0, row, length))
        if self._on_layer is not None:
            self._on_layer(layer)

    def tail(self) -> tuple[ForwardBatch, torch.Tensor]:
        """Return the rows that need logits as a batch of their own, for after the last write.

        Once the last layer's K and V are in the pool, no other row is of use to anybody. The last
        row of a prefill span then attends like a decode row.

        Returns:
            The batch of the last tokens of all spans that need logits, at least one; int64 [n],
            the row of this batch that each of its rows is.
        """
        if self._tail is None:
            pairs = [
                (
                    Span(span.token_ids[-1:], span.num_context_tokens - 1, span.block_table),
                    row,
                )
                for span, row in zip(self._given_spans, self._last_rows, strict=True)
                if span.needs_logits
            ]
            batch = ForwardBatch([span for span, _ in pairs], self._pool, is_written=True)
            # The new batch sorted its spans: row r of it is the span whose last row is r.
            rows = torch.empty(len(pairs), dtype=torch.int64)
            rows[batch.logits_rows] = torch.tensor([row for _, row in pairs])
            self._tail = batch, rows
        return self._tail

    def rotary(
        self, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine as fused layers use them, worked out once per batch.

        Args:
            position_embeddings: transformers' cosine and sine, each [1, num_rows, head_dim], the
                same for every layer of a model.

        Returns:
            Each [num_rows, 1, head_dim]; the first half of the sine is negated.
        """
        if self._rotary is None:
            cos, sin = (part[0].unsqueeze(1) for part in position_embeddings)
            half = sin.shape[-1] // 2
            self._rotary = (cos, torch.cat((-sin[..., :half], sin[..., half:]), -1))
        return self._rotary

    def plan(
        self, num_query_heads: int, sliding_window: int | None, dtype: torch.dtype
    ) -> AttentionPlan:
        """Return the attention plan, made on first use for each sliding window."""
        plan = self._plans.get(sliding_window)
        if plan is None:
            plan = make_plan(
                self._spans,
                self._pool.layout,
                num_query_heads=num_query_heads,
                sliding_window=sliding_window,
                dtype=dtype,
            )
            self._plans[sliding_window] = plan
        return plan
