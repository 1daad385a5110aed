"""A client that brings its KV itself: it is asked for it on its own connection."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from kvproto.description import described_geometry
from kvproto.errors import ErrorCode
from kvproto.messages import (
    Abort,
    AbortAck,
    CommitAck,
    Describe,
    Description,
    Finished,
    Heartbeat,
    Message,
    Prefill,
    PrefillWorker,
    Started,
    Tokens,
)
from kvproto.tcp import Peer
from kvproto.tcp_link import Link
from tests.decode_svc import fake_prefill
from tests.decode_svc.conftest import Worker
from tests.decode_svc.fake_prefill import FakePrefill
from tests.reference import greedy_reference

_PROMPT = [(7 * i + 3) % 256 for i in range(40)]
M = TypeVar("M", bound=Message)


@pytest.fixture(scope="module")
def expected(tiny_model_dir: Any) -> list[int]:
    [tokens] = greedy_reference(tiny_model_dir("llama"), [_PROMPT], max_tokens=8)
    return tokens


async def _receive(peer: Peer, kind: type[M], seen: list[Message] | None = None) -> M:
    async with asyncio.timeout(10):
        while True:
            message = await peer.receive()
            if seen is not None:
                seen.append(message)
            if isinstance(message, kind):
                return message


async def test_a_client_is_asked_for_the_kv_and_gets_the_tokens(
    load_engine: Any, start_worker: Any, expected: list[int]
) -> None:
    kv = FakePrefill("client", load_engine(), fake_prefill.good)
    async with start_worker(load_engine(), role="client") as worker:
        await worker.generate("s", _PROMPT, [], kv_from_sender=True)
        request = await _receive(worker.router, Prefill)
        assert request.tokens == _PROMPT[:-1]
        writer = Link(worker.router)
        await writer.send(await kv.push(writer, request))
        seen: list[Message] = []
        finished = await _receive(worker.router, Finished, seen)
        assert isinstance(seen[0], CommitAck)
        assert [t for m in seen if isinstance(m, Tokens) for t in m.tokens] == expected
        assert finished.reason == "length"
        assert finished.timings["prefill_worker"] == "router-under-test"
        await worker.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("behaviour", "code"),
    [
        (fake_prefill.lies_about_digests, ErrorCode.PREFILL_UNAVAILABLE),
        (fake_prefill.leaves_out_a_layer, ErrorCode.PREFILL_UNAVAILABLE),
        (fake_prefill.refuses, ErrorCode.PREFILL_UNAVAILABLE),
    ],
)
async def test_bad_kv_ends_the_sequence_and_frees_everything(
    load_engine: Any, start_worker: Any, behaviour: Any, code: ErrorCode
) -> None:
    kv = FakePrefill("client", load_engine(), behaviour)
    async with start_worker(load_engine(), role="client") as worker:
        await worker.generate("s", _PROMPT, [], kv_from_sender=True)
        request = await _receive(worker.router, Prefill)
        await behaviour(kv, Link(worker.router), request)
        answer = await _until_finished(worker, request)
        assert (answer.reason, answer.code) == ("error", code)
        await worker.assert_nothing_is_left()


async def _until_finished(worker: Worker, request: Prefill) -> Finished:
    """Confirm aborts, as a writer must, until the sequence has ended."""
    async with asyncio.timeout(10):
        while True:
            message = await worker.router.receive()
            if isinstance(message, Abort):
                await worker.router.send(AbortAck(request.sequence_id, request.generation))
            elif isinstance(message, Finished):
                return message


async def test_a_client_that_leaves_in_the_middle_leaves_nothing_behind(
    load_engine: Any, start_worker: Any
) -> None:
    kv = FakePrefill("client", load_engine(), fake_prefill.good)
    async with start_worker(load_engine(), role="client") as worker:
        await worker.generate("s", _PROMPT, [], kv_from_sender=True)
        request = await _receive(worker.router, Prefill)
        await kv.push(Link(worker.router), request, num_layers=2)
        await worker.router.flushed()
        worker.router.abort("the test says so")
        await worker.assert_nothing_is_left()


async def test_only_a_client_brings_kv_itself(load_engine: Any, start_worker: Any) -> None:
    async with start_worker(load_engine()) as worker:
        await worker.generate("s", _PROMPT, [], kv_from_sender=True)
        finished = (await worker.outcomes(1))["s"].finished
        assert finished.code == ErrorCode.MALFORMED
        assert "kv_from_sender" in finished.message


async def test_a_worker_describes_its_kv(load_engine: Any, start_worker: Any) -> None:
    engine = load_engine()
    async with start_worker(engine, role="client") as worker:
        await worker.router.send(Describe())
        answer = await _receive(worker.router, Description)
        assert described_geometry(answer.layers, answer.dtype) == engine.facts.geometry


async def _beats(fake: FakePrefill, peer: Link, request: Prefill) -> None:
    """Wait for longer than the stall limit, with signs of life, then deliver."""
    for _ in range(20):
        await asyncio.sleep(0.1)
        await peer.send(Heartbeat(request.sequence_id, request.generation))
    await fake_prefill.good(fake, peer, request)


async def _beats_for_ever(fake: FakePrefill, peer: Link, request: Prefill) -> None:
    """After STARTED bytes are the only progress."""
    await peer.send(Started(request.sequence_id, request.generation, queue_s=0.0))
    while not fake.count(Abort):
        await peer.send(Heartbeat(request.sequence_id, request.generation))
        await asyncio.sleep(0.05)


async def test_a_heartbeat_keeps_a_waiting_handoff_alive(
    load_engine: Any, start_worker: Any, fake_worker: Any, expected: list[int]
) -> None:
    fake = await fake_worker("slow", _beats)
    async with start_worker(load_engine(), stall_timeout_s=1.5) as worker:
        await worker.generate("s", _PROMPT, [fake.address])
        assert (await worker.outcomes(1))["s"].tokens == expected


async def test_a_heartbeat_does_not_count_once_computing_has_begun(
    load_engine: Any, start_worker: Any, fake_worker: Any
) -> None:
    fake = await fake_worker("stuck", _beats_for_ever)
    async with start_worker(load_engine(), stall_timeout_s=0.4) as worker:
        await worker.generate("s", _PROMPT, [fake.address])
        assert (await worker.outcomes(1))["s"].finished.code == ErrorCode.PREFILL_UNAVAILABLE
        await worker.assert_nothing_is_left()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
async def test_kv_that_travels_in_another_dtype(
    load_engine: Any, start_worker: Callable[..., Any], fake_worker: Any, dtype: str
) -> None:
    fake = await fake_worker("good", fake_prefill.good)
    worker_address: PrefillWorker = fake.address
    async with start_worker(load_engine(), kv_wire_dtype=dtype) as worker:
        await worker.generate("s", _PROMPT, [worker_address])
        finished = (await worker.outcomes(1))["s"].finished
        assert finished.reason == "length"
        nbytes = {"float16": 2 * 32, "bfloat16": 2 * 32, "int8": 32 + 2 * 4}[dtype]
        assert finished.timings["handoff_nbytes"] == 39 * 4 * 2 * nbytes
        assert 0 < float(finished.timings["wire_error"]) < 0.02
        await worker.assert_nothing_is_left()
