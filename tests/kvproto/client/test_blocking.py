"""The raw clients without an event loop: the worker runs in a thread of its own here."""

import asyncio
import signal
import threading

import pytest

from kvproto.client import BlockingDecodeClient, BlockingPrefillClient, KvFile
from kvproto.client.blocking import LoopThread
from kvproto.errors import ConnectionLost, LocalProtocolError, PeerError
from kvproto.messages import Abort, AbortAck
from tests.kvproto.client.fake_workers import started

TOKENS = [5, 3, 8, 1]
pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def run_worker():
    """Serve a fake worker from another thread."""
    thread = LoopThread("worker")
    workers = []

    def run(worker):
        thread.call(started(worker))
        workers.append(worker)
        return worker

    yield run
    for worker in workers:
        thread.call(worker.server.close())
    thread.close()


def client_threads():
    return [t for t in threading.enumerate() if t.name.endswith("-client")]


def test_prefill_without_a_loop(run_worker, fake_prefill, compute, tmp_path):
    worker = run_worker(fake_prefill())
    with BlockingPrefillClient("127.0.0.1", worker.port) as client:
        assert len(client_threads()) == 1
        assert client.describe().model == "tiny"
        cache = client.prefill(TOKENS, next_tokens=[9])
        client.prefill_to_file(tmp_path / "a.kv", TOKENS, next_tokens=[9])
        landed = [rows.layer for rows in client.stream(TOKENS)]
    assert client_threads() == []
    assert cache.memory == compute(worker.geometry, TOKENS).memory
    assert cache.next_tokens == (9,)
    assert landed == ["a", "b", "c"]
    with KvFile.open(tmp_path / "a.kv") as file:
        assert file.cache.memory == cache.memory
    with pytest.raises(LocalProtocolError, match="the client is closed"):
        client.prefill(TOKENS)


def test_leaving_a_stream_aborts(run_worker, fake_prefill):
    worker = run_worker(fake_prefill())

    async def answer(peer, request):
        await worker.send(peer, request)

    worker.answer = answer
    with BlockingPrefillClient("127.0.0.1", worker.port) as client:
        stream = client.stream(TOKENS)
        assert next(stream).layer == "a"
        stream.close()
        client.prefill(TOKENS)
    assert len(worker.aborted) == 1


def test_decode_without_a_loop(run_worker, fake_decode, compute):
    worker = run_worker(fake_decode())
    kv = compute(worker.geometry, TOKENS[:-1])
    with BlockingDecodeClient("127.0.0.1", worker.port) as client:
        assert client.describe().model == "tiny"
        generation = client.generate(kv, TOKENS, max_output_tokens=3)
        assert list(generation) == [3, 8, 1]
        assert generation.finish_reason == "length"
        assert generation.timings == {"decode_s": 0.5}
        generation.close()
    assert client_threads() == []


def test_errors_come_through(run_worker, fake_prefill):
    worker = run_worker(fake_prefill())

    async def refuse(peer, request):
        key = (request.sequence_id, request.generation)
        await peer.send(Abort(*key, code=7, message="too long"))
        await peer.send(AbortAck(*key))

    worker.answer = refuse
    with (
        BlockingPrefillClient("127.0.0.1", worker.port) as client,
        pytest.raises(PeerError, match="too long"),
    ):
        client.prefill(TOKENS)


def test_nobody_listens_and_no_thread_is_left():
    client = BlockingDecodeClient("127.0.0.1", 1)
    with pytest.raises(ConnectionLost), client:
        pass
    assert client_threads() == []


def test_an_interrupt_cancels_the_call_and_waits_for_its_end():
    thread = LoopThread("x-client")
    story = []
    began = threading.Event()

    async def work():
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            story.append("cleaned up")

    main_thread = threading.get_ident()

    def interrupt():
        assert began.wait(10)
        signal.pthread_kill(main_thread, signal.SIGINT)

    other = threading.Thread(target=interrupt)
    # A shell starts what runs in the background with SIGINT ignored; Python then leaves it so.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        other.start()
        with pytest.raises(KeyboardInterrupt):
            thread.call(work())
    finally:
        signal.signal(signal.SIGINT, before)
    assert story == ["cleaned up"]
    other.join()
    thread.close()
    thread.close()
