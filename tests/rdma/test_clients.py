"""The raw clients by RDMA: rows and tokens are those that come over TCP, whatever goes wrong."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvproto.client import BlockingPrefillClient, DecodeClient, KvFile, PrefillClient
from kvproto.client.blocking import LoopThread
from kvproto.client.landing_pool import BLOCK_SIZE
from kvproto.errors import (
    CarrierLost,
    CarrierUnavailable,
    ConnectionLost,
    DeadlineExceeded,
    ErrorCode,
    LocalProtocolError,
    PeerError,
)
from kvproto.geometry import PoolLayout
from kvproto.rdma.settings import RdmaSettings
from ops.pdctl import pdctl
from tests.kvproto.carrier_contract import nothing_left_behind
from tests.kvproto.client.fake_workers import GEOMETRY, PLAIN, FakePrefill, computed, started
from tests.rdma.network import Network
from tests.rdma.rdma_workers import RdmaPrefill
from tests.reference import greedy_reference
from tests.system.cluster import Cluster

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(120)]

TOKENS = [(5 * index + 3) % 97 for index in range(70)]
# The client's end of the wire; what it asks is on the other one. It notices a cut in 0.2 s.
NEAR = RdmaSettings(device="rxe1", ack_timeout_exponent=13, retry_count=2)
FAR = RdmaSettings(device="rxe0", ack_timeout_exponent=13, retry_count=2)
POOL_NBYTES = 4 << 20


@pytest.fixture
async def start_worker() -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    """Start fake workers; nothing of anybody may be left after the test."""
    servers = []

    async def start(worker: FakePrefill) -> FakePrefill:
        servers.append(await started(worker))
        return worker

    await one_thread()
    async with nothing_left_behind():
        yield start
        for server in servers:
            await server.close()
        servers.clear()


async def one_thread() -> None:
    """The loop has one thread for its blocking work, which is there from now on."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    await asyncio.to_thread(lambda: None)


def client_of(worker: FakePrefill, **options: Any) -> PrefillClient:
    settings = {"carrier": "rdma", "rdma": NEAR, "pool_nbytes": POOL_NBYTES, **options}
    return PrefillClient("127.0.0.1", worker.port, **settings)


def pool_of(client: PrefillClient) -> dict[str, Any]:
    assert client._receiver is not None
    return client._receiver.stats()


def is_idle(client: PrefillClient) -> bool:
    stats = pool_of(client)
    num_blocks = stats["free"]
    return stats["num_leases"] == 0 and num_blocks * BLOCK_SIZE == pool_slots(client)


def pool_slots(client: PrefillClient) -> int:
    assert client._receiver is not None
    return client._receiver.pool.layout.num_slots


# -- rows ------------------------------------------------------------------------------------------


async def test_rows_are_those_that_come_over_tcp(start_worker: Any, network: Network) -> None:
    worker = await start_worker(RdmaPrefill())
    before = network.num_packets_sent("rdma0")
    async with client_of(worker) as client, client_of(worker, carrier="tcp") as plain:
        assert (client.carrier, plain.carrier) == ("rdma", "tcp")
        for count in (1, 3, 4, 5, 15, 16, 17, 33, 70):
            seen: list[tuple[int, int]] = []
            cache = await client.prefill(
                TOKENS[:count], on_progress=lambda *numbers, seen=seen: seen.append(numbers)
            )
            other = await plain.prefill(TOKENS[:count])
            assert cache.memory == other.memory, count
            assert cache.memory == computed(GEOMETRY, TOKENS[:count]).memory
            assert cache.digests() == other.digests()
            total = GEOMETRY.prompt_nbytes(count)
            assert seen[-1] == (total, total)
        assert is_idle(client)
    by_rdma, by_tcp = worker.requests[-2:]
    assert (by_rdma.carrier, by_tcp.carrier) == ("rdma", "")
    assert len(by_rdma.block_table) == 5
    assert len(worker.acknowledged) == len(worker.requests)
    assert worker.aborted == []
    assert network.num_packets_sent("rdma0") - before >= 9


