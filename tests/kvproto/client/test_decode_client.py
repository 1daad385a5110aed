"""The raw client of a decode worker, and the KV that it brings, over real sockets."""

import asyncio
import threading

import numpy as np
import pytest

from kvproto.client import DecodeClient, KvCache
from kvproto.client.kv_sender import MAX_WRITE_NBYTES
from kvproto.convert import WirePacker
from kvproto.errors import (
    ConnectionLost,
    DeadlineExceeded,
    ErrorCode,
    LocalProtocolError,
    Malformed,
    PeerError,
)
from kvproto.geometry import KvGeometry
from kvproto.handshake import Identity
from kvproto.messages import (
    Abort,
    AbortAck,
    Commit,
    Error,
    Finished,
    Generate,
    Prefill,
    Started,
    Tokens,
)

PROMPT = [5, 3, 8, 1, 9, 2, 7]
pytestmark = pytest.mark.timeout(30)


def client_of(worker, **options):
    return DecodeClient("127.0.0.1", worker.port, **options)


async def output_of(generation):
    return [token async for token in generation]


async def test_kv_is_sent_and_tokens_come_back(decode_worker, compute):
    kv = compute(decode_worker.geometry, PROMPT[:-1])
    kv.facts = dict(decode_worker.identity.facts)
    seen = []
    async with client_of(decode_worker) as client:
        generation = client.generate(
            kv,
            PROMPT,
            max_output_tokens=5,
            temperature=0.5,
            top_p=0.9,
            top_k=3,
            seed=11,
            stop_token_ids=[6],
            ignore_eos=True,
            timeout_s=20.0,
            on_progress=lambda *counts: seen.append(counts),
        )
        assert (generation.finish_reason, generation.timings) == ("", {})
        assert await output_of(generation) == PROMPT[-5:]
        assert (generation.finish_reason, generation.timings) == ("length", {"decode_s": 0.5})
        assert await output_of(generation) == []
        assert (await client.describe()).model == "tiny"
    [request] = decode_worker.requests
    assert (request.tokens, request.num_prompt_tokens, request.kv_from_sender) == (PROMPT, 7, True)
    assert (request.temperature, request.top_p, request.top_k, request.seed) == (0.5, 0.9, 3, 11)
    assert (request.stop_token_ids, request.ignore_eos, request.timeout_s) == ([6], True, 20.0)
    assert request.prefill_workers == []
    for layer, held in enumerate(kv.geometry.layers):
        for index, region in enumerate(held.regions):
            assert np.array_equal(
                decode_worker.rows(layer, index, 6), kv.region(held.name, region.name)
            )
    total = kv.geometry.prompt_nbytes(6)
    assert seen[-1] == (total, total)
    assert any(isinstance(message, Started) for message in decode_worker.received)


async def test_a_file_says_how_the_prompt_goes_on(decode_worker, compute):
    kv = compute(decode_worker.geometry, PROMPT[:-1])
    kv.next_tokens = (PROMPT[-1],)
    async with client_of(decode_worker) as client:
        assert await output_of(client.generate(kv, max_output_tokens=3)) == PROMPT[-3:]
        kv.next_tokens = ()
        with pytest.raises(LocalProtocolError, match="does not say how the prompt goes on"):
            client.generate(kv, max_output_tokens=3)


async def test_without_kv_the_worker_computes(decode_worker):
    async with client_of(decode_worker) as client:
        assert await output_of(client.generate(None, [4], max_output_tokens=2)) == [4, 4]
        with pytest.raises(LocalProtocolError, match="no tokens to continue"):
            client.generate(None, max_output_tokens=2)
    assert not decode_worker.requests[0].kv_from_sender


async def test_kv_of_the_last_token_too_does_no_harm_with_ordinary_layers(
    start_worker, fake_decode, plain, compute
):
    worker = await start_worker(fake_decode(plain))
    kv = compute(plain, PROMPT)
    async with client_of(worker) as client:
        assert await output_of(client.generate(kv, PROMPT, max_output_tokens=2)) == [2, 7]
    assert np.array_equal(worker.rows(1, 0, 6), kv.region("b", "k")[:6])


async def test_kv_of_another_model_is_refused_by_name(decode_worker, compute):
    kv = compute(decode_worker.geometry, PROMPT[:-1])
    kv.facts = {"weights_digest": "x", "dtype": "float16"}
    async with client_of(decode_worker) as client:
        with pytest.raises(LocalProtocolError, match=r"weights_digest 'x', decode/d-1.* has 'w'"):
            await output_of(client.generate(kv, PROMPT, max_output_tokens=2))
    assert decode_worker.requests == []


