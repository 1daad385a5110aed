"""The engine: a model, a KV pool, and one call that runs a batch of spans through both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from kvengine.errors import InvalidBatch, PoolTooSmall
from kvengine.fast_layers import drops_rows, make_fast, row_copies_nbytes
from kvengine.forward_batch import ForwardBatch
from kvengine.kv_pool import KvPool
from kvengine.memory import available_nbytes
from kvengine.model import ModelFacts, load_model
from kvengine.span import Span, check_span
from kvproto.geometry import PoolLayout

# Second layouts are a convenience: they may take this share of the memory that is still free.
_MAX_COPIES_SHARE = 1 / 8


class Engine:
    """Computes logits for spans over a paged KV pool. One thread at a time may use it.

    Attributes:
        facts: of the model; `facts.max_model_len` is what this engine accepts.
        kv_pool: the pool; other threads may read committed blocks and write leased ones.
        num_blocks: blocks in the pool.
        fallbacks: sentences about layers that run transformers' own code because a fast version
            did not reproduce it; empty in the usual case.
        has_row_copies: some weights are kept in a second layout for steps of one sequence.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        facts: ModelFacts,
        kv_pool: KvPool,
        fallbacks: Sequence[str] = (),
        *,
        has_row_copies: bool = False,
    ) -> None:
        self._model = model
        self._drops_rows = drops_rows(model)
        self.facts = facts
        self.kv_pool = kv_pool
        self.num_blocks = kv_pool.layout.num_blocks
        self.fallbacks = tuple(fallbacks)
        self.has_row_copies = has_row_copies

    @classmethod
    def load(
        cls,
        model_dir: Path | str,
        *,
        dtype: str = "float32",
        num_threads: int,
        kv_pool_nbytes: int,
        block_size: int = 16,
        max_model_len: int | None = None,
        use_fast_layers: bool = True,
        has_row_copies: bool | None = False,
        pool_memory: Callable[[PoolLayout], memoryview] | None = None,
    ) -> Engine:
        """Load a model folder and make a pool for it.

        Args:
            model_dir: a transformers folder with safetensors weights.
            dtype: torch's name of the dtype to compute and to store KV in.
            num_threads: threads of torch's parallel kernels; set for the whole process.
            kv_pool_nbytes: upper bound of the pool, rounded down to whole blocks.
            block_size: tokens per block.
            max_model_len: refuse longer sequences; the model's own length when absent, or what
                the pool holds if that is less.
            use_fast_layers: swap layers for faster ones that compute the same.
            has_row_copies: keep a second layout of some weights, which makes steps of one sequence
                about a tenth faster; None does so if it takes at most an eighth of the memory that
                is available.
            pool_memory: gives the memory of the pool, see `KvPool`; what it raises is passed on.

        Raises:
            ModelLoadError: see `load_model`.
            PoolTooSmall: the pool does not hold one sequence of `max_model_len`, or no block.
        """
        torch.set_num_threads(num_threads)
        model, facts = load_model(model_dir, dtype)
        block_nbytes = facts.geometry.kv_token_nbytes * block_size
        num_blocks = kv_pool_nbytes // block_nbytes
        wanted_tokens = block_size if max_model_len is None else max_model_len
        if num_blocks * block_size < wanted_tokens:
            needed_nbytes = -(-wanted_tokens // block_size) * block_nbytes
            raise PoolTooSmall(
                f"A KV pool of {kv_pool_nbytes} bytes holds {num_blocks * block_size} tokens of "
                f"{facts.name}, but one sequence may have {wanted_tokens}: give at least "
                f"{needed_nbytes} bytes or a shorter maximum length."
            )
        facts = facts.limited(
            min(num_blocks * block_size, max_model_len or num_blocks * block_size)
        )
        if has_row_copies is None:
            has_row_copies = row_copies_nbytes(model) <= available_nbytes() * _MAX_COPIES_SHARE
        fallbacks: list[str] = []
        if use_fast_layers:
            fallbacks = make_fast(model, facts.geometry, has_row_copies=has_row_copies)
        layout = PoolLayout(facts.geometry, num_blocks, block_size)
        pool = KvPool(layout, None if pool_memory is None else pool_memory(layout))
        return cls(model, facts, pool, fallbacks, has_row_copies=use_fast_layers and has_row_copies)

    def forward(
        self, spans: Sequence[Span], on_layer: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """Compute the spans' tokens: K and V into the pool, logits for those who want them.

        Args:
            spans: at least one; blocks that a span writes belong to it alone.
            on_layer: called in this thread with i right after layer i's K and V of all spans are
                in the pool, before that layer's attention. An exception of it ends the pass.

        Returns:
            [number of spans with needs_logits, vocab_size], in the order of `spans`.

        Raises:
            InvalidBatch: no span, or as `check_span` for the first bad one; nothing was computed.
        """
        if not spans:
            raise InvalidBatch("A forward pass got no spans: skip it.")
        for span in spans:
            check_span(
                span,
                vocab_size=self.facts.vocab_size,
                max_model_len=self.facts.max_model_len,
                num_blocks=self.num_blocks,
                block_size=self.kv_pool.layout.block_size,
            )
        with torch.inference_mode():
            batch = ForwardBatch(spans, self.kv_pool, on_layer)
            inputs = {
                "input_ids": batch.input_ids,
                "position_ids": batch.position_ids,
                "use_cache": False,
                "kv_batch": batch,
            }
            rows = batch.logits_rows
            if rows.numel() == 0:
                self._model.base_model(**inputs)
                return torch.empty(0, self.facts.vocab_size)
            if self._drops_rows and rows.numel() < batch.num_rows:
                rows = batch.tail()[0].logits_rows
            return self._model(**inputs, logits_to_keep=rows).logits[0]

    def warm_up(self) -> None:
        """Run one prefill and one decode pass, so that the first request meets warm kernels.

        Writes K and V into the first blocks of the pool: call it before any of them is in use.
        """
        num_tokens = min(64, self.facts.max_model_len - 1)
        num_blocks = -(-(num_tokens + 1) // self.kv_pool.layout.block_size)
        blocks = range(num_blocks)
        self.forward([Span([0] * num_tokens, 0, blocks, needs_logits=True)])
        self.forward([Span([0], num_tokens, blocks, needs_logits=True)])
