"""A valid request and its prompts' tokens to sequence plans. Pure.

The limits checked here are the ones the workers check again: the context of the model and the
largest pool behind this router.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from router_svc.errors import InvalidRequestError
from router_svc.openai_api import GenerationOptions
from router_svc.sequence import SequencePlan

_SEED_LIMIT: Final = 2**64


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """What a sequence must fit: all numbers in tokens, `vocab_size` in ids."""

    longest_sequence_tokens: int
    default_max_output_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


def check_prompt_chars(
    num_chars: int, max_token_chars: int, longest_sequence_tokens: int, *, param: str
) -> None:
    """Refuse a text that is too long whatever its tokens are, before time goes into them.

    Raises InvalidRequestError if even tokens of `max_token_chars` characters each would fill the
    context.
    """
    # Rounded down on purpose: only what is certainly too long is refused here.
    min_num_tokens = num_chars // max_token_chars
    if min_num_tokens >= longest_sequence_tokens:
        raise InvalidRequestError(
            f"{param} has {num_chars} characters, which are at least {min_num_tokens} tokens, but "
            f"the context holds {longest_sequence_tokens} tokens, prompt and output together. "
            "Shorten it.",
            param=param,
            code="context_length_exceeded",
        )


def plan_sequences(
    request_id: str,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    limits: PlanLimits,
    *,
    prompt_param: str,
    random_seed: int,
) -> tuple[SequencePlan, ...]:
    """Return one plan per choice: prompt by prompt, `options.num_choices` of each.

    Choice i of a prompt samples with seed + i. `random_seed` is used when the client gave none;
    it is fixed here so that a resumed sequence samples alike. Raises InvalidRequestError,
    checked for each prompt in this order: empty, token id outside the vocabulary, longer than
    the context, output beyond the context.
    """
    seed = random_seed if options.seed is None else options.seed
    plans: list[SequencePlan] = []
    for number, prompt in enumerate(prompts):
        param = prompt_param if len(prompts) == 1 else f"{prompt_param}[{number}]"
        max_output_tokens = _check_prompt(prompt, options, limits, param)
        for choice in range(options.num_choices):
            plan = SequencePlan(
                sequence_id=f"{request_id}-{len(plans)}",
                prompt_token_ids=tuple(prompt),
                max_output_tokens=max_output_tokens,
                temperature=options.temperature,
                top_p=options.top_p,
                top_k=options.top_k,
                seed=(seed + choice) % _SEED_LIMIT,
                stop_token_ids=() if options.ignore_eos else limits.eos_token_ids,
                ignore_eos=options.ignore_eos,
            )
            plans.append(plan)
    return tuple(plans)


def _check_prompt(
    prompt: Sequence[int], options: GenerationOptions, limits: PlanLimits, param: str
) -> int:
    """Return how many tokens may be generated after `prompt`."""
    if not prompt:
        raise InvalidRequestError(f"{param} has no tokens. Send some text.", param=param)
    largest_id = max(prompt)
    if largest_id >= limits.vocab_size:
        raise InvalidRequestError(
            f"{param} holds token id {largest_id}, but the vocabulary ends at "
            f"{limits.vocab_size - 1}.",
            param=param,
        )
    num_prompt_tokens, longest = len(prompt), limits.longest_sequence_tokens
    # One token must be left: an answer has at least one.
    if num_prompt_tokens >= longest:
        raise InvalidRequestError(
            f"{param} has {num_prompt_tokens} tokens, but the context holds {longest} tokens, "
            "prompt and output together. Shorten it.",
            param=param,
            code="context_length_exceeded",
        )
    room_tokens = longest - num_prompt_tokens
    wanted = options.max_output_tokens
    if wanted is None:
        return min(limits.default_max_output_tokens, room_tokens)
    if wanted > room_tokens:
        name = options.max_output_tokens_param
        raise InvalidRequestError(
            f"{name} is {wanted}, but after {num_prompt_tokens} prompt tokens the context of "
            f"{longest} tokens has room for {room_tokens}. Lower {name} or shorten the prompt.",
            param=name,
            code="context_length_exceeded",
        )
    return wanted