@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float64"])
async def test_rows_of_another_type_are_converted_to_the_workers(decode_worker, compute, dtype):
    exact = compute(decode_worker.geometry, PROMPT[:-1])
    kv = KvCache(exact.geometry.as_wire(dtype), PROMPT[:-1], wire_error=0.25)
    for layer in kv.geometry.layers:
        for region in layer.regions:
            kv._rows(layer.name, region.name).assign(exact._rows(layer.name, region.name))
    async with client_of(decode_worker) as client:
        await output_of(client.generate(kv, PROMPT, max_output_tokens=2))
    assert np.array_equal(decode_worker.rows(0, 1, 6), kv.numbers("a", "v").astype(np.float32))
    [commit] = decode_worker.commits
    assert commit.wire_error == pytest.approx(0.25, rel=1e-6)


async def test_the_worker_may_ask_for_another_type_and_for_no_digests(decode_worker, compute):
    kv = compute(decode_worker.geometry, PROMPT[:-1])
    decode_worker.prefill_options = {"dtype": "float16", "is_unchecked": True}
    async with client_of(decode_worker) as client:
        await output_of(client.generate(kv, PROMPT, max_output_tokens=2))
    [commit] = decode_worker.commits
    assert commit.digests == []
    assert 0 < commit.wire_error < 1e-3
    assert np.allclose(decode_worker.rows(0, 0, 6), kv.region("a", "k"), atol=1e-3)


async def test_large_layers_travel_in_several_writes(start_worker, fake_decode):
    geometry = KvGeometry.uniform(1, 64, 512, "float32", ["a"])
    worker = await start_worker(fake_decode(geometry))
    tokens = list(range(60))
    kv = KvCache(geometry, tokens[:-1])
    kv.memory[:] = np.random.default_rng(1).bytes(kv.nbytes)
    seen = []
    async with client_of(worker) as client:
        generation = client.generate(
            kv, tokens, max_output_tokens=2, on_progress=lambda sent, _: seen.append(sent)
        )
        await output_of(generation)
    sizes = np.diff([0, *seen])
    assert len(sizes) > 3
    assert max(sizes) <= MAX_WRITE_NBYTES
    assert sum(sizes) == kv.nbytes
    assert np.array_equal(
        worker.rows(0, 1, 59).view(np.uint32), kv.region("a", "v").view(np.uint32)
    )


# -- refusals and ends -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"carrier": "rdma"}, "this client does not write over 'rdma'"),
        ({"dtype": "float8_e5m2"}, "cannot convert KV from float32 to float8_e5m2"),
        ({"first_head": 1, "num_heads": 2}, r"heads 1\.\.3 asked for"),
    ],
)
async def test_what_the_client_cannot_send_is_said_to_both(decode_worker, compute, options, words):
    kv = compute(decode_worker.geometry, PROMPT[:-1])
    decode_worker.prefill_options = options
    async with client_of(decode_worker) as client:
        with pytest.raises(LocalProtocolError, match=words):
            await output_of(client.generate(kv, PROMPT, max_output_tokens=2))
        async with asyncio.timeout(5):
            while not any(isinstance(m, AbortAck) for m in decode_worker.received):
                await asyncio.sleep(0.005)
    assert decode_worker.commits == []


async def test_values_that_the_wire_cannot_carry_are_said_to_both(decode_worker, compute):
    kv = compute(decode_worker.geometry, PROMPT[:-1])
    kv.region("a", "v")[2, 0, 0] = np.nan
    decode_worker.prefill_options = {"dtype": "int8"}
    async with client_of(decode_worker) as client:
        with pytest.raises(LocalProtocolError, match="region v holds NaN"):
            await output_of(client.generate(kv, PROMPT, max_output_tokens=2))


async def test_a_frame_that_the_worker_does_not_take_is_refused_here(
    start_worker, fake_decode, compute
):
    worker = fake_decode()
    worker.identity = Identity("decode", "d", {}, max_payload_nbytes=4096 + 200)
    await start_worker(worker)
    kv = compute(worker.geometry, PROMPT[:-1])
    async with client_of(worker) as client:
        # Layer a has 128 bytes a token: one token a frame. Layer b as well, c fits.
        await output_of(client.generate(kv, PROMPT, max_output_tokens=2))
    kv = KvCache(KvGeometry.uniform(1, 2, 64, "float32", ["a"]), PROMPT[:-1])
    async with client_of(worker) as client:
        with pytest.raises(LocalProtocolError, match="one token of layer a does not fit"):
            await output_of(client.generate(kv, PROMPT, max_output_tokens=2))