async def test_many_calls_share_a_small_pool(start_worker: Any) -> None:
    worker = await start_worker(RdmaPrefill(PLAIN))
    prompts = [[number, *TOKENS[: 3 * number]] for number in range(20)]
    pool_nbytes = PoolLayout(PLAIN, 6, BLOCK_SIZE).nbytes
    async with client_of(worker, pool_nbytes=pool_nbytes + 1) as client:
        caches = await asyncio.gather(*(client.prefill(prompt) for prompt in prompts))
        for prompt, cache in zip(prompts, caches, strict=True):
            assert cache.memory == computed(PLAIN, prompt).memory
        num_requests = len(worker.requests)
        with pytest.raises(LocalProtocolError, match=r"97 tokens does not fit .* of 96 tokens"):
            await client.prefill([1] * 97)
        assert len(worker.requests) == num_requests == 20
        assert len((await client.prefill([1] * 96)).tokens) == 96
        assert is_idle(client)


async def test_a_call_waits_for_blocks_no_longer_than_its_time(start_worker: Any) -> None:
    worker = await start_worker(RdmaPrefill(PLAIN))
    reached = asyncio.Event()
    worker.answer = worker.holding(reached)
    pool_nbytes = PoolLayout(PLAIN, 2, BLOCK_SIZE).nbytes
    async with client_of(worker, pool_nbytes=pool_nbytes, timeout_s=3.0) as client:
        holding = asyncio.create_task(client.prefill(TOKENS[:20]))
        await reached.wait()
        waiting = asyncio.create_task(client.prefill(TOKENS[:10]))
        gone = asyncio.create_task(client.prefill(TOKENS[:10]))
        await asyncio.sleep(0)
        gone.cancel()
        for task in (holding, waiting):
            with pytest.raises(DeadlineExceeded, match=r"within 3 s|held the landing pool for 3 s"):
                await task
        with pytest.raises(asyncio.CancelledError):
            await gone
        worker.answer = None
        cache = await client.prefill(TOKENS[:20])
        assert cache.memory == computed(PLAIN, TOKENS[:20]).memory


async def test_a_file_and_a_stream(start_worker: Any, tmp_path: Path) -> None:
    worker = await start_worker(RdmaPrefill())
    async with client_of(worker) as client:
        await client.prefill_to_file(tmp_path / "a.kv", TOKENS[:-1], next_tokens=TOKENS[-1:])
        with KvFile.open(tmp_path / "a.kv") as file:
            file.verify()
            assert file.cache.memory == computed(GEOMETRY, TOKENS[:-1]).memory
        expected = computed(GEOMETRY, TOKENS)
        names = []
        async with aclosing(client.stream(TOKENS)) as stream:
            async for rows in stream:
                names.append(rows.layer)
                for name, values in rows.regions.items():
                    assert (values == expected.region(rows.layer, name)).all()
        assert names == ["a", "b", "c"]
        async with aclosing(client.stream(TOKENS)) as stream:
            await anext(stream)
        assert is_idle(client)


def test_the_blocking_client(tmp_path: Path) -> None:
    worker, thread = RdmaPrefill(), LoopThread("worker")
    server = thread.call(started(worker))
    with BlockingPrefillClient("127.0.0.1", worker.port, carrier="auto", rdma=NEAR) as client:
        assert client.carrier == "rdma"
        assert client.prefill(TOKENS).memory == computed(GEOMETRY, TOKENS).memory
    thread.call(server.close())
    thread.close()


# -- ends ------------------------------------------------------------------------------------------


