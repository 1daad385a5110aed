"""One sequence's share of a forward pass, and the rules it must obey."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvengine.errors import InvalidBatch


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one sequence to compute now, after tokens whose K and V are in the pool already.

    Attributes:
        token_ids: the tokens to compute, at least one.
        num_cached_tokens: tokens of this sequence before them, already in the pool.
        block_table: the sequence's blocks in token order, enough for cached and new tokens.
        needs_logits: whether the logits after the last token are wanted.
    """

    token_ids: Sequence[int]
    num_cached_tokens: int
    block_table: Sequence[int]
    needs_logits: bool = True

    @property
    def num_context_tokens(self) -> int:
        """Tokens that the last new token attends to, itself included."""
        return self.num_cached_tokens + len(self.token_ids)


def check_span(
    span: Span, *, vocab_size: int, max_model_len: int, num_blocks: int, block_size: int
) -> None:
    """Check one span against the engine's limits.

    Raises:
        InvalidBatch: no token; a token outside the vocabulary; more context than the model takes;
            a block table that is too short or names a block outside the pool (in this order).
    """
    if not span.token_ids:
        raise InvalidBatch("A span has no tokens: leave the sequence out of the batch.")
    if min(span.token_ids) < 0 or max(span.token_ids) >= vocab_size:
        bad = next(token for token in span.token_ids if not 0 <= token < vocab_size)
        raise InvalidBatch(
            f"Token id {bad} is outside the model's vocabulary of {vocab_size}: check that the "
            "tokenizer belongs to this model."
        )
    if span.num_cached_tokens < 0 or span.num_context_tokens > max_model_len:
        raise InvalidBatch(
            f"A span of {len(span.token_ids)} tokens after {span.num_cached_tokens} does not fit "
            f"the model length of {max_model_len}: refuse the request earlier."
        )
    if len(span.block_table) * block_size < span.num_context_tokens:
        raise InvalidBatch(
            f"A block table of {len(span.block_table)} blocks of {block_size} tokens cannot hold "
            f"{span.num_context_tokens} tokens: allocate the blocks first."
        )
    if min(span.block_table) < 0 or max(span.block_table) >= num_blocks:
        raise InvalidBatch(
            f"A block table names a block outside the pool of {num_blocks} blocks: it belongs to "
            "another pool."
        )