async def test_an_abort_of_the_worker_stops_the_writes(decode_worker, compute, monkeypatch):
    may_pack = threading.Event()
    genuine = WirePacker.pack

    def pack(*arguments, **options):
        assert may_pack.wait(10)
        return genuine(*arguments, **options)

    async def abort(peer, request):
        key = (request.sequence_id, decode_worker.num_generations)
        decode_worker.leases.revoke(key[1])
        await peer.send(Abort(*key, code=ErrorCode.CANCELLED, message="preempted"))
        await peer.send(Abort(*key, code=ErrorCode.CANCELLED, message="and once more"))

    monkeypatch.setattr(WirePacker, "pack", pack)
    decode_worker.after_prefill = abort
    decode_worker.prefill_options = {"dtype": "float16"}
    kv = compute(decode_worker.geometry, PROMPT[:-1])
    async with client_of(decode_worker) as client:
        reading = asyncio.create_task(output_of(client.generate(kv, PROMPT, max_output_tokens=2)))
        async with asyncio.timeout(5):
            while sum(isinstance(m, AbortAck) for m in decode_worker.received) < 2:
                await asyncio.sleep(0.005)
        may_pack.set()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    kinds = [type(message) for message in decode_worker.received]
    assert kinds == [Generate, Started, AbortAck, AbortAck, Abort]


async def test_a_refused_write_stops_the_rest(decode_worker, compute):
    async def fail(peer, request):
        await peer.send(Error(ErrorCode.LEASE, "no lease", "generation", request.sequence_id))
        await peer.send(Finished(request.sequence_id, "error", ErrorCode.LEASE, "it failed"))

    decode_worker.after_prefill = fail
    kv = compute(decode_worker.geometry, PROMPT[:-1])
    async with client_of(decode_worker) as client:
        with pytest.raises(PeerError, match="it failed") as caught:
            await output_of(client.generate(kv, PROMPT, max_output_tokens=2))
    assert caught.value.code == ErrorCode.LEASE


async def test_an_end_that_is_none_is_raised(decode_worker):
    async def refuse(peer, request):
        await peer.send(
            Finished(request.sequence_id, "abort", ErrorCode.SHUTTING_DOWN, "it drains")
        )

    decode_worker.tokens = refuse
    async with client_of(decode_worker) as client:
        generation = client.generate(None, [4], max_output_tokens=2)
        with pytest.raises(PeerError, match="it drains"):
            await output_of(generation)
        assert generation.finish_reason == "abort"


async def test_missing_tokens_are_found_and_the_sequence_is_ended(decode_worker):
    async def skip(peer, request):
        await peer.send(Tokens(request.sequence_id, 1, [4]))

    decode_worker.tokens = skip
    async with client_of(decode_worker) as client:
        with pytest.raises(Malformed, match="first_index: is 1, 0 tokens came"):
            await output_of(client.generate(None, [4], max_output_tokens=2))
    assert isinstance(decode_worker.received[-1], Abort)


async def silent(peer, request):
    await peer.send(Tokens(request.sequence_id, 0, [4]))
    await asyncio.Event().wait()


async def test_a_worker_that_never_ends_is_given_up(decode_worker, monkeypatch):
    monkeypatch.setattr("kvproto.client.decode_client.GRACE_S", 0.05)
    decode_worker.tokens = silent
    async with client_of(decode_worker) as client:
        with pytest.raises(DeadlineExceeded, match="sent no end of the output within"):
            await output_of(client.generate(None, [4], max_output_tokens=2, timeout_s=0.05))


async def test_closing_ends_the_sequence_at_the_worker(decode_worker):
    decode_worker.tokens = silent
    async with client_of(decode_worker) as client:
        async with client.generate(None, [4], max_output_tokens=2) as generation:
            assert await anext(generation) == 4
        await generation.aclose()
        assert isinstance(decode_worker.received[-1], Abort)
        assert await output_of(generation) == []
        never_started = client.generate(None, [4], max_output_tokens=2)
        await never_started.aclose()
        assert await output_of(never_started) == []
    assert len(decode_worker.requests) == 1


async def test_leaving_the_client_ends_what_runs(decode_worker):
    decode_worker.tokens = silent
    async with client_of(decode_worker) as client:
        generation = client.generate(None, [4], max_output_tokens=2)
        assert await anext(generation) == 4
    assert isinstance(decode_worker.received[-1], Abort)


