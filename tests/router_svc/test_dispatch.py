"""One sequence across workers that die, refuse, or misbehave."""

import asyncio
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproto.errors import ErrorCode
from kvproto.messages import Finished, Tokens
from router_svc.decode_link import WorkerLostError
from router_svc.dispatch import _already_ended, _Progress, _take_tokens
from router_svc.sequence import SequenceEnd, SequencePlan

PLAN = SequencePlan(
    sequence_id="s",
    prompt_token_ids=(5, 6),
    max_output_tokens=4,
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    seed=1,
    stop_token_ids=(2,),
    ignore_eos=False,
)


async def keep_nothing(_token_ids: Any) -> bool:
    return True


async def test_worker_dies_and_another_continues_exactly(
    start_router: Any, cluster: Any, make_client: Any, reply_text: Any
) -> None:
    router = await start_router()
    first = await cluster.add_decode(router, "decode-a", die_after=3)
    second = await cluster.add_decode(router, "decode-b")
    stream = await make_client(router).completions.create(
        model="tiny-chat",
        prompt=[5, 6, 7],
        seed=11,
        stream=True,
        max_tokens=20,
        stream_options={"include_timings": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == reply_text(cluster.reply[:20])
    [before], [after] = first.generates, second.generates
    assert before.tokens == [5, 6, 7]
    assert after.tokens == [5, 6, 7, *cluster.reply[:3]]
    for name in ("num_prompt_tokens", "max_output_tokens", "seed", "temperature", "top_p"):
        assert getattr(after, name) == getattr(before, name)
    assert after.sequence_id != before.sequence_id
    assert chunks[-1].timings["num_resumes"] == 1


async def test_worker_dies_before_the_first_token(
    start_router: Any, cluster: Any, make_client: Any, reply_text: Any
) -> None:
    router = await start_router()
    await cluster.add_decode(router, "decode-a", die_after=0)
    second = await cluster.add_decode(router, "decode-b")
    answer = await make_client(router).completions.create(model="tiny-chat", prompt="x")
    assert answer.choices[0].text == reply_text()
    assert len(second.generates) == 1


async def test_worker_comes_back_in_time(
    start_router: Any, cluster: Any, make_client: Any, reply_text: Any
) -> None:
    router = await start_router()
    first = await cluster.add_decode(router, "decode-a", die_after=2)
    call = asyncio.create_task(
        make_client(router).completions.create(model="tiny-chat", prompt="x")
    )
    await first.wait_for(lambda: first.num_disconnects)
    await cluster.control_of("decode-a").close()
    second = await cluster.add_decode(router, "decode-b")
    assert (await call).choices[0].text == reply_text()
    assert second.generates[0].tokens[-2:] == cluster.reply[:2]


async def test_same_worker_is_dialled_again(
    start_router: Any, cluster: Any, make_client: Any, reply_text: Any
) -> None:
    router = await start_router(lease_s=1.5)
    worker = await cluster.add_decode(router, "decode-a", die_after=2)
    call = asyncio.create_task(
        make_client(router).completions.create(model="tiny-chat", prompt="x")
    )
    await worker.wait_for(lambda: worker.num_disconnects)
    worker.die_after = None
    assert (await call).choices[0].text == reply_text()
    assert len(worker.generates) == 2


@pytest.mark.parametrize("is_stream", [False, True])
async def test_nobody_takes_over(
    start_router: Any, cluster: Any, make_client: Any, is_stream: bool
) -> None:
    router = await start_router(resume_timeout_s=0.3)
    worker = await cluster.add_decode(router, die_after=2)
    worker_control = cluster.control_of("decode-1")
    client = make_client(router)

    async def call() -> None:
        answer = await client.completions.create(model="tiny-chat", prompt="x", stream=is_stream)
        if is_stream:
            [chunk async for chunk in answer]

    task = asyncio.create_task(call())
    await worker.wait_for(lambda: worker.num_disconnects)
    await worker_control.close()
    # Mid-stream the status is out already: the error comes as an event.
    with pytest.raises(openai.APIError, match="no other one took over"):
        await task


async def test_a_prompt_that_kills_workers_is_given_up(
    start_router: Any, cluster: Any, make_client: Any
) -> None:
    router = await start_router(max_resumes=1)
    names = ("decode-a", "decode-b", "decode-c")
    workers = [await cluster.add_decode(router, name, die_after=0) for name in names]
    with pytest.raises(openai.InternalServerError, match="lost 2 decode workers"):
        await make_client(router).completions.create(model="tiny-chat", prompt="x")
    assert sum(len(worker.generates) for worker in workers) == 2


async def test_silent_worker_is_left_when_its_lease_ends(
    start_router: Any, cluster: Any, make_client: Any, reply_text: Any
) -> None:
    router = await start_router(lease_s=1.5)
    first = await cluster.add_decode(router, "decode-a", pause_after=2)
    second = await cluster.add_decode(router, "decode-b")
    call = asyncio.create_task(
        make_client(router).completions.create(model="tiny-chat", prompt="x")
    )
    await first.wait_for(lambda: first.generates)
    cluster.control_of("decode-a").is_renewing = False
    assert (await call).choices[0].text == reply_text()
    assert second.generates[0].tokens[-2:] == cluster.reply[:2]


@pytest.mark.parametrize("code", [ErrorCode.OVERLOADED, ErrorCode.SHUTTING_DOWN])
async def test_refusal_moves_on(
    start_router: Any, cluster: Any, make_client: Any, reply_text: Any, code: ErrorCode
) -> None:
    router = await start_router()
    refusal = Finished("-", "error", code, "not now")
    first = await cluster.add_decode(router, "decode-a", reply=[], end=refusal)
    second = await cluster.add_decode(router, "decode-b")
    answer = await make_client(router).completions.create(model="tiny-chat", prompt="x")
    assert answer.choices[0].text == reply_text()
    assert (len(first.generates), len(second.generates)) == (1, 1)


async def test_refused_by_all(
    start_router: Any, cluster: Any, make_client: Any, overloaded: Finished
) -> None:
    router = await start_router()
    for name in ("decode-a", "decode-b"):
        await cluster.add_decode(router, name, reply=[], end=overloaded)
    with pytest.raises(openai.InternalServerError, match="no room") as info:
        await make_client(router).completions.create(model="tiny-chat", prompt="x")
    assert info.value.status_code == 503
    assert "retry-after" in info.value.response.headers


async def test_drained_mid_stream_goes_on_elsewhere(
    start_router: Any, cluster: Any, make_client: Any, reply_text: Any
) -> None:
    router = await start_router()
    gives_up = Finished("-", "abort", ErrorCode.SHUTTING_DOWN, "drained")
    await cluster.add_decode(router, "decode-a", reply=cluster.reply[:3], end=gives_up)
    second = await cluster.add_decode(router, "decode-b")
    answer = await make_client(router).completions.create(model="tiny-chat", prompt="x")
    assert answer.choices[0].text == reply_text()
    assert second.generates[0].tokens[-3:] == cluster.reply[:3]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ErrorCode.PROMPT_TOO_LONG, 400),
        (ErrorCode.POOL_EXHAUSTED, 400),
        (ErrorCode.PREFILL_UNAVAILABLE, 503),
        (ErrorCode.DEADLINE_EXCEEDED, 504),
        (ErrorCode.INTERNAL, 502),
        (9999, 502),
    ],
)
async def test_worker_errors_have_a_status(
    start_router: Any, cluster: Any, make_client: Any, code: int, status: int
) -> None:
    router = await start_router()
    await cluster.add_decode(router, reply=[], end=Finished("-", "error", code, "because"))
    with pytest.raises(openai.APIStatusError, match="because") as info:
        await make_client(router).completions.create(model="tiny-chat", prompt="x")
    assert info.value.status_code == status


