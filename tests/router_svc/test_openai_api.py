"""Request bodies: what is accepted, and what is refused by name."""

from typing import Any

import pytest

from router_svc.errors import InvalidRequestError
from router_svc.openai_api import (
    ChatMessage,
    GenerationOptions,
    parse_chat_request,
    parse_completion_request,
)

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "hi"}
DEFAULTS = GenerationOptions(
    max_output_tokens=None,
    max_output_tokens_param="max_tokens",
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    seed=None,
    num_choices=1,
    stop=(),
    ignore_eos=False,
    is_stream=False,
    include_usage=False,
    include_timings=False,
    return_token_ids=False,
)


def refuse_chat(**fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as info:
        parse_chat_request(CHAT | fields)
    return info.value


def refuse_text(**fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as info:
        parse_completion_request(TEXT | fields)
    return info.value


def test_smallest_bodies() -> None:
    chat = parse_chat_request(CHAT)
    assert (chat.model, chat.messages) == ("m", (ChatMessage("user", "hi"),))
    assert chat.options == DEFAULTS
    text = parse_completion_request(TEXT)
    assert (text.model, text.prompts, text.options) == ("m", ("hi",), DEFAULTS)


def test_every_option() -> None:
    options = parse_chat_request(
        CHAT
        | {
            "max_completion_tokens": 7,
            "temperature": 0,
            "top_p": 0.5,
            "top_k": 4,
            "seed": -3,
            "n": 2,
            "stop": ["a", "b", "a"],
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "include_timings": True},
            "return_token_ids": True,
        }
    ).options
    assert options == GenerationOptions(
        max_output_tokens=7,
        max_output_tokens_param="max_completion_tokens",
        temperature=0.0,
        top_p=0.5,
        top_k=4,
        seed=-3,
        num_choices=2,
        stop=("a", "b"),
        ignore_eos=True,
        is_stream=True,
        include_usage=True,
        include_timings=True,
        return_token_ids=True,
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("max_tokens", 1.5),
        ("max_tokens", "9"),
        ("max_completion_tokens", -1),
        ("temperature", 5),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", 10**400),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 2**40),
        ("seed", 2**63),
        ("seed", 1.0),
        ("n", 0),
        ("n", 9),
        ("stop", []),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["x" * 257]),
        ("stop", 3),
        ("stop", "\ud800"),
        ("stream", "yes"),
        ("ignore_eos", 1),
        ("return_token_ids", []),
        ("stream_options", {"include_usage": True}),
        ("stream_options", []),
        ("model", ""),
        ("model", None),
        ("model", 3),
        ("messages", []),
        ("messages", None),
        ("messages", "hi"),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("response_format", {"type": "json_object"}),
        ("logit_bias", {"5": 1}),
        ("presence_penalty", 0.1),
        ("frequency_penalty", -1),
        ("logprobs", True),
        ("top_logprobs", 2),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("reasoning_effort", "low"),
        ("kv_transfer_params", {"remote_host": "198.51.100.1"}),
        ("kv_transfer_params", {}),
        ("prompt", "hi"),
    ],
)
def test_chat_field_refused_by_name(field: str, value: object) -> None:
    error = refuse_chat(**{field: value})
    assert error.param == field
    assert field in error.message
    assert error.http_status == 400


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", None),
        ("prompt", ""),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", {"a": 1}),
        ("prompt", [True]),
        ("prompt", [-1]),
        ("prompt", [2**32]),
        ("prompt", [1, "a"]),
        ("prompt", "\udfff"),
        ("prompt", ["x"] * 65),
        ("echo", True),
        ("logprobs", 0),
        ("best_of", 2),
        ("suffix", "end"),
        ("messages", []),
        ("max_completion_tokens", 3),
    ],
)
def test_completion_field_refused_by_name(field: str, value: object) -> None:
    error = refuse_text(**{field: value})
    assert error.param is not None
    assert error.param.startswith(field)


def test_a_prompt_of_a_list_is_named_with_its_place() -> None:
    assert refuse_text(prompt=["a", ""]).param == "prompt[1]"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_prompt_forms(prompt: object, expected: object) -> None:
    assert parse_completion_request(TEXT | {"prompt": prompt}).prompts == expected


def test_prompts_times_n_is_bounded() -> None:
    parse_completion_request(TEXT | {"prompt": ["a"] * 8, "n": 8})
    assert refuse_text(prompt=["a"] * 9, n=8).param == "prompt"


@pytest.mark.parametrize(
    "field",
    [
        {"user": "u"},
        {"metadata": {"a": "b"}},
        {"store": True},
        {"service_tier": "auto"},
        {"parallel_tool_calls": True},
        {"tools": []},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"logit_bias": {}},
        {"presence_penalty": 0},
        {"frequency_penalty": 0.0},
        {"logprobs": False},
        {"top_logprobs": 0},
        {"modalities": ["text"]},
        {"seed": None, "stop": None, "temperature": None, "stream_options": None, "n": None},
        {"top_k": -1},
    ],
)
def test_harmless_fields_change_nothing(field: dict[str, Any]) -> None:
    assert parse_chat_request(CHAT | field).options == DEFAULTS


def test_unknown_field_names_the_nearest() -> None:
    error = refuse_chat(temprature=1)
    assert error.param == "temprature"
    assert "'temperature'" in error.message
    assert error.code == "unknown_field"


def test_stream_options_are_checked() -> None:
    error = refuse_chat(stream=True, stream_options={"include_usages": True})
    assert error.param == "stream_options.include_usages"
    error = refuse_chat(stream=True, stream_options={"include_usage": 1})
    assert error.param == "stream_options.include_usage"


def test_both_limits_must_agree() -> None:
    assert refuse_chat(max_tokens=3, max_completion_tokens=4).param == "max_tokens"
    agreed = parse_chat_request(CHAT | {"max_tokens": 3, "max_completion_tokens": 3})
    assert agreed.options.max_output_tokens == 3


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[0]"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "wizard", "content": "x"}, "messages[0].role"),
        ({"role": "tool", "content": "x"}, "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "user", "content": "\ud800"}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "assistant", "content": "x", "tool_calls": [1]}, "messages[0].tool_calls"),
        ({"role": "user", "content": "x", "colour": 1}, "messages[0].colour"),
        ({"role": "user", "content": "x", "name": 1}, "messages[0].name"),
    ],
)
def test_bad_message_names_its_place(message: object, param: str) -> None:
    assert refuse_chat(messages=[message]).param == param


def test_messages_keep_their_text() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "", "refusal": None},
        {"role": "user", "content": "c", "name": "eve"},
    ]
    assert parse_chat_request(CHAT | {"messages": messages}).messages == (
        ChatMessage("system", "be brief"),
        ChatMessage("user", "ab"),
        ChatMessage("assistant", ""),
        ChatMessage("user", "c", "eve"),
    )