async def test_a_worker_that_does_not_confirm_is_cut_off(decode_worker):
    decode_worker.tokens = silent
    handle = decode_worker.handle

    async def deaf(peer):
        genuine = peer.send

        async def send(message, *rest, **options):
            if not isinstance(message, AbortAck):
                await genuine(message, *rest, **options)

        peer.send = send
        await handle(peer)

    decode_worker.server._handler = deaf
    async with client_of(decode_worker, abort_timeout_s=0.05) as client:
        generation = client.generate(None, [4], max_output_tokens=2)
        assert await anext(generation) == 4
        await generation.aclose()
        with pytest.raises(ConnectionLost):
            await output_of(client.generate(None, [4], max_output_tokens=2))


async def test_late_messages_about_a_sequence_that_is_over_are_answered(decode_worker):
    is_over = asyncio.Event()

    async def late(peer, request):
        await decode_worker.echo(peer, request)
        await is_over.wait()
        key = request.sequence_id
        await peer.send(Prefill(key, 7, [1], timeout_s=1.0))
        await peer.send(Abort(key, 8, ErrorCode.CANCELLED, "late"))
        await peer.send(Tokens(key, 0, [1]))

    decode_worker.tokens = late
    async with client_of(decode_worker) as client:
        await output_of(client.generate(None, [4], max_output_tokens=2))
        is_over.set()
        async with asyncio.timeout(5):
            while sum(isinstance(m, AbortAck) for m in decode_worker.received) < 2:
                await asyncio.sleep(0.005)


async def test_what_runs_beside_the_reader_ends_with_the_client(decode_worker):
    async with client_of(decode_worker) as client:
        task = client.spawn(asyncio.Event().wait, "forever")
    assert task.cancelled()


async def test_kv_that_was_not_promised_is_not_sent(decode_worker):
    async def ask(peer, request):
        await peer.send(Prefill(request.sequence_id, 7, [1], timeout_s=1.0))
        await decode_worker.echo(peer, request)

    decode_worker.tokens = ask
    async with client_of(decode_worker) as client:
        assert await output_of(client.generate(None, [4], max_output_tokens=1)) == [4]
        async with asyncio.timeout(5):
            while not any(isinstance(m, AbortAck) for m in decode_worker.received):
                await asyncio.sleep(0.005)


async def test_many_generations_at_once_stay_apart(decode_worker, compute):
    async with client_of(decode_worker) as client:
        outputs = await asyncio.gather(
            *(
                output_of(client.generate(None, [number], max_output_tokens=3))
                for number in range(8)
            )
        )
    assert outputs == [[number] * 3 for number in range(8)]


async def test_leaving_the_client_ends_what_is_being_sent_and_read(
    decode_worker, compute, monkeypatch
):
    may_pack = threading.Event()
    genuine = WirePacker.pack

    def pack(*arguments, **options):
        assert may_pack.wait(10)
        return genuine(*arguments, **options)

    monkeypatch.setattr(WirePacker, "pack", pack)
    decode_worker.prefill_options = {"dtype": "float16"}
    kv = compute(decode_worker.geometry, PROMPT[:-1])
    async with client_of(decode_worker) as client:
        reading = asyncio.create_task(
            output_of(client.generate(kv, PROMPT, max_output_tokens=2, timeout_s=9.0))
        )
        async with asyncio.timeout(5):
            while not any(isinstance(m, Started) for m in decode_worker.received):
                await asyncio.sleep(0.005)
    may_pack.set()
    with pytest.raises(LocalProtocolError, match="the generation was closed"):
        await reading
    assert decode_worker.commits == []
    assert isinstance(decode_worker.received[-1], Abort)


async def test_a_lost_worker_is_said(decode_worker):
    async def die(peer, request):
        peer.abort("dies")

    decode_worker.tokens = die
    async with client_of(decode_worker) as client:
        with pytest.raises(ConnectionLost):
            await output_of(client.generate(None, [4], max_output_tokens=1))


async def test_a_commit_that_is_refused_is_raised(decode_worker, compute):
    kv = compute(decode_worker.geometry, PROMPT[:-1])
    genuine = decode_worker.leases.commit

    def commit(message):
        damaged = Commit(
            message.sequence_id,
            message.generation,
            message.num_tokens,
            message.nbytes,
            [digest ^ 1 for digest in message.digests],
            *(0.0, 0.0, 0.0),
        )
        return genuine(damaged)

    decode_worker.leases.commit = commit
    async with client_of(decode_worker) as client:
        with pytest.raises(PeerError, match="region k of layer a has digest"):
            await output_of(client.generate(kv, PROMPT, max_output_tokens=2))