async def test_an_aborted_transfer_gives_its_blocks_back(start_worker: Any) -> None:
    worker = await start_worker(RdmaPrefill(PLAIN))
    pool_nbytes = PoolLayout(PLAIN, 5, BLOCK_SIZE).nbytes
    async with client_of(worker, pool_nbytes=pool_nbytes) as client:
        for _ in range(10):
            reached = asyncio.Event()
            worker.answer = worker.holding(reached)
            task = asyncio.create_task(client.prefill(TOKENS))
            await reached.wait()
            worker.answer = None
            following = asyncio.create_task(client.prefill(TOKENS[:40]))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await following).memory == computed(PLAIN, TOKENS[:40]).memory
        assert is_idle(client)
    assert [abort.code for abort in worker.aborted] == [ErrorCode.CANCELLED] * 10


async def test_a_worker_that_confirms_nothing_is_cut_off(start_worker: Any) -> None:
    worker = await start_worker(RdmaPrefill(PLAIN))
    reached = asyncio.Event()
    worker.answer = worker.holding(reached)
    worker.confirms_aborts = False
    async with client_of(worker, abort_timeout_s=0.3) as client:
        tasks = [asyncio.create_task(client.prefill(TOKENS)) for _ in range(2)]
        await reached.wait()
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        with pytest.raises(ConnectionLost):
            await tasks[1]
        assert pool_of(client)["num_attached"] == 0
        assert is_idle(client)


async def test_a_worker_that_leaves_is_cut_off(start_worker: Any) -> None:
    worker = await start_worker(RdmaPrefill(PLAIN))
    reached = asyncio.Event()
    holding = worker.holding(reached)

    async def leave(peer: Any, request: Any) -> None:
        task = asyncio.create_task(holding(peer, request))
        await reached.wait()
        peer.abort("the test says so")
        task.cancel()
        await asyncio.wait([task])

    worker.answer = leave
    async with client_of(worker) as client:
        with pytest.raises(ConnectionLost):
            await client.prefill(TOKENS)
        assert pool_of(client)["num_attached"] == 0
        assert is_idle(client)


