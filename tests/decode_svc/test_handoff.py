"""A decode worker against prefill workers that fail in every way: typed end, no block lost."""

import asyncio
import math
from collections.abc import Callable
from typing import Any, cast

import pytest

from decode_svc.errors import FetchCancelled
from decode_svc.handoff import Fetcher, Handoff
from decode_svc.letter_box import LetterBoxes
from decode_svc.metrics import DecodeMetrics
from decode_svc.prefill_peers import PrefillPeers
from decode_svc.quarantine import Quarantine
from decode_svc.sender_paths import SenderPaths
from kvproto.blocks import BlockPool
from kvproto.errors import ErrorCode
from kvproto.lease import LeaseTable
from kvproto.messages import Abort, AbortAck, CommitAck, Prefill, PrefillWorker
from kvproto.tcp_link import Link
from tests.decode_svc import fake_prefill
from tests.decode_svc.fake_prefill import Behaviour, FakePrefill
from tests.decode_svc.made_rdma import MadeHost
from tests.reference import greedy_reference

_PROMPT = [(5 * i + 1) % 256 for i in range(50)]


@pytest.fixture(scope="module")
def expected(tiny_model_dir: Any) -> list[int]:
    [tokens] = greedy_reference(tiny_model_dir("llama"), [_PROMPT], max_tokens=8)
    assert len(tokens) == 8
    return tokens


async def test_kv_that_lands_is_decoded(
    load_engine: Any, start_worker: Any, fake_worker: Any, expected: list[int]
) -> None:
    fake = await fake_worker("good", fake_prefill.good)
    async with start_worker(load_engine()) as worker:
        await worker.generate("s", _PROMPT, [fake.address])
        outcome = (await worker.outcomes(1))["s"]
        assert outcome.tokens == expected
        assert outcome.finished.reason == "length"
        assert outcome.finished.timings["carrier"] == "tcp"
        assert outcome.finished.timings["handoff_nbytes"] == 49 * 4 * 2 * 2 * 16 * 4
        assert fake.count(CommitAck) == 1
        await worker.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("behaviour", "code"),
    [
        (fake_prefill.lies_about_digests, "digest_mismatch"),
        (fake_prefill.leaves_out_a_layer, "lease"),
        (fake_prefill.hangs_up_in_the_middle, "connection_lost"),
        (fake_prefill.stalls_in_the_middle, "deadline_exceeded"),
        (fake_prefill.refuses, "overloaded"),
    ],
)
async def test_a_bad_worker_is_left_for_the_next_one(
    load_engine: Any,
    start_worker: Any,
    fake_worker: Any,
    expected: list[int],
    behaviour: Behaviour,
    code: str,
) -> None:
    bad = await fake_worker("bad", behaviour)
    good = await fake_worker("good", fake_prefill.good)
    async with start_worker(load_engine(), stall_timeout_s=0.3) as worker:
        await worker.generate("s", _PROMPT, [bad.address, good.address])
        outcome = (await worker.outcomes(1))["s"]
        assert outcome.tokens == expected
        assert outcome.finished.timings["prefill_worker"] == "good"
        assert bad.count(CommitAck) == 0
        await worker.assert_nothing_is_left()


@pytest.mark.parametrize(
    "behaviour",
    [
        fake_prefill.lies_about_digests,
        fake_prefill.leaves_out_a_layer,
        fake_prefill.hangs_up_in_the_middle,
        fake_prefill.stalls_in_the_middle,
        fake_prefill.says_nothing,
        fake_prefill.refuses,
    ],
)
async def test_without_another_worker_the_sequence_fails_and_no_token_is_made(
    load_engine: Any, start_worker: Any, fake_worker: Any, behaviour: Behaviour
) -> None:
    bad = await fake_worker("bad", behaviour)
    async with start_worker(load_engine(), stall_timeout_s=0.3) as worker:
        await worker.generate("s", _PROMPT, [bad.address], timeout_s=1.5)
        outcome = (await worker.outcomes(1))["s"]
        assert outcome.tokens == []
        assert outcome.finished.reason == "error"
        expected_codes = {ErrorCode.PREFILL_UNAVAILABLE, ErrorCode.DEADLINE_EXCEEDED}
        assert outcome.finished.code in expected_codes
        assert outcome.finished.message
        await worker.assert_nothing_is_left()


