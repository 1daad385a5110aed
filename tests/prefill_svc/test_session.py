"""One connection of a prefill worker: probes, mapped memory, forms of KV, descriptions."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from kvproto.blocks import BlockPool
from kvproto.convert import RowConverter
from kvproto.description import described_geometry
from kvproto.errors import CarrierLost, ErrorCode
from kvproto.geometry import KvGeometry
from kvproto.handshake import Identity
from kvproto.lease import LeaseTable, Part
from kvproto.mapped_host import Attachment, MappedHost
from kvproto.messages import (
    Abort,
    AbortAck,
    Attached,
    Commit,
    CommitAck,
    Describe,
    Description,
    Error,
    Heartbeat,
    Offer,
    Prefill,
    Probe,
    Started,
)
from kvproto.region import Region
from kvproto.tcp import Peer, connect
from prefill_svc.rdma_pool import RdmaPool
from tests.prefill_svc.conftest import Decode

_PROMPT = [(7 * i + 3) % 256 for i in range(100)]


async def _grant_probe(decode: Decode, generation: int, num_tokens: int = 40) -> Probe:
    table = decode.blocks.allocate("p", -(-num_tokens // decode.engine.kv_pool.layout.block_size))
    decode.leases.grant("p", generation, table, num_tokens)
    return Probe("p", generation, num_tokens)


async def test_a_probe_fills_the_lease_and_commits(start_worker: Any) -> None:
    async with start_worker() as worker:
        decode = await worker.connect()
        await decode.peer.send(await _grant_probe(decode, 1))
        commit = await decode.receive(Commit)
        assert decode.leases.commit(commit)
        await decode.peer.send(CommitAck("p", 1))
        await worker.assert_nothing_is_left()


async def test_a_probe_over_a_carrier_that_is_not_open_is_refused(start_worker: Any) -> None:
    async with start_worker() as worker:
        decode = await worker.connect()
        await decode.peer.send(replace(await _grant_probe(decode, 1), carrier="mapped"))
        abort = await decode.receive(Abort)
        assert abort.code == ErrorCode.LEASE
        assert "'mapped' is not open" in abort.message
        await decode.receive(AbortAck)


async def test_a_probe_that_is_aborted_writes_no_more(start_worker: Any) -> None:
    async with start_worker() as worker:
        decode = await worker.connect()
        # Both in one read: the probe has not begun when its abort is seen.
        await decode.peer.send(await _grant_probe(decode, 1))
        await decode.peer.send(Abort("p", 1, code=ErrorCode.CANCELLED, message="enough"))
        decode.leases.revoke(1)
        async with asyncio.timeout(10):
            while not isinstance(await decode.peer.receive(), AbortAck):
                pass
        assert decode.leases.quiesced(1)
        decode.leases.release(1)
        # And the connection serves on.
        await decode.ask("s", _PROMPT, 2)
        await decode.commit()


async def test_one_probe_at_a_time(start_worker: Any) -> None:
    async with start_worker() as worker:
        decode = await worker.connect()
        first = await _grant_probe(decode, 1)
        await decode.peer.send(first)
        await decode.peer.send(replace(first, generation=2))
        abort = await decode.receive(Abort)
        assert (abort.generation, abort.code) == (2, ErrorCode.OVERLOADED)
        await decode.receive(AbortAck)
        assert decode.leases.commit(await decode.receive(Commit))


async def test_a_worker_describes_its_kv(start_worker: Any) -> None:
    async with start_worker() as worker:
        decode = await worker.connect()
        await decode.peer.send(Describe())
        answer = await decode.receive(Description)
        geometry = decode.engine.facts.geometry
        assert described_geometry(answer.layers, answer.dtype) == geometry


async def test_an_offer_of_an_unknown_carrier_is_answered_by_a_reason(start_worker: Any) -> None:
    async with start_worker() as worker:
        decode = await worker.connect()
        await decode.peer.send(Offer("pigeon", bytes(32)))
        answer = await decode.receive(Attached)
        assert answer.nonce == bytes(32)
        assert "pigeon" in answer.reason
        await decode.peer.send(Offer("pigeon", bytes(32)))
        error = await decode.receive(Error)
        assert error.code == ErrorCode.UNEXPECTED_MESSAGE


async def test_a_waiting_prompt_sends_heartbeats_until_it_starts(start_worker: Any) -> None:
    async with start_worker(kv_pool_nbytes=1 << 19) as worker:
        decode = await worker.connect()
        # The first prompt takes the whole pool for as long as its commit is not acknowledged.
        tokens = [(5 * i + 1) % 256 for i in range(500)]
        await decode.ask("first", tokens, 1)
        await decode.receive(Started)
        waiting = Prefill("second", 2, tokens=_PROMPT, timeout_s=20.0, heartbeat_s=0.05)
        table = decode.tables["second"] = decode.blocks.allocate("second", 7)
        decode.leases.grant("second", 2, table, len(_PROMPT))
        commit = await decode.receive(Commit)
        await decode.peer.send(waiting)
        for _ in range(3):
            beat = await decode.receive(Heartbeat)
            assert (beat.sequence_id, beat.generation) == ("second", 2)
        decode.leases.commit(commit)
        await decode.peer.send(CommitAck("first", 1))
        await decode.receive(Started)
        await decode.commit()
        await worker.assert_nothing_is_left()


async def test_half_of_the_heads_in_another_dtype_lands_in_its_place(start_worker: Any) -> None:
    async with start_worker() as worker:
        whole = await worker.connect("whole")
        await whole.ask("s", _PROMPT, 1)
        await whole.commit()
        decode = await worker.connect("parts")
        geometry = decode.engine.facts.geometry
        layout = decode.engine.kv_pool.layout
        leases = LeaseTable(
            layout, decode.engine.kv_pool.region, decode.blocks, converter=RowConverter()
        )
        peer = await connect(
            "127.0.0.1",
            worker.port,
            identity=Identity("decode", "parts-2", worker.facts),
            landing=leases,
            timeout_s=10,
        )
        wire = geometry.as_wire("float64", 1)
        parts = [Part(k + 1, "prefill-under-test", wire, k) for k in range(2)]
        table = decode.tables["s"] = decode.blocks.allocate("s", 7)
        leases.grant_parts("s", parts, table, len(_PROMPT))
        for part in parts:
            await peer.send(
                Prefill(
                    "s",
                    part.generation,
                    tokens=_PROMPT,
                    timeout_s=15.0,
                    dtype="float64",
                    first_head=part.first_head,
                    num_heads=1,
                )
            )
        done = []
        async with asyncio.timeout(20):
            while len(done) < 2:
                message = await peer.receive()
                if isinstance(message, Commit):
                    done.append(leases.commit(message))
                    await peer.send(CommitAck("s", message.generation))
        assert done == [False, True]
        num_tokens = len(_PROMPT)
        assert decode.kv_of("s", num_tokens) == whole.kv_of("s", num_tokens)
        peer.abort("the test is over")


@dataclass
class _Owner:
    """A decode worker whose pool is a region that the prefill worker may map."""

    peer: Peer
    host: MappedHost
    region: Region
    leases: LeaseTable
    blocks: BlockPool

    async def attach(self) -> Attachment:
        """Offer the region and wait for the writer."""
        attaching = asyncio.create_task(self.host.attach(self.peer))
        async with asyncio.timeout(10):
            message = await self.peer.receive()
            assert isinstance(message, Attached)
            self.host.attached(self.peer, message)
            return await attaching


@asynccontextmanager
async def _owner(worker: Any, folder: Path) -> AsyncIterator[_Owner]:
    engine = worker.load_engine()
    region = Region.create(engine.kv_pool.layout, "owner")
    host = await MappedHost.start(region, folder)
    blocks = BlockPool(engine.num_blocks)
    leases = LeaseTable(region.layout, region.pool, blocks)
    identity = Identity("decode", "owner", worker.facts)
    peer = await connect("127.0.0.1", worker.port, identity=identity, landing=leases, timeout_s=10)
    try:
        yield _Owner(peer, host, region, leases, blocks)
    finally:
        peer.abort("the test is over")
        await host.close()


async def test_kv_is_copied_into_mapped_memory(start_worker: Any, tmp_path: Path) -> None:
    folder = tmp_path / "sockets"
    async with start_worker(mapped_dir=folder) as worker:
        reference = await worker.connect("reference")
        await reference.ask("s", _PROMPT, 1)
        await reference.commit()
        async with _owner(worker, folder) as owner:
            attachment = await owner.attach()
            table = list(reversed(owner.blocks.allocate("s", 7)))
            owner.leases.grant("s", 1, table, len(_PROMPT), is_placed=True)
            request = Prefill(
                "s", 1, tokens=_PROMPT, timeout_s=15.0, carrier="mapped", block_table=table
            )
            await owner.peer.send(request)
            async with asyncio.timeout(20):
                while not isinstance(message := await owner.peer.receive(), Commit):
                    pass
            owner.leases.commit(message)
            await owner.peer.send(CommitAck("s", 1))
            layout, pool = owner.region.layout, owner.region.pool
            landed = [
                b"".join(
                    bytes(pool[offset : offset + nbytes])
                    for spans in layout.pieces(layer, table, 0, len(_PROMPT))
                    for offset, nbytes in spans
                )
                for layer in range(layout.geometry.num_layers)
            ]
            assert landed == reference.kv_of("s", len(_PROMPT))
            # The end of the TCP connection makes the writer let go of the memory.
            owner.peer.abort("done")
            async with asyncio.timeout(10):
                await attachment.wait_gone()
        await worker.assert_nothing_is_left()


async def test_blocks_that_the_region_does_not_have_are_refused(
    start_worker: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "sockets"
    async with start_worker(mapped_dir=folder) as worker, _owner(worker, folder) as owner:
        await owner.attach()
        request = Prefill(
            "s",
            1,
            tokens=_PROMPT,
            timeout_s=15.0,
            carrier="mapped",
            block_table=[1, 2, 3, 4, 5, 6, owner.blocks.num_blocks],
        )
        before = bytes(owner.region.pool)
        await owner.peer.send(request)
        async with asyncio.timeout(10):
            abort = await owner.peer.receive()
            assert isinstance(abort, Abort)
            assert abort.code == ErrorCode.LEASE
            assert isinstance(await owner.peer.receive(), AbortAck)
        assert bytes(owner.region.pool) == before


async def test_a_probe_of_mapped_memory(start_worker: Any, tmp_path: Path) -> None:
    folder = tmp_path / "sockets"
    async with start_worker(mapped_dir=folder) as worker, _owner(worker, folder) as owner:
        await owner.attach()
        table = owner.blocks.allocate("p", 3)
        owner.leases.grant("p", 1, table, 40, is_placed=True)
        await owner.peer.send(Probe("p", 1, 40, carrier="mapped", block_table=table))
        async with asyncio.timeout(10):
            while not isinstance(message := await owner.peer.receive(), Commit):
                pass
        assert owner.leases.commit(message)


@pytest.mark.parametrize("is_unchecked", [False, True])
async def test_an_asker_may_do_without_digests(start_worker: Any, is_unchecked: bool) -> None:
    async with start_worker() as worker:
        decode = await worker.connect()
        table = decode.blocks.allocate("s", 7)
        decode.leases.grant("s", 1, table, len(_PROMPT), is_checked=not is_unchecked)
        await decode.peer.send(
            Prefill("s", 1, tokens=_PROMPT, timeout_s=15.0, is_unchecked=is_unchecked)
        )
        commit = await decode.receive(Commit)
        assert bool(commit.digests) is not is_unchecked
        assert decode.leases.commit(commit)
        await decode.peer.send(CommitAck("s", 1))


# -- several carriers ------------------------------------------------------------------------------


class _MadeWriter:
    """A writer by "rdma" that notes what it is asked, and breaks when the test says so."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.is_broken = False
        self.num_flushes = 0

    def begin(
        self,
        sequence_id: str,
        generation: int,
        block_table: Sequence[int],
        num_tokens: int,
        *,
        keys: Sequence[int] = (),
        is_checked: bool = True,
    ) -> None:
        self.calls.append(("begin", sequence_id, generation, list(block_table), list(keys)))

    def end(self, sequence_id: str, generation: int) -> None:
        self.calls.append(("end", sequence_id, generation))

    async def write(self, *_: object) -> None:
        if self.is_broken:
            raise CarrierLost("retries exceeded")

    async def flush(self) -> None:
        self.num_flushes += 1
        if self.is_broken:
            raise CarrierLost("retries exceeded")

    async def close(self) -> None:
        self.calls.append(("close",))