@pytest.mark.parametrize("carrier", ["rdma", "auto"])
async def test_a_wire_that_is_cut_is_a_typed_error_and_auto_goes_on_over_tcp(
    start_worker: Any, network: Network, carrier: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await start_worker(RdmaPrefill(PLAIN))
    async with client_of(worker, carrier=carrier, timeout_s=30.0) as client:
        await client.prefill(TOKENS)
        network.loss(100)
        with caplog.at_level(logging.WARNING), pytest.raises((CarrierLost, PeerError)) as caught:
            await client.prefill(TOKENS)
        assert caught.value.code == ErrorCode.CARRIER_LOST
        assert "is lost" in caplog.text
        assert client.carrier == "tcp"
        assert is_idle(client)
        if carrier == "auto":
            cache = await client.prefill(TOKENS)
            assert cache.memory == computed(PLAIN, TOKENS).memory
        else:
            with pytest.raises(CarrierLost, match="was lost"):
                await client.prefill(TOKENS)
        network.heal()


# -- what cannot be --------------------------------------------------------------------------------


async def test_what_rdma_cannot_do_is_said_when_entering(
    start_worker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    worker, plain = await start_worker(RdmaPrefill()), await start_worker(FakePrefill())
    with pytest.raises(CarrierUnavailable, match=r"prefill/p-1.* has no RDMA \(it has tcp\)"):
        await client_of(plain).__aenter__()
    with pytest.raises(LocalProtocolError, match="in float32, and not in int8; leave dtype off"):
        await client_of(worker, dtype="int8").__aenter__()
    with pytest.raises(LocalProtocolError, match="the landing pool has 100 bytes"):
        await client_of(worker, pool_nbytes=100).__aenter__()
    with pytest.raises(CarrierUnavailable, match="there is no RDMA port mlx5_9; this host has"):
        await client_of(worker, rdma=RdmaSettings(device="mlx5_9")).__aenter__()
    worker.is_deaf = True
    with pytest.raises(CarrierUnavailable, match="did not answer the offer"):
        await client_of(worker, connect_timeout_s=3.0).__aenter__()
    for options in ({"dtype": "int8"}, {"connect_timeout_s": 3.0}):
        with caplog.at_level(logging.WARNING):
            async with client_of(worker, carrier="auto", **options) as client:
                assert client.carrier == "tcp"
                assert (await client.prefill(TOKENS)).tokens == tuple(TOKENS)
        assert "RDMA is not used towards 127.0.0.1" in caplog.text
        caplog.clear()


# -- real workers ----------------------------------------------------------------------------------

_POOL = ["--kv-pool-nbytes", "16MiB", "--rdma-ack-timeout", "13", "--rdma-retry-count", "3"]


@pytest.fixture(scope="module")
def cluster(
    tiny_model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    cluster = Cluster(
        tmp_path_factory.mktemp("cluster"),
        tiny_model_dir("gemma3"),
        worker_flags={
            "prefill": ["--rdma-device", "rxe0", *_POOL, "--max-step-tokens", "64"],
            "decode": ["--rdma-device", "rxe1", *_POOL],
        },
    )
    for process in cluster.processes.values():
        process.start()
    try:
        # Three processes import their libraries at once, on the guest's one core.
        cluster.wait_ready(timeout_s=300)
        yield cluster
    finally:
        cluster.stop()


def real_prefill(cluster: Cluster, **options: Any) -> PrefillClient:
    options = {"carrier": "rdma", "rdma": NEAR, "pool_nbytes": POOL_NBYTES, **options}
    return PrefillClient(*cluster.worker_address("prefill-0"), **options)


def real_decode(cluster: Cluster, **options: Any) -> DecodeClient:
    options = {"carrier": "rdma", "rdma": FAR, **options}
    return DecodeClient(*cluster.worker_address("decode-0"), **options)


@pytest.mark.timeout(400)
async def test_real_workers_give_the_same_rows_and_tokens(cluster: Cluster, tmp_path: Path) -> None:
    prompts = [[(7 * i + 3 * k) % 256 for i in range(n)] for k, n in enumerate((3, 17, 65, 300))]
    expected = greedy_reference(cluster.model_dir, prompts, max_tokens=6)
    await one_thread()
    async with (
        nothing_left_behind(),
        real_prefill(cluster) as by_rdma,
        real_prefill(cluster, carrier="tcp") as by_tcp,
        real_decode(cluster) as decode,
        real_decode(cluster, carrier="tcp") as decode_by_tcp,
    ):
        # One at a time: rows of prompts that are computed together differ in their last bits.
        caches = [await by_rdma.prefill(prompt[:-1]) for prompt in prompts]
        for prompt, cache in zip(prompts, caches, strict=True):
            assert cache.memory == (await by_tcp.prefill(prompt[:-1])).memory
        paths = [tmp_path / f"{len(prompt)}.kv" for prompt in prompts]
        await asyncio.gather(
            *(
                by_rdma.prefill_to_file(path, prompt[:-1])
                for path, prompt in zip(paths, prompts, strict=True)
            )
        )
        for path in paths:
            verify_file(path)
        assert decode.carrier == "tcp"
        generations = [
            decode.generate(cache, prompt, max_output_tokens=6)
            for prompt, cache in zip(prompts, caches, strict=True)
        ]
        outputs = await asyncio.gather(*(output_of(generation) for generation in generations))
        assert outputs == expected
        assert {generation.timings["carrier"] for generation in generations} == {"rdma"}
        assert decode.carrier == "rdma"
        assert sorted(cluster.health("decode-0")["clients"].values()) == ["rdma"]

        # The two kinds of clients do not disturb each other; nor does one that gives up.
        generation = decode_by_tcp.generate(caches[3], prompts[3], max_output_tokens=6)
        assert await output_of(generation) == expected[3]
        assert generation.timings["carrier"] == "tcp"
        async with decode.generate(caches[3], prompts[3], max_output_tokens=200) as endless:
            await anext(endless)
        hasty = asyncio.create_task(
            output_of(decode.generate(caches[3], prompts[3], max_output_tokens=6))
        )
        await asyncio.sleep(0)
        hasty.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hasty
        again = decode.generate(caches[3], prompts[3], max_output_tokens=6)
        assert await output_of(again) == expected[3]
        assert again.timings["carrier"] == "rdma"
    await cluster.wait_idle()


def verify_file(path: Path) -> None:
    """The mapping goes with the last name of the file: not one of the caller's."""
    with KvFile.open(path) as file:
        file.verify()


async def output_of(generation: Any) -> list[int]:
    return [token async for token in generation]


@pytest.mark.timeout(400)
async def test_kv_goes_by_tcp_when_rdma_breaks_unless_the_client_forbids_it(
    cluster: Cluster, network: Network
) -> None:
    prompt = [(7 * i) % 256 for i in range(200)]
    [expected] = greedy_reference(cluster.model_dir, [prompt], max_tokens=4)
    async with real_prefill(cluster) as client:
        cache = await client.prefill(prompt[:-1])
    await one_thread()
    async with (
        nothing_left_behind(),
        real_decode(cluster) as strict,
        real_decode(cluster, carrier="auto") as lenient,
    ):
        for client in (strict, lenient):
            generation = client.generate(cache, prompt, max_output_tokens=4)
            assert await output_of(generation) == expected
            assert client.carrier == "rdma"
        network.loss(100)
        generation = lenient.generate(cache, prompt, max_output_tokens=4)
        assert await output_of(generation) == expected
        assert generation.timings["carrier"] == lenient.carrier == "tcp"
        with pytest.raises(CarrierUnavailable, match=r"asks for the KV over TCP .* rdma alone"):
            await output_of(strict.generate(cache, prompt, max_output_tokens=4))
        assert cluster.metrics("decode-0")['pd_decode_path_fallbacks_total{carrier="rdma"}'] >= 2
        network.heal()
    # A new connection is a new try.
    async with real_decode(cluster) as client:
        generation = client.generate(cache, prompt, max_output_tokens=4)
        assert await output_of(generation) == expected
        assert generation.timings["carrier"] == "rdma"
    await cluster.wait_idle()


@pytest.mark.timeout(400)
def test_the_example_of_the_page_runs(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs/clients.md"
    pattern = r"^```python rdma\n(.*?)^```$"
    [block] = re.findall(pattern, page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for old, new in (
        ("9100", cluster.worker_address("prefill-0")[1]),
        ("9200", cluster.worker_address("decode-0")[1]),
        ("mlx5_0", "rxe1"),
    ):
        block = block.replace(old, str(new))
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(block, "docs/clients.md", "exec"), names)
    assert [names["output"]] == greedy_reference(cluster.model_dir, [names["prompt"]], max_tokens=5)
    assert capsys.readouterr().out == "rdma rdma\n"


@pytest.mark.timeout(400)
def test_the_command_line_saves_and_loads(
    cluster: Cluster, tmp_path: Path, network: Network
) -> None:
    prompt = [(7 * i) % 256 for i in range(60)]
    [expected] = greedy_reference(cluster.model_dir, [prompt], max_tokens=4)
    tokens, path = tmp_path / "tokens.json", tmp_path / "a.kv"
    tokens.write_text(json.dumps(prompt), encoding="utf-8")
    prefill, decode = (
        ":".join(map(str, cluster.worker_address(name))) for name in ("prefill-0", "decode-0")
    )
    run = CliRunner().invoke
    rdma = ("--carrier", "rdma", "--rdma-device")
    before = network.num_packets_sent("rdma0")
    words = ["kv", "save", "--prefill", prefill, "--tokens", str(tokens), *rdma, "rxe1", str(path)]
    saved = run(pdctl, words)
    assert saved.exit_code == 0, saved.output
    words = ["kv", "load", str(path), "--decode", decode, "--max-output-tokens", "4", *rdma, "rxe0"]
    loaded = run(pdctl, words)
    assert [*map(int, loaded.stdout.split())] == expected, loaded.output
    nbytes = path.stat().st_size
    assert network.num_packets_sent("rdma0") - before >= 2 * nbytes // 4096