async def test_nobody_listens_there(load_engine: Any, start_worker: Any, fake_worker: Any) -> None:
    async with start_worker(load_engine()) as worker:
        await worker.generate("s", _PROMPT, [PrefillWorker("gone", "127.0.0.1", 1)])
        outcome = (await worker.outcomes(1))["s"]
        assert outcome.finished.code == ErrorCode.PREFILL_UNAVAILABLE
        assert "gone" in outcome.finished.message
        await worker.assert_nothing_is_left()


async def test_a_restarted_worker_under_the_old_name_is_refused(
    load_engine: Any, start_worker: Any, fake_worker: Any
) -> None:
    fake = await fake_worker("new-instance", fake_prefill.good)
    stale = PrefillWorker("old-instance", fake.address.host, fake.address.port)
    async with start_worker(load_engine()) as worker:
        await worker.generate("s", _PROMPT, [stale])
        outcome = (await worker.outcomes(1))["s"]
        assert "instance_id" in outcome.finished.message
        assert fake.count(Prefill) == 0


async def test_an_abort_without_acknowledgement_cuts_the_line(
    load_engine: Any, start_worker: Any, fake_worker: Any, expected: list[int]
) -> None:
    deaf = await fake_worker("deaf", fake_prefill.stalls_in_the_middle, acks_aborts=False)
    good = await fake_worker("good", fake_prefill.good)
    async with start_worker(load_engine(), stall_timeout_s=0.3, abort_timeout_s=0.3) as worker:
        await worker.generate("s", _PROMPT, [deaf.address, good.address])
        outcome = (await worker.outcomes(1))["s"]
        assert outcome.tokens == expected
        assert deaf.count(Abort) == 1
        await worker.assert_nothing_is_left()


async def test_cancelled_while_the_kv_is_on_its_way(
    load_engine: Any, start_worker: Any, fake_worker: Any
) -> None:
    fake = await fake_worker("slow", fake_prefill.stalls_in_the_middle)
    async with start_worker(load_engine()) as worker:
        await worker.generate("s", _PROMPT, [fake.address])
        async with asyncio.timeout(10):
            while not worker.leases.stats()["num_leases"] or not fake.count(Prefill):
                await asyncio.sleep(0.01)
        await worker.router.send(Abort("s", 0, code=ErrorCode.CANCELLED, message="client gone"))
        outcome = (await worker.outcomes(1))["s"]
        assert outcome.finished.reason == "abort"
        assert fake.count(Abort) == 1
        await worker.assert_nothing_is_left()


async def test_the_router_goes_away_while_the_kv_is_on_its_way(
    load_engine: Any, start_worker: Any, fake_worker: Any
) -> None:
    fake = await fake_worker("slow", fake_prefill.stalls_in_the_middle)
    async with start_worker(load_engine()) as worker:
        await worker.generate("s", _PROMPT, [fake.address])
        async with asyncio.timeout(10):
            while not fake.count(Prefill):
                await asyncio.sleep(0.01)
        worker.router.abort("the router dies")
        await worker.assert_nothing_is_left()


async def test_sixteen_handoffs_at_once_keep_apart(
    load_engine: Any,
    start_worker: Any,
    fake_worker: Any,
    tiny_model_dir: Any,
) -> None:
    prompts = {f"s{i}": [(i * 13 + j * 7) % 256 for j in range(20 + 3 * i)] for i in range(16)}
    references = greedy_reference(tiny_model_dir("llama"), list(prompts.values()), max_tokens=8)
    fake = await fake_worker("good", fake_prefill.good)
    async with start_worker(load_engine()) as worker:
        for sequence_id, prompt in prompts.items():
            await worker.generate(sequence_id, prompt, [fake.address], ignore_eos=False)
        outcomes = await worker.outcomes(len(prompts))
        for (sequence_id, _), tokens in zip(prompts.items(), references, strict=True):
            assert outcomes[sequence_id].tokens == tokens, sequence_id
        await worker.assert_nothing_is_left()


