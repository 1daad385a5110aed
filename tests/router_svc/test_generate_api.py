"""Answers of a router with fake workers, seen by OpenAI's own client."""

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest

from kvproto.messages import Finished

USER = [{"role": "user", "content": "hello world"}]


async def test_chat(start_router: Any, cluster: Any, make_client: Any, reply_text: Any) -> None:
    router = await start_router()
    worker = await cluster.add_decode(router)
    answer = await make_client(router).chat.completions.create(model="tiny-chat", messages=USER)
    assert answer.object == "chat.completion"
    assert answer.model == "tiny-chat"
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", reply_text())
    assert choice.finish_reason == "length"
    [generate] = worker.generates
    assert answer.usage.prompt_tokens == len(generate.tokens) == generate.num_prompt_tokens
    assert answer.usage.completion_tokens == len(cluster.reply)
    assert answer.usage.total_tokens == len(generate.tokens) + len(cluster.reply)


async def test_chat_prompt_is_the_rendered_template(
    start_router: Any, cluster: Any, make_client: Any, tokenizer: Any
) -> None:
    router = await start_router()
    worker = await cluster.add_decode(router)
    await make_client(router).chat.completions.create(model="tiny-chat", messages=USER)
    text = "<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\n"
    assert worker.generates[0].tokens == tokenizer.encode_text(text)


async def test_stream(start_router: Any, cluster: Any, make_client: Any, reply_text: Any) -> None:
    router = await start_router()
    await cluster.add_decode(router)
    stream = await make_client(router).chat.completions.create(
        model="tiny-chat", messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == reply_text()
    assert "\ufffd" not in text
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) == {None}
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(cluster.reply)


async def test_stream_without_usage_has_none(
    start_router: Any, cluster: Any, make_client: Any
) -> None:
    router = await start_router()
    await cluster.add_decode(router)
    stream = await make_client(router).completions.create(
        model="tiny-chat", prompt="the cat", stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


async def test_completion_stream_equals_whole(
    start_router: Any, cluster: Any, make_client: Any, reply_text: Any
) -> None:
    router = await start_router()
    await cluster.add_decode(router)
    client = make_client(router)
    stream = await client.completions.create(model="tiny-chat", prompt="the cat", stream=True)
    streamed = "".join([chunk.choices[0].text async for chunk in stream])
    whole = await client.completions.create(model="tiny-chat", prompt="the cat")
    assert whole.object == "text_completion"
    assert streamed == whole.choices[0].text == reply_text()


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3, 100])
async def test_stop_string_across_chunks(
    start_router: Any,
    cluster: Any,
    make_client: Any,
    reply_text: Any,
    tokenizer: Any,
    batch_size: int,
    is_stream: bool,
) -> None:
    router = await start_router()
    worker = await cluster.add_decode(router, batch_size=batch_size)
    text = reply_text()
    # From inside one token to inside another, so that no piece alone holds the stop string.
    stop = text[text.index("wörld") + 1 : text.index("the cat") + 2]
    num_tokens = next(
        count
        for count in range(1, len(cluster.reply))
        if stop in tokenizer.detokenize(cluster.reply[:count])
    )
    expected = text[: text.index(stop)]
    arguments: dict[str, Any] = {"model": "tiny-chat", "messages": USER, "stop": ["never", stop]}
    client = make_client(router)
    if is_stream:
        stream = await client.chat.completions.create(
            **arguments, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        shown = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
        reason, usage = chunks[-2].choices[0].finish_reason, chunks[-1].usage
    else:
        answer = await client.chat.completions.create(**arguments)
        shown, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
        usage = answer.usage
    assert (shown, reason) == (expected, "stop")
    # Tokens after the stop string are not the client's, however the worker batched them.
    assert usage.completion_tokens == num_tokens
    await worker.wait_for(lambda: worker.aborts)


async def test_eos_ends_the_text_and_counts(
    start_router: Any, cluster: Any, make_client: Any, tokenizer: Any
) -> None:
    router = await start_router()
    reply = [*tokenizer.encode_text("the cat"), 2]
    await cluster.add_decode(router, reply=reply, end=Finished("-", "stop"))
    answer = await make_client(router).completions.create(
        model="tiny-chat", prompt="x", extra_body={"return_token_ids": True}
    )
    assert answer.choices[0].text == "the cat"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].token_ids == reply
    assert answer.usage.completion_tokens == len(reply)


