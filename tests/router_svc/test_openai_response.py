"""Bodies and chunks, field by field."""

import json
from collections.abc import Sequence
from dataclasses import replace

from router_svc.choice_stream import ChoiceStream, Delta
from router_svc.openai_response import AnswerShape, Usage, sse_event, timings_json
from router_svc.sequence import SequenceEnd

CHAT = AnswerShape(
    is_chat=True,
    response_id="chatcmpl-1",
    created_at_unix_s=5,
    model="m",
    prompts=((1, 2),),
    num_choices=1,
    has_token_ids=False,
)
TEXT = replace(CHAT, is_chat=False, response_id="cmpl-1")
ENVELOPE = {"id": "chatcmpl-1", "created": 5, "model": "m"}
USAGE = Usage(num_prompt_tokens=2, num_output_tokens=3)
USAGE_JSON = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


def detokenize(token_ids: Sequence[int]) -> str:
    return bytes(token_ids).decode("utf-8", "replace")


def make_choice(index: int = 0) -> ChoiceStream:
    choice = ChoiceStream(index, detokenize, stop=(), hidden_token_ids=(), arrived_at=0.0)
    choice.push(b"abc", 1.0)
    choice.finish(SequenceEnd("stop"))
    return choice


def test_chat_body() -> None:
    assert CHAT.body([make_choice()], USAGE, has_timings=False) == ENVELOPE | {
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "abc", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE_JSON,
    }


def test_text_body_with_extensions() -> None:
    choice = make_choice()
    shape = replace(TEXT, has_token_ids=True)
    body = shape.body([choice], USAGE, has_timings=True)
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == "abc"
    assert body["choices"][0]["token_ids"] == [97, 98, 99]
    assert body["prompt_token_ids"] == [1, 2]
    assert body["timings"] == choice.timings


def test_several_prompts_are_told_by_their_choices() -> None:
    shape = replace(TEXT, prompts=((1,), (2,)), num_choices=2, has_token_ids=True)
    choices = [make_choice(index) for index in range(4)]
    body = shape.body(choices, USAGE, has_timings=False)
    assert "prompt_token_ids" not in body
    assert [c["prompt_token_ids"] for c in body["choices"]] == [[1], [1], [2], [2]]
    first = shape.delta_chunk(Delta(2, "a", (97,), is_first=True))
    later = shape.delta_chunk(Delta(2, "b", (98,), is_first=False))
    assert first["choices"][0]["prompt_token_ids"] == [2]
    assert "prompt_token_ids" not in first
    assert "prompt_token_ids" not in later["choices"][0]


def test_chat_chunks() -> None:
    kind = {"object": "chat.completion.chunk"}
    assert CHAT.role_chunk(1) == ENVELOPE | kind | {
        "choices": [
            {
                "index": 1,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        ]
    }
    delta = CHAT.delta_chunk(Delta(1, "a", (97,), is_first=True))
    assert delta["choices"] == [
        {"index": 1, "delta": {"content": "a"}, "logprobs": None, "finish_reason": None}
    ]
    last = CHAT.delta_chunk(Delta(1, "", (), is_first=False, finish_reason="stop"))
    assert last["choices"] == [{"index": 1, "delta": {}, "logprobs": None, "finish_reason": "stop"}]


def test_text_chunks() -> None:
    shape = replace(TEXT, has_token_ids=True)
    chunk = shape.delta_chunk(Delta(0, "a", (97,), is_first=True))
    assert chunk["object"] == "text_completion"
    assert chunk["prompt_token_ids"] == [1, 2]
    assert chunk["choices"][0]["text"] == "a"
    assert chunk["choices"][0]["token_ids"] == [97]


def test_closing_chunk_has_what_was_asked_for() -> None:
    choice = make_choice()
    both = CHAT.closing_chunk([choice], USAGE, has_timings=True)
    assert (both["choices"], both["usage"], both["timings"]) == ([], USAGE_JSON, choice.timings)
    assert "usage" not in CHAT.closing_chunk([choice], None, has_timings=True)
    assert "timings" not in TEXT.closing_chunk([choice], USAGE, has_timings=False)


def test_timings_of_several_choices() -> None:
    choices = [make_choice(0), make_choice(1)]
    assert timings_json(choices) == [choices[0].timings, choices[1].timings]


def test_event_is_one_line_of_utf8() -> None:
    event = sse_event({"text": "ä\n\u2028🎉"})
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    assert "ä".encode() in event
    assert json.loads(event.removeprefix(b"data: ")) == {"text": "ä\n\u2028🎉"}