async def test_kv_that_was_verified_is_used_although_nobody_takes_the_acknowledgement(
    load_engine: Any, start_worker: Any, fake_worker: Any, expected: list[int]
) -> None:
    fake = await fake_worker("hasty", fake_prefill.commits_and_hangs_up)
    async with start_worker(load_engine()) as worker:
        for index in range(5):
            await worker.generate(f"s{index}", _PROMPT, [fake.address])
            outcome = (await worker.outcomes(1))[f"s{index}"]
            assert outcome.tokens == expected, outcome.finished.message
        await worker.assert_nothing_is_left()


class _PeersThatCancel:
    """Hands out a connection, but the sequence has been given up by then."""

    def __init__(self, handoff: Handoff) -> None:
        self.handoff = handoff

    async def get(self, worker: PrefillWorker) -> object:
        self.handoff.cancel()
        return object()


async def test_a_sequence_given_up_while_connecting_asks_for_nothing(load_engine: Any) -> None:
    engine = load_engine()
    blocks = BlockPool(engine.num_blocks)
    layout, region = engine.kv_pool.layout, engine.kv_pool.region
    leases = LeaseTable(layout, region, blocks)
    table = blocks.allocate("s", 2)
    handoff = Handoff("s", [1] * 20, table, [PrefillWorker("p", "127.0.0.1", 1)], expires_at=1e9)
    fetcher = Fetcher(
        cast("PrefillPeers", _PeersThatCancel(handoff)),
        LetterBoxes(),
        leases,
        blocks,
        Quarantine(leases),
        DecodeMetrics(),
        senders=SenderPaths((), DecodeMetrics(), timeout_s=1.0),
        new_generation=lambda: 1,
        stall_timeout_s=1.0,
        abort_timeout_s=1.0,
    )
    with pytest.raises(FetchCancelled):
        await fetcher.fetch(handoff)
    assert leases.stats()["num_leases"] == 0
    blocks.free(table, "s")


async def test_handoffs_that_wait_for_a_dead_host_do_not_queue_up_their_time_outs(
    load_engine: Any, start_worker: Any
) -> None:
    """A listener that accepts and says nothing: ten sequences fail after one time-out, not ten."""
    silent = await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", 0)
    address = PrefillWorker("silent", "127.0.0.1", silent.sockets[0].getsockname()[1])
    async with start_worker(load_engine(), connect_timeout_s=1.0) as worker:
        for index in range(10):
            await worker.generate(f"s{index}", _PROMPT, [address], timeout_s=60.0)
        async with asyncio.timeout(8):
            outcomes = await worker.outcomes(10)
        codes = {outcome.finished.code for outcome in outcomes.values()}
        assert codes == {ErrorCode.PREFILL_UNAVAILABLE}
        await worker.assert_nothing_is_left()
    silent.close()


async def test_a_write_behind_its_abort_ack_ends_the_connection(
    load_engine: Any, start_worker: Any, fake_worker: Any, expected: list[int]
) -> None:
    liar = await fake_worker("liar", fake_prefill.stalls_in_the_middle)
    good = await fake_worker("good", fake_prefill.good)
    async with start_worker(load_engine(), stall_timeout_s=0.3) as worker:
        # What the lease table would say if half a WRITE had come after ABORT_ACK.
        is_cut = False
        quiesced = worker.leases.quiesced

        def half_received(generation: int) -> bool:
            nonlocal is_cut
            if not is_cut:
                is_cut = True
                return False
            return bool(quiesced(generation))

        worker.leases.quiesced = half_received
        await worker.generate("s", _PROMPT, [liar.address, good.address])
        assert (await worker.outcomes(1))["s"].tokens == expected
        assert is_cut
        await worker.generate("t", _PROMPT, [liar.address, good.address])
        assert (await worker.outcomes(1))["t"].tokens == expected
        assert liar.num_connections == 2
        await worker.assert_nothing_is_left()


