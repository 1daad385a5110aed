"""Whether a PREFILL can be computed at all, before anything is kept of it. Pure."""

from dataclasses import dataclass

from kvproto.errors import ErrorCode
from kvproto.messages import Prefill
from prefill_svc.errors import PromptRefused


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """``max_tokens``: of one prompt, bounded by model and KV pool."""

    max_tokens: int
    vocab_size: int


def check_prompt(request: Prefill, limits: PromptLimits) -> None:
    """Return if the prompt fits.

    Raises PromptRefused, checked in this order: too long, a token outside the vocabulary.
    """
    num_tokens = len(request.tokens)
    if num_tokens > limits.max_tokens:
        raise PromptRefused(
            ErrorCode.PROMPT_TOO_LONG,
            f"{num_tokens} tokens are more than this prefill worker can hold "
            f"(limit {limits.max_tokens})",
        )
    largest = max(request.tokens)
    if largest >= limits.vocab_size:
        raise PromptRefused(
            ErrorCode.MALFORMED,
            f"tokens: id {largest} is outside the vocabulary of {limits.vocab_size}",
        )
