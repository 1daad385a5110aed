"""Whether a GENERATE can be served at all, before anything is kept of it. Pure."""

from dataclasses import dataclass

from decode_svc.errors import SequenceRefused
from kvengine.errors import InvalidBatch
from kvengine.sampler import SamplingParams
from kvproto.errors import ErrorCode
from kvproto.messages import Generate


@dataclass(frozen=True, slots=True)
class SequenceLimits:
    """``max_tokens``: prompt and output of one sequence, bounded by model and KV pool."""

    max_tokens: int
    vocab_size: int


def check_sequence(request: Generate, limits: SequenceLimits) -> SamplingParams:
    """The sampling parameters of a sequence that fits.

    Raises SequenceRefused, checked in this order: no room for an output token, more emitted
    tokens than asked for, a token outside the vocabulary, a sampling parameter out of range.
    """
    num_tokens = len(request.tokens)
    # One more: there must be room for at least one output token.
    if num_tokens + 1 > limits.max_tokens:
        raise SequenceRefused(
            ErrorCode.PROMPT_TOO_LONG,
            f"{num_tokens} tokens leave no room for an answer on this decode worker "
            f"(limit {limits.max_tokens})",
        )
    num_emitted = num_tokens - request.num_prompt_tokens
    if not 0 <= num_emitted < request.max_output_tokens:
        raise SequenceRefused(
            ErrorCode.MALFORMED,
            f"num_prompt_tokens: {request.num_prompt_tokens} of {num_tokens} tokens leave "
            f"{num_emitted} emitted ones, which must be 0 to max_output_tokens - 1",
        )
    largest = max(request.tokens)
    if largest >= limits.vocab_size:
        raise SequenceRefused(
            ErrorCode.MALFORMED,
            f"tokens: id {largest} is outside the vocabulary of {limits.vocab_size}",
        )
    try:
        return SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=request.seed,
        )
    except InvalidBatch as exc:
        raise SequenceRefused(ErrorCode.MALFORMED, str(exc)) from exc