@pytest.mark.parametrize(("min_gain", "num_lanes"), [(0.0, 3), (1e9, 1)])
async def test_several_lanes_are_kept_if_they_are_worth_it(
    load_engine: Any,
    start_worker: Any,
    fake_worker: Any,
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
    min_gain: float,
    num_lanes: int,
) -> None:
    monkeypatch.setattr("decode_svc.prefill_peers._LANES_MIN_GAIN", min_gain)
    fake = await fake_worker("good", fake_prefill.good)
    async with start_worker(load_engine(), max_lanes=3) as worker:
        await worker.generate("s", _PROMPT, [fake.address])
        assert (await worker.outcomes(1))["s"].tokens == expected
        [path] = worker.peers.stats().values()
        assert path["num_lanes"] == num_lanes
        assert path["bandwidth_bytes_per_s"] > 0
        # Each link serves on, and the one that was not kept leaves nothing behind.
        await worker.generate("t", _PROMPT, [fake.address])
        assert (await worker.outcomes(1))["t"].tokens == expected
        await worker.assert_nothing_is_left()


@pytest.mark.parametrize(
    "options",
    [
        {"answers_probes": "refuses"},
        {"answers_probes": "not at all"},
        {"answers_probes": "not at all", "acks_aborts": False},
    ],
)
async def test_a_worker_whose_path_is_not_proven_is_left_for_the_next_one(
    load_engine: Any,
    start_worker: Any,
    fake_worker: Any,
    expected: list[int],
    options: dict[str, Any],
) -> None:
    bad = await fake_worker("bad", fake_prefill.good, **options)
    good = await fake_worker("good", fake_prefill.good)
    async with start_worker(load_engine(), connect_timeout_s=0.5) as worker:
        await worker.generate("s", _PROMPT, [bad.address, good.address])
        assert (await worker.outcomes(1))["s"].tokens == expected
        assert bad.count(Prefill) == 0
        assert list(worker.peers.stats()) == ["good"]
        await worker.assert_nothing_is_left()


async def test_without_several_lanes_the_one_serves(
    load_engine: Any, start_worker: Any, fake_worker: Any, expected: list[int]
) -> None:
    fake = await fake_worker("narrow", fake_prefill.good, takes_lanes=False)
    async with start_worker(load_engine(), max_lanes=3, connect_timeout_s=1.0) as worker:
        await worker.generate("s", _PROMPT, [fake.address])
        assert (await worker.outcomes(1))["s"].tokens == expected
        [path] = worker.peers.stats().values()
        assert path["num_lanes"] == 1
        await worker.assert_nothing_is_left()


async def test_a_path_is_used_unmeasured_where_no_block_is_free_for_it(
    load_engine: Any, start_worker: Any, fake_worker: Any, expected: list[int]
) -> None:
    fake = await fake_worker("good", fake_prefill.good)
    async with start_worker(load_engine()) as worker:
        held = worker.blocks.allocate("held", worker.blocks.num_blocks - 7)
        await worker.generate("s", _PROMPT, [fake.address])
        assert (await worker.outcomes(1))["s"].tokens == expected
        [path] = worker.peers.stats().values()
        assert path["carrier"] == "tcp"
        assert path["bandwidth_bytes_per_s"] is None
        worker.blocks.free(held, "held")
        await worker.assert_nothing_is_left()


# -- a carrier that writes into our memory, with keys ----------------------------------------------


@pytest.fixture
def make_rdma(monkeypatch: pytest.MonkeyPatch) -> Callable[..., MadeHost]:
    """For an engine; however fast it is here, it is not given up for TCP."""
    monkeypatch.setattr("decode_svc.path._TCP_MIN_GAIN", math.inf)

    def make(engine: Any, **options: Any) -> MadeHost:
        return MadeHost(engine.kv_pool.layout, engine.kv_pool.region, **options)

    return make