async def test_n_choices_have_their_own_sequences_and_seeds(
    start_router: Any, cluster: Any, make_client: Any, reply_text: Any
) -> None:
    router = await start_router()
    worker = await cluster.add_decode(router)
    answer = await make_client(router).chat.completions.create(
        model="tiny-chat", messages=USER, n=2, seed=40
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert {choice.message.content for choice in answer.choices} == {reply_text()}
    assert sorted(generate.seed for generate in worker.generates) == [40, 41]
    assert len({generate.sequence_id for generate in worker.generates}) == 2
    prompt_tokens = worker.generates[0].num_prompt_tokens
    assert answer.usage.prompt_tokens == prompt_tokens
    assert answer.usage.completion_tokens == 2 * len(cluster.reply)


async def test_n_choices_stream_side_by_side(
    start_router: Any, cluster: Any, make_client: Any, reply_text: Any
) -> None:
    router = await start_router()
    await cluster.add_decode(router)
    stream = await make_client(router).chat.completions.create(
        model="tiny-chat", messages=USER, n=3, stream=True
    )
    texts = ["", "", ""]
    reasons: list[str | None] = [None, None, None]
    async for chunk in stream:
        [choice] = chunk.choices
        assert reasons[choice.index] is None
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason
    assert texts == [reply_text()] * 3
    assert reasons == ["length"] * 3


@pytest.mark.parametrize(
    "prompt", [["the cat", "the dog"], [[5, 6, 7], [8, 9]]], ids=["texts", "token ids"]
)
async def test_list_of_prompts(
    start_router: Any, cluster: Any, make_client: Any, tokenizer: Any, prompt: list[Any]
) -> None:
    router = await start_router()
    worker = await cluster.add_decode(router)
    answer = await make_client(router).completions.create(
        model="tiny-chat", prompt=prompt, n=2, extra_body={"return_token_ids": True}
    )
    expected = [tokenizer.encode_text(p) if isinstance(p, str) else p for p in prompt]
    assert [choice.prompt_token_ids for choice in answer.choices] == [
        expected[0],
        expected[0],
        expected[1],
        expected[1],
    ]
    assert answer.usage.prompt_tokens == sum(len(p) for p in expected)
    assert len({generate.sequence_id for generate in worker.generates}) == 4


async def test_token_ids_and_timings(start_router: Any, cluster: Any, make_client: Any) -> None:
    router = await start_router()
    worker = await cluster.add_decode(router)
    client = make_client(router)
    extra = {"return_token_ids": True, "include_timings": True}
    answer = await client.chat.completions.create(
        model="tiny-chat", messages=USER, extra_body=extra
    )
    assert answer.choices[0].token_ids == cluster.reply
    assert answer.prompt_token_ids == worker.generates[0].tokens
    timings = answer.timings
    assert timings["decode_s"] == 0.5
    assert timings["carrier"] == "local"
    assert timings["num_output_tokens"] == len(cluster.reply)
    assert 0 < timings["ttft_s"] <= timings["e2e_s"]
    assert timings["itl_s"]["num"] == len(cluster.reply) - 1

    stream = await client.chat.completions.create(
        model="tiny-chat",
        messages=USER,
        stream=True,
        stream_options={"include_timings": True},
        extra_body={"return_token_ids": True},
    )
    chunks = [chunk async for chunk in stream]
    token_ids = [
        token_id
        for chunk in chunks
        for choice in chunk.choices
        for token_id in getattr(choice, "token_ids", [])
    ]
    assert token_ids == cluster.reply
    with_prompt = [chunk for chunk in chunks if hasattr(chunk, "prompt_token_ids")]
    assert [chunk.prompt_token_ids for chunk in with_prompt] == [worker.generates[1].tokens]
    assert chunks[-1].timings["decode_s"] == 0.5
    assert chunks[-1].usage is None


async def test_timings_of_several_choices_are_a_list(
    start_router: Any, cluster: Any, make_client: Any
) -> None:
    router = await start_router()
    await cluster.add_decode(router)
    answer = await make_client(router).completions.create(
        model="tiny-chat", prompt="x", n=2, extra_body={"include_timings": True}
    )
    assert [timings["carrier"] for timings in answer.timings] == ["local", "local"]


async def test_sampling_fields_reach_the_worker(
    start_router: Any, cluster: Any, make_client: Any
) -> None:
    router = await start_router()
    await cluster.add_prefill(router)
    worker = await cluster.add_decode(router)
    client = make_client(router)
    await client.completions.create(
        model="tiny-chat",
        prompt=[5, 6],
        max_tokens=3,
        temperature=0.25,
        top_p=0.5,
        seed=-1,
        extra_body={"top_k": 7, "ignore_eos": True},
    )
    await client.completions.create(model="tiny-chat", prompt=[5, 6])
    first, second = worker.generates
    assert (first.temperature, first.top_p, first.top_k) == (0.25, 0.5, 7)
    # Negative seeds are OpenAI's, the wire's are unsigned.
    assert first.seed == 2**64 - 1
    assert (first.max_output_tokens, first.ignore_eos, first.stop_token_ids) == (3, True, [])
    assert [worker.instance_id for worker in first.prefill_workers] == ["prefill-1"]
    assert 0 < first.timeout_s <= 600
    assert (second.temperature, second.top_p, second.top_k) == (1.0, 1.0, 0)
    assert (second.max_output_tokens, second.ignore_eos) == (254, False)
    assert second.stop_token_ids == [2]


async def test_random_seeds_differ(start_router: Any, cluster: Any, make_client: Any) -> None:
    router = await start_router()
    worker = await cluster.add_decode(router)
    for _ in range(2):
        await make_client(router).completions.create(model="tiny-chat", prompt="x")
    assert worker.generates[0].seed != worker.generates[1].seed


async def test_default_max_tokens(start_router: Any, cluster: Any, make_client: Any) -> None:
    router = await start_router(default_max_tokens=4)
    await cluster.add_decode(router)
    answer = await make_client(router).completions.create(model="tiny-chat", prompt="x")
    assert answer.usage.completion_tokens == 4


@pytest.mark.parametrize("is_stream", [False, True])
async def test_disconnect_aborts_every_sequence(
    start_router: Any,
    cluster: Any,
    make_client: Any,
    caplog: pytest.LogCaptureFixture,
    is_stream: bool,
) -> None:
    router = await start_router()
    worker = await cluster.add_decode(router, pause_after=2)
    client = make_client(router)
    call = asyncio.create_task(
        client.chat.completions.create(model="tiny-chat", messages=USER, n=2, stream=is_stream)
    )
    if is_stream:
        stream = await call
        await anext(aiter(stream))
    await worker.wait_for(lambda: len(worker.generates) == 2)
    if is_stream:
        await stream.close()
    else:
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    await worker.wait_for(lambda: len(worker.aborts) == 2)
    assert {abort.sequence_id for abort in worker.aborts} == {
        generate.sequence_id for generate in worker.generates
    }
    assert {abort.generation for abort in worker.aborts} == {0}
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_error_after_the_first_token_is_an_event(
    start_router: Any, cluster: Any, make_client: Any
) -> None:
    router = await start_router()
    await cluster.add_decode(router, end=Finished("-", "error", 1, "the engine broke"))
    stream = await make_client(router).chat.completions.create(
        model="tiny-chat", messages=USER, stream=True
    )
    with pytest.raises(openai.APIError, match="the engine broke"):
        [chunk async for chunk in stream]


async def test_error_before_the_first_token_is_a_status(
    start_router: Any, cluster: Any, make_client: Any
) -> None:
    router = await start_router()
    await cluster.add_decode(router, reply=[], end=Finished("-", "error", 1, "the engine broke"))
    with pytest.raises(openai.InternalServerError, match="the engine broke") as info:
        await make_client(router).chat.completions.create(
            model="tiny-chat", messages=USER, stream=True
        )
    assert info.value.status_code == 502


async def test_request_deadline(start_router: Any, cluster: Any, make_client: Any) -> None:
    router = await start_router(request_timeout_s=0.3)
    worker = await cluster.add_decode(router, pause_after=1)
    with pytest.raises(openai.InternalServerError) as info:
        await make_client(router).completions.create(model="tiny-chat", prompt="x")
    assert info.value.status_code == 504
    assert info.value.code == "deadline_exceeded"
    await worker.wait_for(lambda: worker.aborts)


async def test_first_token_deadline(start_router: Any, cluster: Any, make_client: Any) -> None:
    router = await start_router(first_token_timeout_s=0.2)
    worker = await cluster.add_decode(router, pause_after=0)
    with pytest.raises(openai.InternalServerError, match="first_token_timeout_s") as info:
        await make_client(router).completions.create(model="tiny-chat", prompt="x")
    assert info.value.status_code == 504
    await worker.wait_for(lambda: worker.aborts)


async def test_full_router_refuses(start_router: Any, cluster: Any, make_client: Any) -> None:
    router = await start_router(max_requests=1)
    worker = await cluster.add_decode(router, pause_after=1)
    client = make_client(router)
    first = asyncio.create_task(client.completions.create(model="tiny-chat", prompt="x"))
    await worker.wait_for(lambda: worker.generates)
    with pytest.raises(openai.RateLimitError) as info:
        await client.completions.create(model="tiny-chat", prompt="x")
    assert info.value.response.headers["retry-after"] == "1"
    worker.resume.set()
    assert (await first).choices[0].finish_reason == "length"
    await client.completions.create(model="tiny-chat", prompt="x")


async def test_no_workers(start_router: Any, make_client: Any) -> None:
    router = await start_router()
    with pytest.raises(openai.InternalServerError) as info:
        await make_client(router).completions.create(model="tiny-chat", prompt="x")
    assert info.value.status_code == 503
    assert info.value.response.headers["retry-after"] == "1"


BadCall = Callable[[openai.AsyncOpenAI], Any]


@pytest.mark.parametrize(
    ("arguments", "param", "numbers"),
    [
        ({"prompt": [5] * 256}, "prompt", ("256 tokens", "256 tokens")),
        ({"prompt": ["a", [5] * 300]}, "prompt[1]", ()),
        ({"prompt": [[5], [6] * 300]}, "prompt[1]", ("300", "256")),
        ({"prompt": [5] * 250, "max_tokens": 7}, "max_tokens", ("7", "250", "256", "6")),
        ({"prompt": [5, 4000]}, "prompt", ("4000",)),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens", ("-1",)),
        ({"prompt": "x", "temperature": 5}, "temperature", ("5",)),
        ({"prompt": ""}, "prompt", ()),
        ({"prompt": "x", "echo": True}, "echo", ()),
        ({"prompt": "x", "logprobs": 2}, "logprobs", ()),
        ({"prompt": "x", "extra_body": {"kv_transfer_params": {}}}, "kv_transfer_params", ()),
    ],
)
async def test_bad_completion_names_the_field(
    start_router: Any,
    cluster: Any,
    make_client: Any,
    arguments: dict[str, Any],
    param: str,
    numbers: tuple[str, ...],
) -> None:
    router = await start_router()
    worker = await cluster.add_decode(router)
    with pytest.raises(openai.BadRequestError) as info:
        await make_client(router).completions.create(model="tiny-chat", **arguments)
    assert info.value.param == param
    assert all(number in info.value.message for number in numbers)
    assert worker.generates == []


async def test_long_chat_names_messages_and_both_numbers(
    start_router: Any, cluster: Any, make_client: Any, tokenizer: Any
) -> None:
    router = await start_router()
    await cluster.add_decode(router)
    messages = [{"role": "user", "content": "the cat " * 200}]
    with pytest.raises(openai.BadRequestError, match="256 tokens") as info:
        await make_client(router).chat.completions.create(model="tiny-chat", messages=messages)
    assert info.value.param == "messages"
    assert info.value.code == "context_length_exceeded"


async def test_hopeless_prompt_is_not_tokenised(
    start_router: Any, cluster: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = await start_router()
    await cluster.add_decode(router)
    monkeypatch.setattr("router_svc.tokenizer.Tokenizer.encode_text", None)
    monkeypatch.setattr("router_svc.tokenizer.Tokenizer.encode_chat", None)
    client = make_client(router)
    messages = [{"role": "user", "content": "x" * 3_000_000}]
    with pytest.raises(openai.BadRequestError, match="3000000 characters") as info:
        await client.chat.completions.create(model="tiny-chat", messages=messages)
    assert info.value.param == "messages"
    with pytest.raises(openai.BadRequestError, match="256 tokens") as info:
        await client.completions.create(model="tiny-chat", prompt=["a", "x" * 3_000_000])
    assert info.value.param == "prompt[1]"


async def test_lengths_at_the_limit_pass(start_router: Any, cluster: Any, make_client: Any) -> None:
    router = await start_router()
    worker = await cluster.add_decode(router)
    client = make_client(router)
    await client.completions.create(model="tiny-chat", prompt=[5] * 255)
    await client.completions.create(model="tiny-chat", prompt=[5] * 250, max_tokens=6)
    assert [generate.max_output_tokens for generate in worker.generates] == [1, 6]


async def test_pool_of_the_largest_worker_is_the_context(
    start_router: Any, cluster: Any, make_client: Any
) -> None:
    router = await start_router()
    await cluster.add_decode(router, "small", num_blocks=1)
    large = await cluster.add_decode(router, "large", num_blocks=4)
    client = make_client(router)
    with pytest.raises(openai.BadRequestError, match="64 tokens"):
        await client.completions.create(model="tiny-chat", prompt=[5] * 64)
    await client.completions.create(model="tiny-chat", prompt=[5] * 20)
    assert len(large.generates) == 1


async def test_unknown_model(start_router: Any, cluster: Any, make_client: Any) -> None:
    router = await start_router()
    await cluster.add_decode(router)
    with pytest.raises(openai.NotFoundError) as info:
        await make_client(router).completions.create(model="gpt-9", prompt="x")
    assert (info.value.param, info.value.code) == ("model", "model_not_found")


async def test_models(start_router: Any, cluster: Any, make_client: Any) -> None:
    router = await start_router(served_model_name="org/tiny")
    client = make_client(router)
    models = await client.models.list()
    assert [model.id for model in models.data] == ["org/tiny"]
    assert (await client.models.retrieve("org/tiny")).id == "org/tiny"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")
    await cluster.add_decode(router, num_blocks=4)
    assert (await client.models.list()).data[0].max_model_len == 64