class _MadePool:
    """A prefill worker's end of RDMA; answers each offer by one writer, or by a reason."""

    is_open = True

    def __init__(self, reason: str = "") -> None:
        self.reason = reason
        self.writer = _MadeWriter()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.num_offers = 0

    async def answer(self, peer: Peer, offer: Offer, _geometry: KvGeometry) -> _MadeWriter | None:
        self.num_offers += 1
        await self.may_answer.wait()
        await peer.send(Attached(offer.carrier, offer.nonce, self.reason))
        return None if self.reason else self.writer


async def test_offers_of_several_carriers_come_one_after_the_other(
    start_worker: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "sockets"
    rdma = _MadePool()
    async with (
        start_worker(mapped_dir=folder, rdma=cast("RdmaPool", rdma)) as worker,
        _owner(worker, folder) as owner,
    ):
        await owner.peer.send(Offer("rdma", b"n" * 32))
        assert (await _next(owner)).nonce == b"n" * 32
        # Both are open: each probe names one.
        await owner.attach()
        await owner.peer.send(Probe("p", 1, 40, "rdma", [1, 2, 3], [7]))
        assert isinstance(await _next(owner), Commit)
        assert rdma.writer.calls[0] == ("begin", "p", 1, [1, 2, 3], [7])
        table = owner.blocks.allocate("p", 3)
        owner.leases.grant("p", 2, table, 40, is_placed=True)
        await owner.peer.send(Probe("p", 2, 40, carrier="mapped", block_table=table))
        commit = await _next(owner)
        assert isinstance(commit, Commit)
        assert owner.leases.commit(commit)
        assert ("begin", "p", 2, table, []) not in rdma.writer.calls
    assert rdma.writer.calls[-1] == ("close",)


async def _next(owner: _Owner) -> Any:
    """The next message that is not about a single write."""
    async with asyncio.timeout(10):
        while (message := await owner.peer.receive()).__class__.__name__ in ("Placed", "Write"):
            pass
    return message


@pytest.mark.parametrize("reason", ["", "the device is gone"])
async def test_a_second_offer_of_the_same_carrier_is_refused(
    start_worker: Any, reason: str
) -> None:
    rdma = _MadePool(reason)
    async with start_worker(rdma=cast("RdmaPool", rdma)) as worker:
        decode = await worker.connect()
        await decode.peer.send(Offer("rdma", bytes(32)))
        assert (await decode.receive(Attached)).reason == reason
        await decode.peer.send(Offer("rdma", bytes(32)))
        error = await decode.receive(Error)
        assert error.code == ErrorCode.UNEXPECTED_MESSAGE
        assert "one OFFER of each carrier" in error.message
        assert rdma.num_offers == 1


async def test_an_offer_while_another_is_being_answered_is_refused(start_worker: Any) -> None:
    rdma = _MadePool()
    rdma.may_answer.clear()
    async with start_worker(rdma=cast("RdmaPool", rdma)) as worker:
        decode = await worker.connect()
        await decode.peer.send(Offer("rdma", bytes(32)))
        await decode.peer.send(Offer("mapped", bytes(32)))
        error = await decode.receive(Error)
        assert error.code == ErrorCode.UNEXPECTED_MESSAGE
        assert "one after the other" in error.message
        assert rdma.num_offers == 1


async def test_an_offer_of_rdma_to_a_worker_without_it_is_answered_by_a_reason(
    start_worker: Any,
) -> None:
    async with start_worker() as worker:
        decode = await worker.connect()
        await decode.peer.send(Offer("rdma", bytes(32)))
        assert "no carrier 'rdma'" in (await decode.receive(Attached)).reason


async def test_a_carrier_that_breaks_under_a_probe_is_told_once_it_has_ended(
    start_worker: Any,
) -> None:
    rdma = _MadePool()
    async with start_worker(rdma=cast("RdmaPool", rdma)) as worker:
        decode = await worker.connect()
        await decode.peer.send(Offer("rdma", bytes(32)))
        await decode.receive(Attached)
        rdma.writer.is_broken = True
        await decode.peer.send(Probe("p", 1, 40, "rdma", [1, 2, 3], [7]))
        abort = await decode.receive(Abort)
        assert (abort.code, abort.message) == (ErrorCode.CARRIER_LOST, "retries exceeded")
        await decode.receive(AbortAck)
        assert rdma.writer.num_flushes == 1
        # Messages still pass, and TCP serves on.
        await decode.peer.send(await _grant_probe(decode, 2))
        assert decode.leases.commit(await decode.receive(Commit))


async def test_a_prompt_whose_carrier_breaks_is_aborted_with_its_code(start_worker: Any) -> None:
    rdma = _MadePool()
    rdma.writer.is_broken = True
    async with start_worker(rdma=cast("RdmaPool", rdma)) as worker:
        decode = await worker.connect()
        await decode.peer.send(Offer("rdma", bytes(32)))
        await decode.receive(Attached)
        await decode.peer.send(
            Prefill(
                "s",
                1,
                tokens=_PROMPT,
                timeout_s=15.0,
                carrier="rdma",
                block_table=list(range(7)),
                keys=[7],
            )
        )
        abort = await decode.receive(Abort)
        assert (abort.code, abort.message) == (ErrorCode.CARRIER_LOST, "retries exceeded")
        await decode.receive(AbortAck)
        assert rdma.writer.calls[0] == ("begin", "s", 1, list(range(7)), [7])
        await worker.assert_nothing_is_left()
