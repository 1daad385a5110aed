from aiohttp import web

from tests.ops.fake_router import FakeRouter, stream_of, text_chunk


def serve_answer(router: FakeRouter, *pieces: str) -> None:
    chunks = [*(text_chunk(piece) for piece in pieces), text_chunk("", "stop")]
    closing = {"choices": [], "usage": {}, "timings": {"ttft_s": 0.5, "e2e_s": 0.5}}
    router.answers["/v1/models"] = lambda _: web.json_response({"data": [{"id": "m"}]})
    router.answers["/v1/chat/completions"] = stream_of([*chunks, closing])


async def test_one_question_is_answered_on_stdout(fake_router: FakeRouter) -> None:
    serve_answer(fake_router, "Hel", "lo.")
    result = await fake_router.pdctl("chat", "--url", fake_router.url, "--max-tokens", "5", "Hi?")
    assert (result.returncode, result.stdout, result.stderr) == (0, "Hello.\n", "")
    [body] = fake_router.bodies
    assert body["messages"] == [{"role": "user", "content": "Hi?"}]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 5, 0.0)


async def test_timings_on_request(fake_router: FakeRouter) -> None:
    serve_answer(fake_router, "Hello.")
    result = await fake_router.pdctl("chat", "--url", fake_router.url, "--timings", "Hi?")
    assert "TTFT                      500.0 ms" in result.stdout


async def test_a_conversation_remembers(fake_router: FakeRouter) -> None:
    serve_answer(fake_router, "Hello.")
    result = await fake_router.pdctl("chat", "--url", fake_router.url, typed="One?\n\nTwo?\n")
    assert (result.returncode, result.stdout) == (0, "Hello.\nHello.\n")
    assert [message["content"] for message in fake_router.bodies[1]["messages"]] == [
        *("One?", "Hello.", "Two?")
    ]


async def test_an_empty_question_is_refused(fake_router: FakeRouter) -> None:
    result = await fake_router.pdctl("chat", "--url", fake_router.url, " ")
    assert (result.returncode, result.stderr) == (1, "The question is empty.\n")


async def test_nothing_listening_is_one_sentence(fake_router: FakeRouter, closed_url: str) -> None:
    result = await fake_router.pdctl("chat", "--url", closed_url, "Hi?")
    assert result.returncode == 1
    assert result.stderr.startswith(f"Nothing is listening at {closed_url}; start")
    assert result.stderr.count("\n") == 1