async def test_stream_waits_for_somebody_to_take_over_from_a_drained_worker(
    start_router: Any, cluster: Any, make_client: Any, reply_text: Any, overloaded: Finished
) -> None:
    router = await start_router()
    gives_up = Finished("-", "abort", ErrorCode.SHUTTING_DOWN, "drained")
    first = await cluster.add_decode(router, "decode-a", reply=cluster.reply[:3], end=gives_up)
    call = asyncio.create_task(
        make_client(router).completions.create(model="tiny-chat", prompt="x")
    )
    await first.wait_for(lambda: first.generates)
    await cluster.control_of("decode-a").close()
    second = await cluster.add_decode(router, "decode-b", reply=[], end=overloaded)
    await second.wait_for(lambda: second.generates)
    # It was full; the next time the router asks, it has room.
    second.reply, second.end = cluster.reply, Finished("-", "length")
    assert (await call).choices[0].text == reply_text()
    assert len(second.generates) > 1
    assert second.generates[-1].tokens[-3:] == cluster.reply[:3]


async def test_draining_worker_gets_nothing_new(
    start_router: Any, cluster: Any, make_client: Any, wait_for_workers: Any
) -> None:
    router = await start_router()
    first = await cluster.add_decode(router, "decode-a")
    second = await cluster.add_decode(router, "decode-b")
    control = cluster.control_of("decode-a")
    control.is_draining = True
    await control.renew()
    client = make_client(router)
    await wait_for_workers(router, {"decode-a": "draining", "decode-b": "serving"})
    for _ in range(3):
        await client.completions.create(model="tiny-chat", prompt="x")
    assert (len(first.generates), len(second.generates)) == (0, 3)


