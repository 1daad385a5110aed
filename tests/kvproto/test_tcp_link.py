"""Links of several lanes on real sockets: order, proof, and every way to come together and part."""

import asyncio
import contextlib
import mmap
import random
from dataclasses import replace

import pytest

from kvproto import tcp_link
from kvproto.blocks import BlockPool
from kvproto.digest import RegionDigests
from kvproto.errors import (
    ConnectionLost,
    DeadlineExceeded,
    ErrorCode,
    HandshakeRefused,
    LeaseError,
    LocalProtocolError,
    PeerError,
    UnexpectedMessage,
)
from kvproto.geometry import KvGeometry, PoolLayout
from kvproto.handshake import Identity
from kvproto.lease import LeaseTable
from kvproto.messages import Abort, AbortAck, Commit, CommitAck, Error, Ping, Started, Write
from kvproto.tcp import connect, serve
from kvproto.tcp_link import Link, Links, open_link

GEOMETRY = KvGeometry.uniform(6, 8, 64, "float16", tuple(f"layers.{index}" for index in range(6)))
NUM_BLOCKS, BLOCK_SIZE = 64, 16
DECODE = Identity("decode", "d", GEOMETRY.facts())
PREFILL = Identity("prefill", "p", GEOMETRY.facts())


class Pool:
    """The side that receives KV: a pool and its leases."""

    def __init__(self):
        self.layout = PoolLayout(GEOMETRY, NUM_BLOCKS, BLOCK_SIZE)
        self.memory = memoryview(mmap.mmap(-1, self.layout.nbytes))
        self.blocks = BlockPool(NUM_BLOCKS)
        self.leases = LeaseTable(self.layout, self.memory, self.blocks)
        self.tables = {}

    def grant(self, generation, num_tokens):
        sequence_id = f"s{generation}"
        table = self.blocks.allocate(sequence_id, -(-num_tokens // BLOCK_SIZE))
        self.tables[generation] = table
        self.leases.grant(sequence_id, generation, table, num_tokens)

    def layer_bytes(self, generation, layer, num_tokens):
        pieces = self.layout.pieces(layer, self.tables[generation], 0, num_tokens)
        return b"".join(self.memory[at : at + nbytes] for region in pieces for at, nbytes in region)


class Listener:
    """The accepting side: its links come out of ``links``, each held until ``release``."""

    def __init__(self, identity, pool=None, tls=None, **options):
        self.identity, self.pool, self.tls = identity, pool, tls
        self.links = asyncio.Queue()
        self.release = asyncio.Event()
        is_complete = None if pool is None else pool.leases.is_complete
        self.joiner = Links(self.hold, is_complete=is_complete, **options)

    async def hold(self, link):
        self.links.put_nowait(link)
        await self.release.wait()

    async def __aenter__(self):
        self.server = await serve(
            "127.0.0.1",
            0,
            identity=self.identity,
            handler=self.joiner.handle,
            landing=None if self.pool is None else self.pool.leases,
            tls=self.tls,
        )
        self.port = self.server.port
        return self

    async def __aexit__(self, *_):
        self.release.set()
        self.server.abort()
        await self.server.wait_closed()


async def dial(port, identity, num_lanes, pool=None, **options):
    return await open_link(
        "127.0.0.1",
        port,
        identity=identity,
        landing=None if pool is None else pool.leases,
        is_complete=None if pool is None else pool.leases.is_complete,
        timeout_s=5.0,
        num_lanes=num_lanes,
        **options,
    )


def lane_of(identity, lane, link_id="link-1"):
    return replace(identity, link_id=link_id, lane=lane)


def write_frame(wire, generation, layer, num_tokens, body=None):
    nbytes = GEOMETRY.write_nbytes(layer, num_tokens)
    message = Write(f"s{generation}", generation, GEOMETRY.layer_names[layer], 0, num_tokens)
    body = bytes([generation]) * nbytes if body is None else body
    return wire.frame(message, [body], GEOMETRY.shape_word(layer, num_tokens))


def commit_of(generation, num_tokens, bodies):
    """COMMIT of bodies by layer."""
    digests = RegionDigests(GEOMETRY)
    for layer, body in enumerate(bodies):
        half = len(body) // 2
        taken = digests.begin(layer, [half, half])
        taken.update(memoryview(body))
        digests.accept(layer, taken)
    nbytes = sum(map(len, bodies))
    return Commit(f"s{generation}", generation, num_tokens, nbytes, digests.values(), 0.0, 0.0, 0.0)


async def send_transfer(link, generation, num_tokens, bodies):
    writer = link.writer(GEOMETRY)
    for layer, body in enumerate(bodies):
        half = len(body) // 2
        view = memoryview(body)
        await writer.write(
            f"s{generation}", generation, layer, 0, num_tokens, [view[:half], view[half:]]
        )
    await writer.flush()
    await link.send(commit_of(generation, num_tokens, bodies))


def random_bodies(num_tokens, seed):
    source = random.Random(seed)
    return [
        source.randbytes(GEOMETRY.write_nbytes(layer, num_tokens))
        for layer in range(GEOMETRY.num_layers)
    ]


async def receive_until(link, kind):
    async with asyncio.timeout(20):
        while not isinstance(message := await link.receive(), kind):
            pass
    return message


async def until_joined(link, num_lanes, until):
    await until(lambda: link.stats()["num_lanes"] == num_lanes)


# -- using a link -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_lanes", [1, 2, 4, 16])
@pytest.mark.parametrize("dialler", ["receiver", "writer"])
def test_transfers_land_whichever_side_dialled(run, until, num_lanes, dialler):
    async def scenario():
        pool = Pool()
        is_receiver = dialler == "receiver"
        listener = Listener(PREFILL) if is_receiver else Listener(DECODE, pool)
        async with listener:
            if is_receiver:
                receiving = await dial(listener.port, DECODE, num_lanes, pool)
                writing = await listener.links.get()
            else:
                writing = await dial(listener.port, PREFILL, num_lanes)
                receiving = await listener.links.get()
            await until_joined(writing, num_lanes, until)
            await until_joined(receiving, num_lanes, until)
            transfers = {generation: random_bodies(300, generation) for generation in (1, 2, 3)}
            async with asyncio.TaskGroup() as tasks:
                for generation, bodies in transfers.items():
                    pool.grant(generation, 300)
                    tasks.create_task(send_transfer(writing, generation, 300, bodies))
                for _ in transfers:
                    commit = await receive_until(receiving, Commit)
                    assert pool.leases.commit(commit)
                    await receiving.send(CommitAck(commit.sequence_id, commit.generation))
                    assert await receive_until(writing, CommitAck)
            for generation, bodies in transfers.items():
                for layer, body in enumerate(bodies):
                    assert pool.layer_bytes(generation, layer, 300) == body
            # Layers were spread over the lanes.
            carried = [lane.stats()["num_bytes_received"] for lane in receiving.lanes]
            assert sum(nbytes > 100_000 for nbytes in carried) == min(num_lanes, 6)
            await writing.close()
            assert receiving.remote.role == "prefill"

    run(scenario())


def test_messages_travel_on_lane_0_in_order(run, until):
    async def scenario():
        async with Listener(PREFILL) as listener:
            client = await dial(listener.port, DECODE, 3)
            served = await listener.links.get()
            await until_joined(served, 3, until)
            before = [lane.stats()["num_frames_received"] for lane in client.lanes]
            for generation in range(1, 100):
                await served.send(Started("s", generation, 0.0))
            for generation in range(1, 100):
                assert await client.receive() == Started("s", generation, 0.0)
            after = [lane.stats()["num_frames_received"] for lane in client.lanes]
            assert [now - then for now, then in zip(after, before, strict=True)] == [99, 0, 0]
            assert client.name == client.control.name
            assert not client.stats()["is_encrypted"]
            await client.flushed()
            closing = asyncio.create_task(served.close())
            assert [message async for message in client] == []
            await closing
            assert served.is_closed

    run(scenario())


def test_over_tls(run, tls):
    async def scenario():
        pool = Pool()
        async with Listener(PREFILL, tls=tls.server) as listener:
            client = await dial(listener.port, DECODE, 3, pool, tls=tls.client)
            served = await listener.links.get()
            pool.grant(1, 100)
            bodies = random_bodies(100, 1)
            await send_transfer(served, 1, 100, bodies)
            assert pool.leases.commit(await receive_until(client, Commit))
            assert pool.layer_bytes(1, 5, 100) == bodies[5]
            assert client.stats()["is_encrypted"]
            client.abort("the test is over")
            await client.wait_closed()

    run(scenario())


def test_a_plain_peer_is_a_link_of_one_lane(run):
    async def scenario():
        async with Listener(PREFILL) as listener:
            peer = await connect("127.0.0.1", listener.port, identity=DECODE, timeout_s=5.0)
            link = await listener.links.get()
            await link.send(AbortAck("s", 1))
            assert await peer.receive() == AbortAck("s", 1)
            await peer.send(AbortAck("s", 2))
            assert await link.receive() == AbortAck("s", 2)
            await peer.close()
            with pytest.raises(ConnectionLost) as excinfo:
                await link.receive()
            assert excinfo.value.clean

    run(scenario())


# -- COMMIT that overtakes ----------------------------------------------------------------------


def test_commit_waits_for_writes_of_other_lanes(run, raw_peer, wire, until):
    async def scenario():
        pool = Pool()
        async with Listener(DECODE, pool) as listener:
            lanes = [
                await raw_peer.connect(listener.port, lane_of(PREFILL, lane)) for lane in (0, 1)
            ]
            link = await listener.links.get()
            await until_joined(link, 2, until)
            pool.grant(1, 10)
            bodies = random_bodies(10, 1)
            for layer in range(5):
                await lanes[0].write(write_frame(wire, 1, layer, 10, bodies[layer]))
            lanes[0].send(commit_of(1, 10, bodies))
            lanes[0].send(Started("behind", 1, 0.0))
            # What was sent behind COMMIT comes first, because the last layer is missing.
            assert (await receive_until(link, Started | Commit)).sequence_id == "behind"
            last = write_frame(wire, 1, 5, 10, bodies[5])
            await lanes[1].write(last[:-1])
            await until(lambda: not pool.leases.quiesced(1))
            lanes[0].send(Started("again", 1, 0.0))
            assert (await receive_until(link, Started | Commit)).sequence_id == "again"
            await lanes[1].write(last[-1:])
            assert pool.leases.commit(await receive_until(link, Commit))
            for lane in lanes:
                lane.kill()

    run(scenario())


def test_commit_of_bytes_that_never_come_is_not_delivered(run, raw_peer, wire, until):
    """The receiver's deadline ends such a transfer; ABORT and its acknowledgement go through."""

    async def scenario():
        pool = Pool()
        async with Listener(DECODE, pool) as listener:
            lane, other = [
                await raw_peer.connect(listener.port, lane_of(PREFILL, number)) for number in (0, 1)
            ]
            link = await listener.links.get()
            await until_joined(link, 2, until)
            pool.grant(1, 10)
            lane.send(commit_of(1, 10, random_bodies(10, 1)))
            lane.send(Started("s1", 1, 0.0))
            assert isinstance(await link.receive(), Started)
            pool.leases.revoke(1)
            await link.send(Abort("s1", 1, ErrorCode.DEADLINE_EXCEEDED, "stalled"))
            await lane.receive_until(Abort)
            lane.send(AbortAck("s1", 1))
            other.send(AbortAck("s1", 1))
            assert await link.receive() == AbortAck("s1", 1)
            pool.leases.release(1)
            # The COMMIT went with its transfer.
            lane.send(Started("s2", 2, 0.0))
            assert isinstance(await link.receive(), Started)
            lane.kill()
            other.kill()

    run(scenario())


def test_on_one_lane_a_commit_that_lacks_bytes_is_delivered_at_once(run, raw_peer, wire):
    """Nothing can be on its way behind it: the receiver finds what is missing."""

    async def scenario():
        pool = Pool()
        async with Listener(DECODE, pool) as listener:
            lane = await raw_peer.connect(listener.port, PREFILL)
            link = await listener.links.get()
            pool.grant(1, 10)
            lane.send(commit_of(1, 10, random_bodies(10, 1)))
            commit = await link.receive()
            with pytest.raises(LeaseError, match="incomplete"):
                pool.leases.check(commit)
            lane.kill()

    run(scenario())


def test_commit_is_delivered_before_the_end(run, raw_peer, wire, until):
    """The writer closes all lanes behind its last word; lane 0 is the first that ends."""

    async def scenario():
        pool = Pool()
        async with Listener(DECODE, pool) as listener:
            lanes = [
                await raw_peer.connect(listener.port, lane_of(PREFILL, lane)) for lane in (0, 1)
            ]
            link = await listener.links.get()
            await until_joined(link, 2, until)
            pool.grant(1, 10)
            bodies = random_bodies(10, 1)
            lanes[0].send(commit_of(1, 10, bodies))
            await lanes[0].close()
            await until(lambda: link.control.error is not None)
            for layer in range(6):
                await lanes[1].write(write_frame(wire, 1, layer, 10, bodies[layer]))
            await lanes[1].close()
            assert pool.leases.commit(await receive_until(link, Commit))
            with pytest.raises(ConnectionLost) as excinfo:
                await receive_until(link, Commit)
            assert excinfo.value.clean

    run(scenario())


def test_commits_that_wait_are_bounded(run, raw_peer, until, monkeypatch):
    monkeypatch.setattr(tcp_link, "MAX_WAITING", 2)

    async def scenario():
        pool = Pool()
        async with Listener(DECODE, pool) as listener:
            lane, other = [
                await raw_peer.connect(listener.port, lane_of(PREFILL, number)) for number in (0, 1)
            ]
            link = await listener.links.get()
            await until_joined(link, 2, until)
            for generation in (1, 2, 3):
                pool.grant(generation, 10)
                lane.send(commit_of(generation, 10, random_bodies(10, 1)))
            lane.send(Started("s", 1, 0.0))
            assert isinstance(await link.receive(), Started)
            for generation in (1, 2, 3):
                pool.leases.revoke(generation)
                pool.leases.release(generation)
            # The first had to go; the others are delivered, now that their leases are gone.
            assert [(await link.receive()).generation for _ in (2, 3)] == [2, 3]
            lane.kill()
            other.kill()

    run(scenario())


# -- ABORT_ACK ----------------------------------------------------------------------------------


def test_abort_ack_counts_when_it_has_come_on_every_lane(run, raw_peer, wire, until):
    async def scenario():
        pool = Pool()
        async with Listener(DECODE, pool) as listener:
            lanes = [
                await raw_peer.connect(listener.port, lane_of(PREFILL, lane)) for lane in (0, 1, 2)
            ]
            link = await listener.links.get()
            await until_joined(link, 3, until)
            pool.grant(1, 200)
            slow = write_frame(wire, 1, 1, 200)
            await lanes[1].write(slow[:1000])
            await until(lambda: not pool.leases.quiesced(1))
            pool.leases.revoke(1)
            for number in (0, 2):
                lanes[number].send(AbortAck("s1", 1))
            # Twice on one lane is not twice as good.
            lanes[0].send(AbortAck("s1", 1))
            lanes[0].send(Started("marker", 1, 0.0))
            assert isinstance(await link.receive(), Started)
            # Lane 1 still writes into quarantined blocks, and something late is refused.
            await lanes[1].write(slow[1000:] + write_frame(wire, 1, 4, 200))
            lanes[1].send(AbortAck("s1", 1))
            assert await receive_until(link, AbortAck) == AbortAck("s1", 1)
            assert pool.leases.quiesced(1)
            pool.leases.release(1)
            assert link.stats()["num_writes_refused"] == 1
            for lane in lanes:
                lane.kill()

    run(scenario())


def test_abort_ack_is_sent_behind_the_last_write_of_every_lane(run, until):
    async def scenario():
        pool = Pool()
        async with Listener(PREFILL) as listener:
            receiving = await dial(listener.port, DECODE, 4, pool)
            writing = await listener.links.get()
            await until_joined(writing, 4, until)
            pool.grant(1, 900)
            writer = writing.writer(GEOMETRY)
            for layer, body in enumerate(random_bodies(900, 1)):
                await writer.write("s1", 1, layer, 0, 900, [memoryview(body)])
            await writing.send(AbortAck("s1", 1))
            seen = []
            while not seen or not isinstance(seen[-1], AbortAck):
                seen.append(await receiving.receive())
            assert [type(message) for message in seen] == [Write] * 6 + [AbortAck]
            assert pool.leases.landed_nbytes(1) == GEOMETRY.prompt_nbytes(900)
            receiving.abort("the test is over")

    run(scenario())


def test_a_lane_that_comes_late_is_told_what_was_promised(run, raw_peer):
    async def scenario():
        async with Listener(PREFILL) as listener:
            control = await raw_peer.connect(listener.port, lane_of(DECODE, 0))
            link = await listener.links.get()
            await link.send(AbortAck("s1", 1))
            assert await control.receive_until(AbortAck) == AbortAck("s1", 1)
            late = await raw_peer.connect(listener.port, lane_of(DECODE, 1))
            assert await late.receive_until(AbortAck) == AbortAck("s1", 1)
            await link.send(AbortAck("s2", 2))
            for lane in (control, late):
                assert await lane.receive_until(AbortAck) == AbortAck("s2", 2)
            for lane in (control, late):
                lane.kill()

    run(scenario())


def test_a_transfer_keeps_the_lanes_it_began_with(run, raw_peer, until):
    async def scenario():
        async with Listener(PREFILL) as listener:
            control = await raw_peer.connect(listener.port, lane_of(DECODE, 0))
            link = await listener.links.get()
            writer = link.writer(GEOMETRY)
            bodies = [memoryview(body) for body in random_bodies(1, 1)]
            await writer.write("s1", 1, 0, 0, 1, [bodies[0]])
            late = await raw_peer.connect(listener.port, lane_of(DECODE, 1))
            await until_joined(link, 2, until)
            assert link.lanes_of("s1", 1) == link.lanes[:1]
            assert link.lanes_of("s2", 2) == link.lanes
            await link.send(commit_of(1, 1, random_bodies(1, 1)))
            await link.send(AbortAck("s2", 2))
            # Both transfers are over, and forgotten.
            assert link._lanes_of == {}
            for lane in (control, late):
                lane.kill()

    run(scenario())


def test_promises_are_kept_for_late_lanes_up_to_a_bound(run, raw_peer, monkeypatch):
    monkeypatch.setattr(tcp_link, "MAX_WAITING", 2)

    async def scenario():
        async with Listener(PREFILL) as listener:
            control = await raw_peer.connect(listener.port, lane_of(DECODE, 0))
            link = await listener.links.get()
            for generation in (1, 2, 3):
                await link.send(AbortAck("s", generation))
            late = await raw_peer.connect(listener.port, lane_of(DECODE, 1))
            assert (await late.receive_until(Error)).field == "lane"
            for lane in (control, late):
                lane.kill()

    run(scenario())


# -- the end ------------------------------------------------------------------------------------


def test_a_lane_cut_in_the_middle_of_a_transfer_ends_the_link(run, raw_peer, wire, until):
    async def scenario():
        pool = Pool()
        async with Listener(DECODE, pool) as listener:
            lanes = [
                await raw_peer.connect(listener.port, lane_of(PREFILL, lane)) for lane in (0, 1, 2)
            ]
            link = await listener.links.get()
            await until_joined(link, 3, until)
            pool.grant(1, 200)
            await lanes[0].write(write_frame(wire, 1, 0, 200))
            for number in (1, 2):
                await lanes[number].write(write_frame(wire, 1, number, 200)[:5000])
            await until(lambda: pool.leases.stats()["num_writing"] == 2)
            lanes[1].kill()
            with pytest.raises(ConnectionLost) as excinfo:
                await receive_until(link, Commit)
            assert not excinfo.value.clean
            # The proof: no lane is left, also not the one that was in the middle of a WRITE.
            await link.wait_closed()
            assert link.is_closed
            assert pool.leases.quiesced(1)
            pool.leases.revoke(1)
            pool.leases.release(1)
            assert pool.blocks.num_free_blocks == NUM_BLOCKS
            with pytest.raises(ConnectionLost):
                await link.send(Abort("s1", 1, 9, ""))
            for number in (0, 2):
                with contextlib.suppress(ConnectionResetError):
                    await lanes[number].read_all()
                await lanes[number].close()

    run(scenario())


def test_iteration_raises_if_the_end_is_not_clean(run, raw_peer):
    async def scenario():
        async with Listener(PREFILL) as listener:
            control = await raw_peer.connect(listener.port, lane_of(DECODE, 0))
            link = await listener.links.get()
            control.send(CommitAck("s", 1))
            iterator = aiter(link)
            assert await anext(iterator) == CommitAck("s", 1)
            await control.write(b"half a frame")
            await control.close()
            with pytest.raises(ConnectionLost):
                await anext(iterator)

    run(scenario())


def test_a_link_over_a_connection_that_is_gone_already(run):
    async def scenario():
        async with Listener(PREFILL) as listener:
            peer = await connect("127.0.0.1", listener.port, identity=DECODE, timeout_s=5.0)
            peer.abort("the test says so")
            await peer.wait_closed()
            link = Link(peer)
            with pytest.raises(ConnectionLost, match="the test says so"):
                await link.receive()
            with pytest.raises(HandshakeRefused):
                await link.join(peer, 1)

    run(scenario())


def test_a_writer_learns_that_a_lane_is_gone(run, raw_peer, until):
    async def scenario():
        async with Listener(PREFILL) as listener:
            lanes = [
                await raw_peer.connect(listener.port, lane_of(DECODE, lane)) for lane in (0, 1)
            ]
            link = await listener.links.get()
            await until_joined(link, 2, until)
            lanes[1].kill()
            await until(lambda: link.is_closed)
            writer = link.writer(GEOMETRY)
            for layer in (0, 1):
                body = memoryview(bytes(GEOMETRY.write_nbytes(layer, 1)))
                with pytest.raises(ConnectionLost):
                    await writer.write("s1", 1, layer, 0, 1, [body])
            with pytest.raises(ConnectionLost):
                await writer.flush()
            lanes[0].kill()

    run(scenario())


def test_a_lane_that_closes_gives_the_others_time_to_say_their_last_words(run, raw_peer, until):
    async def scenario():
        async with Listener(PREFILL) as listener:
            lanes = [
                await raw_peer.connect(listener.port, lane_of(DECODE, lane)) for lane in (0, 1)
            ]
            link = await listener.links.get()
            await until_joined(link, 2, until)
            await lanes[1].close()
            await until(lambda: link.lanes[1].is_closed)
            with pytest.raises(ConnectionLost) as excinfo:
                await link.send(Started("s", 1, 0.0))
            assert excinfo.value.clean
            lanes[0].send(CommitAck("s", 1))
            assert await link.receive() == CommitAck("s", 1)
            await lanes[0].close()
            with pytest.raises(ConnectionLost) as excinfo:
                await link.receive()
            assert excinfo.value.clean
            await until(link._closing_timer.cancelled)

    run(scenario())


def test_a_peer_that_closes_one_lane_alone_is_cut_off(run, raw_peer, until, monkeypatch):
    monkeypatch.setattr(tcp_link, "CLOSE_LINGER_S", 0.05)

    async def scenario():
        async with Listener(PREFILL) as listener:
            lanes = [
                await raw_peer.connect(listener.port, lane_of(DECODE, lane)) for lane in (0, 1)
            ]
            link = await listener.links.get()
            await until_joined(link, 2, until)
            await lanes[1].close()
            with pytest.raises(ConnectionLost, match="lane 1 of this link was closed"):
                await link.receive()
            lanes[0].kill()

    run(scenario())


def test_a_message_on_the_wrong_lane_ends_the_link(run, raw_peer, until):
    async def scenario():
        async with Listener(PREFILL) as listener:
            lanes = [
                await raw_peer.connect(listener.port, lane_of(DECODE, lane)) for lane in (0, 1)
            ]
            link = await listener.links.get()
            await until_joined(link, 2, until)
            lanes[1].send(Ping(1))
            lanes[1].send(CommitAck("s", 1))
            with pytest.raises(
                ConnectionLost, match="COMMIT_ACK on a lane that is for WRITEs"
            ) as e:
                await link.receive()
            assert isinstance(e.value.__cause__, UnexpectedMessage)
            for lane in lanes:
                lane.kill()

    run(scenario())


def test_a_refused_write_is_told_on_its_lane(run, until):
    async def scenario():
        pool = Pool()
        async with Listener(DECODE, pool) as listener:
            writing = await dial(listener.port, PREFILL, 2)
            link = await listener.links.get()
            await until_joined(link, 2, until)
            body = memoryview(bytes(GEOMETRY.write_nbytes(1, 1)))
            await writing.writer(GEOMETRY).write("s1", 1, 1, 0, 1, [body])
            error = await writing.receive()
            assert (error.code, error.sequence_id) == (ErrorCode.LEASE, "s1")
            await writing.close()

    run(scenario())


def test_a_handler_that_fails_takes_its_own_link_along(run, until, caplog):
    async def scenario():
        async def handler(link):
            if (await link.receive()).sequence_id == "bad":
                raise RuntimeError("handler bug")
            await link.send(CommitAck("s", 1))

        server = await serve("127.0.0.1", 0, identity=DECODE, handler=Links(handler).handle)
        good, bad = await dial(server.port, PREFILL, 2), await dial(server.port, PREFILL, 2)
        await bad.send(Started("bad", 1, 0.0))
        with pytest.raises(ConnectionLost) as excinfo:
            await bad.receive()
        assert not excinfo.value.clean
        await good.send(Started("good", 1, 0.0))
        assert [message async for message in good] == [CommitAck("s", 1)]
        for link in (good, bad):
            await link.close()
            await link.wait_closed()
        await until(lambda: server.num_peers == 0)
        await server.close()

    run(scenario())
    assert "handler bug" in caplog.text


def test_a_server_that_closes_ends_its_links_cleanly(run):
    async def scenario():
        async def handler(link):
            async for _ in link:
                pass

        links = Links(handler)
        server = await serve("127.0.0.1", 0, identity=DECODE, handler=links.handle)
        link = await dial(server.port, PREFILL, 3)
        closing = asyncio.create_task(server.close())
        assert [message async for message in link] == []
        await link.close()
        await closing
        assert links._links == {}

    run(scenario())


# -- coming together ----------------------------------------------------------------------------


def test_a_foreign_lane_is_refused_and_the_link_does_not_notice(run, raw_peer):
    async def scenario():
        async with Listener(PREFILL) as listener:
            control = await raw_peer.connect(listener.port, lane_of(DECODE, 0))
            link = await listener.links.get()
            foreign = await raw_peer.connect(
                listener.port, lane_of(replace(DECODE, instance_id="other"), 1)
            )
            error = await foreign.receive_until(Error)
            assert (error.code, error.field) == (ErrorCode.INCOMPATIBLE, "link_id")
            assert "another instance's" in error.message
            assert await foreign.read_all() == b""
            assert len(link.lanes) == 1
            control.send(CommitAck("s", 1))
            assert await link.receive() == CommitAck("s", 1)
            for lane in (control, foreign):
                lane.kill()

    run(scenario())


def test_a_lane_without_lane_0_is_refused_after_a_while(run, raw_peer):
    async def scenario():
        async with Listener(PREFILL, join_timeout_s=0.05) as listener:
            lane = await raw_peer.connect(listener.port, lane_of(DECODE, 1, "unknown"))
            error = await lane.receive_until(Error)
            assert "no lane 0 of that link is open" in error.message
            lane.kill()

    run(scenario())


def test_a_lane_may_come_before_lane_0(run, raw_peer, until):
    async def scenario():
        async with Listener(PREFILL) as listener:
            early = await raw_peer.connect(listener.port, lane_of(DECODE, 1))
            control = await raw_peer.connect(listener.port, lane_of(DECODE, 0))
            link = await listener.links.get()
            await until_joined(link, 2, until)
            for lane in (early, control):
                lane.kill()

    run(scenario())


@pytest.mark.parametrize(("lane", "field"), [(0, "link_id"), (1, "lane")])
def test_a_lane_that_is_there_already(run, raw_peer, until, lane, field):
    async def scenario():
        async with Listener(PREFILL) as listener:
            lanes = [await raw_peer.connect(listener.port, lane_of(DECODE, n)) for n in (0, 1)]
            link = await listener.links.get()
            await until_joined(link, 2, until)
            again = await raw_peer.connect(listener.port, lane_of(DECODE, lane))
            assert (await again.receive_until(Error)).field == field
            assert len(link.lanes) == 2
            for each in (*lanes, again):
                each.kill()

    run(scenario())


def test_a_lane_that_comes_too_late(run, raw_peer, until):
    async def scenario():
        async with Listener(PREFILL, join_timeout_s=0.05) as listener:
            control = await raw_peer.connect(listener.port, lane_of(DECODE, 0))
            link = await listener.links.get()
            await until(lambda: link._sent_acks is None)
            late = await raw_peer.connect(listener.port, lane_of(DECODE, 1))
            assert (
                "open all lanes of a new link at once" in (await late.receive_until(Error)).message
            )
            for lane in (control, late):
                lane.kill()

    run(scenario())


@pytest.mark.parametrize("num_lanes", [0, -1, 17])
async def test_a_number_of_lanes_that_cannot_be(num_lanes):
    with pytest.raises(LocalProtocolError, match="a link has 1 to 16"):
        await dial(1, DECODE, num_lanes)


class Switch:
    """Forwards the first connection to one port and the others to another, or to nobody."""

    def __init__(self, first, others):
        self.ports = [first]
        self.others = others
        self.num_waiting = 0

    async def __aenter__(self):
        self.listener = await asyncio.start_server(self.accept, "127.0.0.1", 0)
        self.port = self.listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self.listener.close()

    async def accept(self, reader, writer):
        port = self.ports.pop() if self.ports else self.others
        if port is None:
            self.num_waiting += 1
            with contextlib.suppress(ConnectionError):
                await reader.read(-1)
            writer.close()
            return
        there = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.pump(reader, there[1]))
            tasks.create_task(self.pump(there[0], writer))

    async def pump(self, reader, writer):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()


def test_another_instance_on_a_further_lane(run):
    async def scenario():
        async with (
            Listener(PREFILL) as first,
            Listener(replace(PREFILL, instance_id="new")) as second,
            Switch(first.port, second.port) as switch,
        ):
            with pytest.raises(HandshakeRefused, match="prefill new on another") as excinfo:
                await dial(switch.port, DECODE, 3)
            assert excinfo.value.field == "instance_id"
            link = await first.links.get()
            with pytest.raises(ConnectionLost):
                await link.receive()

    run(scenario())


def test_a_lane_that_does_not_open_takes_the_others_along(run):
    async def scenario():
        async with Listener(PREFILL) as listener, Switch(listener.port, None) as switch:
            with pytest.raises(DeadlineExceeded):
                await open_link(
                    "127.0.0.1", switch.port, identity=DECODE, timeout_s=0.3, num_lanes=3
                )
            link = await listener.links.get()
            with pytest.raises(ConnectionLost):
                await link.receive()

    run(scenario())


def test_a_cancelled_opening_leaves_nothing(run, until):
    async def scenario():
        async with Listener(PREFILL) as listener, Switch(listener.port, None) as switch:
            opening = asyncio.create_task(dial(switch.port, DECODE, 3))
            link = await listener.links.get()
            await until(lambda: switch.num_waiting == 2)
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            with pytest.raises(ConnectionLost):
                await link.receive()

    run(scenario())


def test_a_server_without_room_for_all_lanes(run):
    async def scenario():
        async def handler(link):
            async for _ in link:
                pass

        server = await serve(
            "127.0.0.1", 0, identity=PREFILL, handler=Links(handler).handle, max_peers=2
        )

        async def dial_and_listen():
            # A refusal follows the handshake: it comes before or after "connected".
            link = await dial(server.port, DECODE, 4)
            while True:
                await link.receive()

        with pytest.raises((ConnectionLost, PeerError), match="serves 2 peers"):
            await dial_and_listen()
        await server.close()

    run(scenario())
