"""The raw client of a prefill worker, over real sockets."""

import asyncio
import errno
import os
import threading
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest

from kvproto.client import KvFile, PrefillClient
from kvproto.errors import (
    ConnectionLost,
    DeadlineExceeded,
    DigestMismatch,
    ErrorCode,
    KvFileError,
    LeaseError,
    LocalProtocolError,
    PeerError,
)
from kvproto.geometry import KvGeometry, Layer, Region
from kvproto.header import HOST_ORDER, ByteOrder
from kvproto.messages import Abort, AbortAck, Commit, Error, Heartbeat, Started
from kvproto.tcp import TcpWriter

TOKENS = [5, 3, 8, 1, 9, 2, 7]
pytestmark = pytest.mark.timeout(30)


def client_of(worker, **options):
    return PrefillClient("127.0.0.1", worker.port, **options)


async def test_the_kv_of_a_prompt_comes_as_it_was_computed(prefill_worker, compute):
    async with client_of(prefill_worker) as client:
        description = await client.describe()
        cache = await client.prefill(TOKENS, next_tokens=[4])
    expected = compute(prefill_worker.geometry, TOKENS)
    assert cache.memory == expected.memory
    assert cache.digests() == expected.digests()
    assert (cache.tokens, cache.next_tokens) == (tuple(TOKENS), (4,))
    assert (cache.model, description.model, description.max_model_len) == ("tiny", "tiny", 99)
    assert cache.facts == dict(prefill_worker.identity.facts)
    assert prefill_worker.acknowledged == [prefill_worker.requests[0].sequence_id]
    assert prefill_worker.aborted == []


async def test_progress_counts_bytes(prefill_worker):
    seen = []
    async with client_of(prefill_worker) as client:
        await client.prefill(TOKENS, on_progress=lambda *counts: seen.append(counts))
    total = prefill_worker.geometry.prompt_nbytes(len(TOKENS))
    assert [landed for landed, _ in seen] == sorted({landed for landed, _ in seen})
    assert seen[-1] == (total, total)


async def test_another_dtype_is_asked_for_and_its_error_is_known(prefill_worker, compute):
    async with client_of(prefill_worker, dtype="int8") as client:
        cache = await client.prefill(TOKENS)
    assert prefill_worker.requests[0].dtype == cache.geometry.dtype == "int8"
    assert 0 < cache.wire_error < 0.01
    expected = compute(prefill_worker.geometry, TOKENS).numbers("a", "k")
    assert np.allclose(cache.numbers("a", "k"), expected, atol=0.01)


async def test_many_prompts_at_once_stay_apart(prefill_worker, compute):
    prompts = [[number, *TOKENS] for number in range(8)]
    async with client_of(prefill_worker) as client:
        caches = await asyncio.gather(*(client.prefill(prompt) for prompt in prompts))
    for prompt, cache in zip(prompts, caches, strict=True):
        assert cache.memory == compute(prefill_worker.geometry, prompt).memory


async def test_text_goes_through_the_tokenizer(prefill_worker):
    async with client_of(prefill_worker, tokenize=lambda text: list(text.encode())) as client:
        assert (await client.prefill("abc")).tokens == (97, 98, 99)
    async with client_of(prefill_worker) as client:
        with pytest.raises(LocalProtocolError, match="has no `tokenize`"):
            await client.prefill("abc")


async def test_what_cannot_be_asked_for_is_refused_before_memory_is_taken(prefill_worker):
    async with client_of(prefill_worker, max_kv_nbytes=1000) as client:
        with pytest.raises(LocalProtocolError, match="there are no tokens"):
            await client.prefill([])
        with pytest.raises(LocalProtocolError, match="max_kv_nbytes"):
            await client.prefill(TOKENS)
    async with client_of(prefill_worker, dtype="int4") as client:
        with pytest.raises(LocalProtocolError, match="dtype 'int4' is unknown"):
            await client.prefill(TOKENS)
    assert prefill_worker.requests == []
    with pytest.raises(LocalProtocolError, match="not connected"):
        await client_of(prefill_worker).describe()