async def test_load_is_spread(start_router: Any, cluster: Any, make_client: Any) -> None:
    router = await start_router()
    names = ("decode-a", "decode-b", "decode-c")
    workers = [await cluster.add_decode(router, name, pause_after=1) for name in names]
    client = make_client(router)
    calls = [
        asyncio.create_task(client.completions.create(model="tiny-chat", prompt="x"))
        for _ in range(6)
    ]
    for worker in workers:
        await worker.wait_for(lambda worker=worker: len(worker.generates) == 2)
        worker.resume.set()
    await asyncio.gather(*calls)


async def test_prefill_workers_are_ranked_by_tokens_ahead(
    start_router: Any, cluster: Any, make_client: Any
) -> None:
    router = await start_router()
    for name, num_tokens in (("p-busy", 500), ("p-idle", 0)):
        control = await cluster.add_prefill(router, name)
        control.num_waiting_tokens = num_tokens
        await control.renew()
    worker = await cluster.add_decode(router)
    await make_client(router).completions.create(model="tiny-chat", prompt=[5, 6])
    ranked = [prefill.instance_id for prefill in worker.generates[0].prefill_workers]
    assert ranked == ["p-idle", "p-busy"]


@given(st.lists(st.lists(st.integers(3, 99), min_size=1, max_size=3), max_size=4))
async def test_tokens_are_emitted_once_and_in_order(batches: list[list[int]]) -> None:
    seen: list[int] = []

    async def emit(token_ids: Any) -> bool:
        seen.extend(token_ids)
        return True

    progress = _Progress(PLAN, emit, 0.0)
    for batch in batches:
        message = Tokens("s", len(progress.emitted), batch)
        if len(progress.emitted) + len(batch) > PLAN.max_output_tokens:
            with pytest.raises(WorkerLostError, match="more than 4"):
                await _take_tokens(message, progress)
            break
        assert await _take_tokens(message, progress)
    assert seen == progress.emitted
    for wrong_index in (len(seen) - 1, len(seen) + 1):
        with pytest.raises(WorkerLostError, match="index"):
            await _take_tokens(Tokens("s", wrong_index, [1]), progress)


async def test_a_new_token_forgets_old_failures() -> None:
    progress = _Progress(PLAN, keep_nothing, 0.0, excluded_ids={"a"}, stuck_since=5.0)
    await _take_tokens(Tokens("s", 0, [7]), progress)
    assert (progress.stuck_since, progress.excluded_ids) == (None, set())


@pytest.mark.parametrize(
    ("emitted", "end"),
    [
        ([], None),
        ([3], None),
        ([3, 2], SequenceEnd("stop")),
        ([3, 3, 3, 3], SequenceEnd("length")),
    ],
)
def test_end_that_was_lost_with_the_worker(emitted: list[int], end: SequenceEnd | None) -> None:
    progress = _Progress(PLAN, keep_nothing, 0.0, emitted=emitted)
    assert _already_ended(progress) == end