async def test_keys_are_open_from_before_prefill_to_the_end_of_the_lease(
    load_engine: Any, start_worker: Any, fake_worker: Any, expected: list[int], make_rdma: Any
) -> None:
    engine = load_engine()
    host = make_rdma(engine)
    seen: list[tuple[list[int], set[int]]] = []

    async def watching(fake: FakePrefill, peer: Link, request: Prefill) -> None:
        seen.append((request.keys, set(host.open_keys)))
        await fake_prefill.good(fake, peer, request)

    fake = await fake_worker("good", watching, made_rdma=host)
    async with start_worker(engine, hosts=[host]) as worker:
        for sequence_id in "st":
            await worker.generate(sequence_id, _PROMPT, [fake.address])
            outcome = (await worker.outcomes(1))[sequence_id]
            assert outcome.tokens == expected
            assert outcome.finished.timings["carrier"] == "rdma"
            assert host.open_keys == set()
        [(keys, opened), (other_keys, others_opened)] = seen
        assert keys
        assert set(keys) == opened
        assert set(other_keys) == others_opened
        assert keys != other_keys, "each lease has its own"
        assert len(host.attachments) == 1
        assert not host.attachments[0].is_gone
        await worker.assert_nothing_is_left()
    assert host.attachments[0].is_gone, "the connection has ended"


async def test_keys_are_closed_once_the_writer_has_confirmed_its_abort(
    load_engine: Any, start_worker: Any, fake_worker: Any, make_rdma: Any
) -> None:
    engine = load_engine()
    host = make_rdma(engine)
    fake = await fake_worker("slow", fake_prefill.stalls_in_the_middle, made_rdma=host)
    async with start_worker(engine, hosts=[host], stall_timeout_s=0.3) as worker:
        await worker.generate("s", _PROMPT, [fake.address])
        outcome = (await worker.outcomes(1))["s"]
        assert outcome.finished.code == ErrorCode.PREFILL_UNAVAILABLE
        assert fake.count(Prefill) == 1
        assert host.open_keys == set()
        assert not host.attachments[0].is_gone, "a promise was enough"
        await worker.assert_nothing_is_left()


async def test_a_writer_that_confirms_nothing_is_cut_off_and_its_blocks_are_free(
    load_engine: Any, start_worker: Any, fake_worker: Any, expected: list[int], make_rdma: Any
) -> None:
    engine = load_engine()
    host = make_rdma(engine)
    deaf = await fake_worker(
        "deaf", fake_prefill.stalls_in_the_middle, acks_aborts=False, made_rdma=host
    )
    good = await fake_worker("good", fake_prefill.good)
    async with start_worker(
        engine, hosts=[host], stall_timeout_s=0.3, abort_timeout_s=0.3
    ) as worker:
        await worker.generate("s", _PROMPT, [deaf.address, good.address])
        assert (await worker.outcomes(1))["s"].tokens == expected
        assert host.attachments[0].is_gone
        assert host.open_keys == set()
        await worker.assert_nothing_is_left()


async def test_a_worker_whose_carrier_broke_is_asked_once_more(
    load_engine: Any, start_worker: Any, fake_worker: Any, expected: list[int], make_rdma: Any
) -> None:
    engine = load_engine()
    host = make_rdma(engine, max_attached=1)
    fake = await fake_worker("p", fake_prefill.loses_its_carrier, made_rdma=host)
    async with start_worker(engine, hosts=[host]) as worker:
        await worker.generate("s", _PROMPT, [fake.address])
        outcome = (await worker.outcomes(1))["s"]
        assert outcome.tokens == expected, outcome.finished.message
        assert outcome.finished.timings["carrier"] == "tcp"
        assert fake.count(Prefill) == fake.num_connections == 2
        assert host.attachments[0].is_gone
        [path] = worker.peers.stats().values()
        assert path["passed_over"] == {"rdma": "the link is down"}
        await worker.assert_nothing_is_left()


