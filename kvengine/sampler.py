"""Choose the next token. The choice depends on the logits, the seed and the position alone.

A sequence that is resumed elsewhere, preempted or batched with others therefore draws the same
random numbers: there is no generator state to carry along.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvengine.errors import InvalidBatch

# Candidates examined before the whole vocabulary is sorted; nearly every nucleus is smaller.
_NUCLEUS_GUESS = 512
_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose a token.

    Attributes:
        temperature: 0 for greedy, else the divisor of the logits.
        top_p: keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        top_k: keep this many most likely tokens; 0 keeps all.
        seed: names the stream of random numbers; only its low 64 bits count.

    Raises:
        InvalidBatch: a value outside its range, in the order of the fields.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidBatch(f"temperature is {self.temperature}: give 0 or more.")
        if not 0 < self.top_p <= 1:
            raise InvalidBatch(f"top_p is {self.top_p}: give more than 0 and at most 1.")
        if self.top_k < 0:
            raise InvalidBatch(f"top_k is {self.top_k}: give 0 for no limit, or a count.")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature == 0.0 or self.top_k == 1


def uniform(seed: int, position: int) -> float:
    """Return the random number in [0, 1) of a seed and a position (counter-based, Philox)."""
    generator = np.random.Generator(np.random.Philox(key=seed & _WORD, counter=position & _WORD))
    return float(generator.random())


def _nucleus(logits: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (token ids, float64 probabilities) that survive top_k and top_p, most likely first."""
    vocab_size = logits.numel()
    num_kept = min(params.top_k or vocab_size, vocab_size)
    if num_kept < vocab_size:
        logits, ids = torch.topk(logits, num_kept)
        probabilities = torch.softmax(logits, -1)
    else:
        probabilities = torch.softmax(logits, -1)
        num_guessed = min(_NUCLEUS_GUESS, vocab_size)
        guessed, ids = torch.topk(probabilities, num_guessed)
        if num_guessed < vocab_size and float(guessed.sum()) < params.top_p:
            probabilities, ids = torch.sort(probabilities, descending=True)
        else:
            probabilities = guessed
    # A token is kept while the mass before it has not reached top_p, so the first always is.
    before = torch.cumsum(probabilities, -1) - probabilities
    num_in_nucleus = max(1, int((before < params.top_p).sum()))
    return ids[:num_in_nucleus], probabilities[:num_in_nucleus]


def _sample_row(logits: torch.Tensor, params: SamplingParams, position: int) -> int:
    scaled = logits.to(torch.float64) / params.temperature
    if params.top_p < 1.0 or 0 < params.top_k < logits.numel():
        ids, probabilities = _nucleus(scaled, params)
    else:
        ids, probabilities = None, torch.softmax(scaled, -1)
    cumulative = torch.cumsum(probabilities, -1)
    target = uniform(params.seed, position) * float(cumulative[-1])
    index = int(torch.searchsorted(cumulative, target, right=True))
    # Rounding may leave the target a hair above the total; a zero-probability tail is not drawn.
    index = min(index, probabilities.numel() - 1)
    return index if ids is None else int(ids[index])


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> list[int]:
    """Choose one token per row.

    Args:
        logits: [n, vocab_size].
        params: one per row.
        positions: one per row: the index, within its sequence, of the token being chosen.

    Returns:
        n token ids.

    Raises:
        InvalidBatch: the lengths differ.
    """
    if not logits.shape[0] == len(params) == len(positions):
        raise InvalidBatch(
            f"{logits.shape[0]} rows of logits came with {len(params)} parameters and "
            f"{len(positions)} positions: give one of each per row."
        )
    if logits.shape[0] == 0:
        return []
    with torch.inference_mode():
        tokens: list[int] = logits.argmax(-1).tolist()
        for row, (row_params, position) in enumerate(zip(params, positions, strict=True)):
            if not row_params.is_greedy:
                tokens[row] = _sample_row(logits[row], row_params, position)
    return tokens
