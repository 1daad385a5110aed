"""Limits and seeds of sequence plans."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_svc.errors import InvalidRequestError
from router_svc.openai_api import GenerationOptions
from router_svc.request_plan import PlanLimits, check_prompt_chars, plan_sequences
from router_svc.sequence import SequencePlan

LIMITS = PlanLimits(
    longest_sequence_tokens=100,
    default_max_output_tokens=16,
    vocab_size=50,
    eos_token_ids=(2, 3),
)
OPTIONS = GenerationOptions(
    max_output_tokens=None,
    max_output_tokens_param="max_tokens",
    temperature=0.5,
    top_p=0.9,
    top_k=3,
    seed=None,
    num_choices=1,
    stop=(),
    ignore_eos=False,
    is_stream=False,
    include_usage=False,
    include_timings=False,
    return_token_ids=False,
)


def plan(
    prompts: list[list[int]], options: GenerationOptions = OPTIONS, *, seed: int = 7
) -> tuple[SequencePlan, ...]:
    return plan_sequences("id", prompts, options, LIMITS, prompt_param="prompt", random_seed=seed)


def test_plan_carries_everything() -> None:
    assert plan([[5, 6]]) == (
        SequencePlan(
            sequence_id="id-0",
            prompt_token_ids=(5, 6),
            max_output_tokens=16,
            temperature=0.5,
            top_p=0.9,
            top_k=3,
            seed=7,
            stop_token_ids=(2, 3),
            ignore_eos=False,
        ),
    )


def test_choices_of_prompts() -> None:
    plans = plan([[5], [6]], replace(OPTIONS, num_choices=2, seed=2**64 - 1))
    assert [p.sequence_id for p in plans] == ["id-0", "id-1", "id-2", "id-3"]
    assert [p.prompt_token_ids for p in plans] == [(5,), (5,), (6,), (6,)]
    assert [p.seed for p in plans] == [2**64 - 1, 0, 2**64 - 1, 0]


def test_ignore_eos_sends_no_stop_tokens() -> None:
    [only] = plan([[5]], replace(OPTIONS, ignore_eos=True))
    assert (only.ignore_eos, only.stop_token_ids) == (True, ())


@given(st.integers(1, 99), st.none() | st.integers(1, 200))
def test_every_accepted_plan_fits(num_prompt_tokens: int, wanted: int | None) -> None:
    options = replace(OPTIONS, max_output_tokens=wanted)
    room_tokens = LIMITS.longest_sequence_tokens - num_prompt_tokens
    if wanted is not None and wanted > room_tokens:
        with pytest.raises(InvalidRequestError) as info:
            plan([[5] * num_prompt_tokens], options)
        assert info.value.param == "max_tokens"
        return
    [only] = plan([[5] * num_prompt_tokens], options)
    assert only.max_output_tokens == (min(16, room_tokens) if wanted is None else wanted)
    assert only.num_total_tokens <= LIMITS.longest_sequence_tokens


@pytest.mark.parametrize(
    ("prompts", "param", "numbers"),
    [
        ([[]], "prompt", ()),
        ([[5, 50]], "prompt", ("50", "49")),
        ([[5], [5] * 100], "prompt[1]", ("100 tokens",)),
        ([[5] * 101], "prompt", ("101", "100")),
    ],
)
def test_refusals(prompts: list[list[int]], param: str, numbers: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequestError) as info:
        plan(prompts)
    assert info.value.param == param
    assert all(number in info.value.message for number in numbers)


def test_the_limit_goes_by_the_name_the_client_used() -> None:
    options = replace(
        OPTIONS, max_output_tokens=96, max_output_tokens_param="max_completion_tokens"
    )
    with pytest.raises(InvalidRequestError, match="room for 95") as info:
        plan([[5] * 5], options)
    assert info.value.param == "max_completion_tokens"


@pytest.mark.parametrize(("num_chars", "is_refused"), [(0, False), (999, False), (1000, True)])
def test_only_texts_that_are_certainly_too_long(num_chars: int, is_refused: bool) -> None:
    if not is_refused:
        check_prompt_chars(num_chars, 10, 100, param="prompt")
        return
    with pytest.raises(InvalidRequestError, match="at least 100 tokens") as info:
        check_prompt_chars(num_chars, 10, 100, param="prompt")
    assert info.value.param == "prompt"