async def test_a_worker_whose_carrier_breaks_again_is_left_for_the_next_one(
    load_engine: Any, start_worker: Any, fake_worker: Any, expected: list[int], make_rdma: Any
) -> None:
    engine = load_engine()
    host = make_rdma(engine)
    bad = await fake_worker("bad", fake_prefill.loses_its_carrier, made_rdma=host)
    good = await fake_worker("good", fake_prefill.good)
    async with start_worker(engine, hosts=[host]) as worker:
        await worker.generate("s", _PROMPT, [bad.address, good.address])
        outcome = (await worker.outcomes(1))["s"]
        assert outcome.tokens == expected
        assert outcome.finished.timings["prefill_worker"] == "good"
        assert bad.count(Prefill) == bad.num_connections == 2
        assert [attachment.is_gone for attachment in host.attachments] == [True, True]
        await worker.assert_nothing_is_left()


async def test_every_handoff_of_a_broken_carrier_is_asked_once_more(
    load_engine: Any, start_worker: Any, fake_worker: Any, expected: list[int], make_rdma: Any
) -> None:
    """One of them finds that it broke; the others see no more than the end of their connection."""
    engine = load_engine()
    host = make_rdma(engine, max_attached=1)
    num_asked = 0
    all_asked = asyncio.Event()

    async def breaks_for_one(fake: FakePrefill, peer: Link, request: Prefill) -> None:
        nonlocal num_asked
        if not request.carrier:
            await fake_prefill.good(fake, peer, request)
            return
        num_asked += 1
        if num_asked == 4:
            all_asked.set()
        await all_asked.wait()
        if request.sequence_id == "s2":
            await fake_prefill.loses_its_carrier(fake, peer, request)

    fake = await fake_worker("p", breaks_for_one, made_rdma=host)
    async with start_worker(engine, hosts=[host]) as worker:
        for index in range(4):
            await worker.generate(f"s{index}", _PROMPT, [fake.address])
        for outcome in (await worker.outcomes(4)).values():
            assert outcome.tokens == expected, outcome.finished.message
        assert fake.num_connections == 2
        assert fake.count(Prefill) == 8
        await worker.assert_nothing_is_left()


async def test_keys_that_cannot_be_opened_end_the_attempt_before_anybody_is_asked(
    load_engine: Any, start_worker: Any, fake_worker: Any, expected: list[int], make_rdma: Any
) -> None:
    engine = load_engine()
    host = make_rdma(engine, max_attached=1, num_keys_left=3)  # the three probes
    fake = await fake_worker("p", fake_prefill.good, made_rdma=host)
    async with start_worker(engine, hosts=[host]) as worker:
        await worker.generate("s", _PROMPT, [fake.address])
        outcome = (await worker.outcomes(1))["s"]
        assert outcome.tokens == expected, outcome.finished.message
        assert outcome.finished.timings["carrier"] == "tcp"
        assert fake.count(Prefill) == 1
        await worker.assert_nothing_is_left()


async def test_a_worker_that_speaks_of_a_lost_carrier_on_tcp_is_not_asked_again(
    load_engine: Any, start_worker: Any, fake_worker: Any
) -> None:
    async def confused(fake: FakePrefill, peer: Link, request: Prefill) -> None:
        key = (request.sequence_id, request.generation)
        await peer.send(Abort(*key, code=ErrorCode.CARRIER_LOST, message="which one?"))
        await peer.send(AbortAck(*key))

    fake = await fake_worker("p", confused)
    async with start_worker(load_engine()) as worker:
        await worker.generate("s", _PROMPT, [fake.address])
        outcome = (await worker.outcomes(1))["s"]
        assert outcome.finished.code == ErrorCode.PREFILL_UNAVAILABLE
        assert fake.count(Prefill) == 1
        await worker.assert_nothing_is_left()