# -- files -----------------------------------------------------------------------------------------


async def test_rows_land_in_a_file_that_appears_when_it_is_complete(
    prefill_worker, compute, tmp_path
):
    path = tmp_path / "prompt.kv"
    names = []
    async with client_of(prefill_worker) as client:
        await client.prefill_to_file(
            path,
            TOKENS,
            next_tokens=[4],
            on_progress=lambda *_: names.append(os.listdir(tmp_path)),
        )
    assert all(path.name not in found for found in names)
    assert os.listdir(tmp_path) == [path.name]
    with KvFile.open(path) as file:
        file.verify()
        assert file.cache.memory == compute(prefill_worker.geometry, TOKENS).memory
        assert (file.cache.model, file.cache.next_tokens) == ("tiny", (4,))


async def test_a_file_that_cannot_be_written_is_said_before_anything_is_asked(
    prefill_worker, tmp_path
):
    async with client_of(prefill_worker) as client:
        with pytest.raises(KvFileError, match="No such file"):
            await client.prefill_to_file(tmp_path / "no" / "a.kv", TOKENS)
    assert prefill_worker.requests == []


async def test_nothing_is_left_of_a_file_whose_transfer_failed(prefill_worker, tmp_path):
    prefill_worker.answer = refuse
    async with client_of(prefill_worker) as client:
        with pytest.raises(PeerError, match="too long"):
            await client.prefill_to_file(tmp_path / "a.kv", TOKENS)
    assert os.listdir(tmp_path) == []


async def test_a_call_that_is_cancelled_while_room_is_reserved_leaves_nothing(
    prefill_worker, tmp_path, monkeypatch
):
    began, may_go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    genuine = os.posix_fallocate

    def slow(*arguments):
        loop.call_soon_threadsafe(began.set)
        assert may_go_on.wait(10)
        return genuine(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    async with client_of(prefill_worker) as client:
        task = asyncio.create_task(client.prefill_to_file(tmp_path / "a.kv", TOKENS))
        await began.wait()
        task.cancel()
        await asyncio.sleep(0)
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert os.listdir(tmp_path) == []
    assert prefill_worker.requests == []


async def test_a_call_that_is_cancelled_while_no_room_is_found_is_cancelled(
    prefill_worker, tmp_path, monkeypatch
):
    began, may_go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def full(*_):
        loop.call_soon_threadsafe(began.set)
        assert may_go_on.wait(10)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    async with client_of(prefill_worker) as client:
        task = asyncio.create_task(client.prefill_to_file(tmp_path / "a.kv", TOKENS))
        await began.wait()
        task.cancel()
        await asyncio.sleep(0)
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert os.listdir(tmp_path) == []


# -- streams ---------------------------------------------------------------------------------------


async def test_rows_are_seen_as_they_land(prefill_worker, compute):
    expected = compute(prefill_worker.geometry, TOKENS)
    seen = []
    async with client_of(prefill_worker) as client:
        async for rows in client.stream(TOKENS):
            seen.append((rows.layer, rows.first_token, rows.num_tokens))
            for name, region in rows.regions.items():
                assert np.array_equal(region, expected.region(rows.layer, name))
    # Layer b has its window only, layer c one state for the whole prompt.
    assert seen == [("a", 0, 7), ("b", 3, 4), ("c", 6, 1)]
    assert len(prefill_worker.acknowledged) == 1


async def chunked(peer, request):
    """As a worker that computes three tokens at a time."""
    geometry = request_geometry(request)
    writer = TcpWriter(peer, geometry)
    key = (request.sequence_id, request.generation)
    await peer.send(Started(*key, queue_s=0.0))
    cache = chunked.compute(geometry, request.tokens)
    for first in range(0, len(request.tokens), 3):
        end = min(first + 3, len(request.tokens))
        for layer, held in enumerate(geometry.layers):
            start = max(first, held.first_needed_token(len(request.tokens)))
            if start < end:
                views = cache.views(layer, start, end - start)
                await writer.write(*key, layer, start, end - start, views)
    nbytes = geometry.prompt_nbytes(len(request.tokens))
    await peer.send(Commit(*key, len(request.tokens), nbytes, cache.digests(), 0.0, 0.0, 0.0))


def request_geometry(request):
    return chunked.geometry.as_wire(request.dtype)


async def test_chunks_of_a_prompt_are_seen_one_by_one(prefill_worker, compute):
    chunked.geometry, chunked.compute = prefill_worker.geometry, compute
    prefill_worker.answer = chunked
    expected = compute(prefill_worker.geometry, TOKENS)
    seen = []
    async with client_of(prefill_worker) as client:
        async for rows in client.stream(TOKENS):
            seen.append((rows.layer, rows.first_token, rows.num_tokens, sorted(rows.regions)))
            if rows.layer != "c":
                first = rows.first_token - expected.first_token(rows.layer)
                wanted = expected.region(rows.layer, "v")[first : first + rows.num_tokens]
                assert np.array_equal(rows.regions["v"], wanted)
    assert seen == [
        ("a", 0, 3, ["k", "v"]),
        ("a", 3, 3, ["k", "v"]),
        ("b", 3, 3, ["k", "v"]),
        ("a", 6, 1, ["k", "v"]),
        ("b", 6, 1, ["k", "v"]),
        ("c", 6, 1, ["state"]),
    ]


async def test_leaving_a_stream_aborts_the_transfer(prefill_worker):
    prefill_worker.answer = first_write_only
    first_write_only.geometry = prefill_worker.geometry
    async with client_of(prefill_worker) as client:
        async with aclosing(client.stream(TOKENS)) as stream:
            async for rows in stream:
                assert rows.layer == "a"
                break
        [abort] = prefill_worker.aborted
        assert abort.code == ErrorCode.CANCELLED
        # The connection is still good.
        prefill_worker.answer = None
        await client.prefill(TOKENS)


async def test_a_state_is_there_with_the_last_token_of_its_layer(
    start_worker, fake_prefill, compute
):
    layer = Layer("a", (Region("k", 2, 8), Region("state", 1, 4, "sequence")))
    worker = fake_prefill(KvGeometry((layer,), "float32"))
    chunked.geometry, chunked.compute = worker.geometry, compute
    worker.answer = chunked
    await start_worker(worker)
    async with client_of(worker) as client:
        names = [sorted(rows.regions) async for rows in client.stream(TOKENS)]
    assert names == [["k"], ["k"], ["k", "state"]]


async def test_leaving_a_stream_whose_worker_has_died(prefill_worker):
    first_write_only.geometry = prefill_worker.geometry

    async def answer(peer, request):
        prefill_worker.peer = peer
        await first_write_only(peer, request)

    prefill_worker.answer = answer
    async with client_of(prefill_worker) as client, aclosing(client.stream(TOKENS)) as stream:
        assert (await anext(stream)).layer == "a"
        prefill_worker.peer.abort("dies")
        async with asyncio.timeout(5):
            while not client._link.peer.is_closed:
                await asyncio.sleep(0.005)


# -- faults ----------------------------------------------------------------------------------------


async def refuse(peer, request):
    key = (request.sequence_id, request.generation)
    await peer.send(Abort(*key, code=ErrorCode.PROMPT_TOO_LONG, message="the prompt is too long"))
    await peer.send(AbortAck(*key))


async def first_write_only(peer, request):
    key = (request.sequence_id, request.generation)
    geometry = first_write_only.geometry
    await peer.send(Started(*key, queue_s=0.0))
    await peer.send(Heartbeat(*key))
    body = bytes(geometry.write_nbytes(0, 1))
    await TcpWriter(peer, geometry).write(*key, 0, 0, 1, [memoryview(body)])
    await asyncio.Event().wait()


async def test_what_the_worker_says_is_raised(prefill_worker):
    prefill_worker.answer = refuse
    async with client_of(prefill_worker) as client:
        with pytest.raises(PeerError, match="the prompt is too long") as caught:
            await client.prefill(TOKENS)
    assert caught.value.code == ErrorCode.PROMPT_TOO_LONG


async def test_an_error_about_the_sequence_is_raised(prefill_worker):
    async def answer(peer, request):
        await peer.send(Error(ErrorCode.INTERNAL, "it broke", "", request.sequence_id))

    prefill_worker.answer = answer
    async with client_of(prefill_worker) as client:
        with pytest.raises(PeerError, match="it broke"):
            await client.prefill(TOKENS)
    assert len(prefill_worker.aborted) == 1


async def test_wrong_digests_are_refused_and_the_worker_is_told(prefill_worker):
    async def answer(peer, request):
        chunked.geometry = prefill_worker.geometry
        genuine = peer.send

        async def send(message, *rest, **options):
            if isinstance(message, Commit):
                message = Commit(
                    message.sequence_id,
                    message.generation,
                    message.num_tokens,
                    message.nbytes,
                    [digest ^ 1 for digest in message.digests],
                    *(0.0, 0.0, 0.0),
                )
            await genuine(message, *rest, **options)

        peer.send = send
        await prefill_worker.send(peer, request)

    prefill_worker.answer = answer
    async with client_of(prefill_worker) as client:
        with pytest.raises(DigestMismatch, match="region k of layer a"):
            await client.prefill(TOKENS)
    [abort] = prefill_worker.aborted
    assert abort.code == ErrorCode.DIGEST_MISMATCH
    assert prefill_worker.acknowledged == []


async def test_a_commit_of_too_little_is_refused(prefill_worker):
    async def answer(peer, request):
        key = (request.sequence_id, request.generation)
        await peer.send(Commit(*key, len(request.tokens), 0, [0] * 5, 0.0, 0.0, 0.0))

    prefill_worker.answer = answer
    async with client_of(prefill_worker) as client:
        with pytest.raises(LeaseError, match="COMMIT is incomplete"):
            await client.prefill(TOKENS)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"timeout_s": 0.05}, "timeout_s"), ({"stall_timeout_s": 0.05}, "stall_timeout_s")],
)
async def test_a_worker_that_says_nothing_is_given_up(prefill_worker, options, words):
    async def answer(peer, request):
        await asyncio.Event().wait()

    prefill_worker.answer = answer
    async with client_of(prefill_worker, **options) as client:
        with pytest.raises(DeadlineExceeded, match=words):
            await client.prefill(TOKENS)
    [abort] = prefill_worker.aborted
    assert abort.code == ErrorCode.DEADLINE_EXCEEDED


async def test_a_cancelled_call_returns_when_the_worker_has_stopped(prefill_worker):
    first_write_only.geometry = prefill_worker.geometry
    prefill_worker.answer = first_write_only
    async with client_of(prefill_worker) as client:
        landed = asyncio.Event()
        task = asyncio.create_task(client.prefill(TOKENS, on_progress=lambda *_: landed.set()))
        await landed.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(prefill_worker.aborted) == 1
        prefill_worker.answer = None
        await client.prefill(TOKENS)


async def test_a_worker_that_does_not_confirm_is_cut_off(prefill_worker):
    first_write_only.geometry = prefill_worker.geometry
    prefill_worker.answer = first_write_only
    prefill_worker.confirms_aborts = False
    async with client_of(prefill_worker, timeout_s=0.05, abort_timeout_s=0.05) as client:
        with pytest.raises(DeadlineExceeded):
            await client.prefill(TOKENS)
        with pytest.raises(ConnectionLost):
            await client.prefill(TOKENS)


async def test_a_second_cancellation_cuts_the_connection(prefill_worker):
    first_write_only.geometry = prefill_worker.geometry
    prefill_worker.answer = first_write_only
    prefill_worker.confirms_aborts = False
    async with client_of(prefill_worker) as client:
        landed = asyncio.Event()
        task = asyncio.create_task(client.prefill(TOKENS, on_progress=lambda *_: landed.set()))
        await landed.wait()
        task.cancel()
        async with asyncio.timeout(5):
            while not prefill_worker.aborted:
                await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(ConnectionLost):
            await client.describe() and await client.prefill(TOKENS)


async def test_a_worker_that_dies_is_said_to_everybody(prefill_worker):
    async def die(peer, request):
        peer.abort("dies")

    prefill_worker.answer = die
    async with client_of(prefill_worker) as client:
        results = await asyncio.gather(
            client.prefill(TOKENS), client.prefill(TOKENS), return_exceptions=True
        )
        assert [type(result) for result in results] == [ConnectionLost, ConnectionLost]
        with pytest.raises(ConnectionLost):
            await client.prefill(TOKENS)


async def test_a_worker_that_floods_is_cut_off(prefill_worker, monkeypatch):
    monkeypatch.setattr("kvproto.client.link.MAX_EXTRA_MESSAGES", 16)

    async def flood(peer, request):
        while True:
            await peer.send(Heartbeat(request.sequence_id, request.generation))
            await asyncio.sleep(0)

    prefill_worker.answer = flood
    async with client_of(prefill_worker) as client:
        with pytest.raises(ConnectionLost, match="than there can be to say"):
            await client.prefill(TOKENS)


async def test_nobody_listens():
    with pytest.raises(ConnectionLost, match="is the service running"):
        async with PrefillClient("127.0.0.1", 1):
            pass


async def test_a_worker_of_another_kind_does_not_describe_itself(start_worker, fake_prefill):
    worker = fake_prefill()

    async def handle(peer):
        async for _ in peer:
            await peer.send(Error(ErrorCode.UNEXPECTED_MESSAGE, "what is that?"))

    worker.handle = handle
    await start_worker(worker)
    async with client_of(worker) as client:
        with pytest.raises(PeerError, match="what is that"):
            await client.describe()


async def test_a_worker_that_does_not_answer_describe(start_worker, fake_prefill):
    worker = fake_prefill()

    async def handle(peer):
        async for _ in peer:
            pass

    worker.handle = handle
    await start_worker(worker)
    async with client_of(worker, connect_timeout_s=0.2) as client:
        with pytest.raises(DeadlineExceeded, match="did not answer DESCRIBE"):
            await client.describe()


async def test_rows_of_a_host_of_the_other_order_are_swapped_and_digested_again(
    fake_prefill, start_worker, compute, tmp_path
):
    worker = fake_prefill()
    other = ByteOrder.BIG if HOST_ORDER is ByteOrder.LITTLE else ByteOrder.LITTLE
    expected = compute(worker.geometry, TOKENS)

    async def answer(peer, request):
        theirs = compute(worker.geometry, request.tokens)
        theirs.swap_bytes()
        key = (request.sequence_id, request.generation)
        writer = TcpWriter(peer, theirs.geometry)
        for layer in range(3):
            first = theirs.layout.first_token(layer)
            count = theirs.num_tokens - first
            await writer.write(*key, layer, first, count, theirs.views(layer, first, count))
        nbytes = theirs.geometry.prompt_nbytes(theirs.num_tokens)
        digests = theirs.digests()
        await peer.send(Commit(*key, theirs.num_tokens, nbytes, digests, 0.0, 0.0, 0.0))

    worker.answer = answer
    worker.identity = replace(worker.identity, byte_order=other)
    await start_worker(worker)
    async with client_of(worker) as client:
        await client.prefill_to_file(tmp_path / "a.kv", TOKENS)
    with KvFile.open(tmp_path / "a.kv") as file:
        file.verify()
        assert file.cache.memory == expected.memory
