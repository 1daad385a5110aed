"""KV bytes over real sockets: whole transfers, torn ones, and blocks used again."""

import asyncio
import itertools
import mmap
import random
import socket
from dataclasses import replace

import pytest

from kvproto.blocks import BlockPool
from kvproto.digest import RegionDigests, digest_blocks
from kvproto.errors import ConnectionLost, DigestMismatch, ErrorCode, LocalProtocolError
from kvproto.geometry import KvGeometry, PoolLayout
from kvproto.handshake import Identity
from kvproto.lease import LeaseTable
from kvproto.messages import Abort, AbortAck, Commit, CommitAck, Error, Started, Write
from kvproto.tcp import TcpWriter, connect, serve

SMALL = KvGeometry.uniform(2, 2, 8, "float32", ("layers.0", "layers.1"))
# Large enough that one WRITE is received into the pool itself.
LARGE = KvGeometry.uniform(2, 8, 128, "float16", ("layers.0", "layers.1"))
BLOCK_SIZE = 4


class Receiver:
    """A decode worker reduced to its pool: grants leases, commits, keeps what happened."""

    def __init__(self, geometry=SMALL, num_blocks=64, block_size=BLOCK_SIZE):
        self.layout = PoolLayout(geometry, num_blocks, block_size)
        self.pool = memoryview(mmap.mmap(-1, self.layout.nbytes))
        self.blocks = BlockPool(num_blocks)
        self.leases = LeaseTable(self.layout, self.pool, self.blocks)
        self.tables: dict[int, list[int]] = {}
        self.identity = Identity("decode", "d", geometry.facts())
        self.messages: asyncio.Queue = asyncio.Queue()
        self.lost: list[str] = []
        self.peers: asyncio.Queue = asyncio.Queue()

    def grant(self, generation, num_tokens):
        sequence_id = f"s{generation}"
        num_blocks = -(-num_tokens // self.layout.block_size)
        table = self.tables[generation] = self.blocks.allocate(sequence_id, num_blocks)
        self.leases.grant(sequence_id, generation, table, num_tokens)

    def region_bytes(self, generation, layer, region, num_tokens):
        spans = self.layout.pieces(layer, self.tables[generation], 0, num_tokens)[region]
        return b"".join(self.pool[start : start + nbytes] for start, nbytes in spans)

    def commit(self, commit):
        self.leases.commit(commit)
        # What lies in the pool is what was announced, not only what arrived.
        table = self.tables[commit.generation]
        assert digest_blocks(self.layout, self.pool, table, commit.num_tokens) == commit.digests

    async def handle(self, peer):
        self.peers.put_nowait(peer)
        try:
            async for message in peer:
                if not isinstance(message, Write):
                    self.messages.put_nowait((peer, message))
        except ConnectionLost as exc:
            self.lost.append(exc.reason)

    async def serve(self):
        return await serve(
            "127.0.0.1", 0, identity=self.identity, handler=self.handle, landing=self.leases
        )

    def prefill(self, instance_id="p"):
        return Identity("prefill", instance_id, self.layout.geometry.facts())

    async def dial(self, server, instance_id="p"):
        return await connect(
            "127.0.0.1", server.port, identity=self.prefill(instance_id), timeout_s=5.0
        )

    def frame(self, wire, generation, layer, num_tokens, value, first_token=0):
        """A WRITE frame by hand, its body one repeated byte."""
        geometry = self.layout.geometry
        write = Write(
            f"s{generation}", generation, geometry.layer_names[layer], first_token, num_tokens
        )
        body = bytes([value]) * geometry.write_nbytes(layer, num_tokens)
        return wire.frame(write, [body], geometry.shape_word(layer, num_tokens))


def row_nbytes(geometry):
    """One token's bytes of one region; all regions are alike here."""
    return geometry.row_nbytes(geometry.layers[0].regions[0])


def random_kv(geometry, num_tokens, seed):
    """K and V of every layer, as writable memory of another kind than bytes."""
    source = random.Random(seed)
    nbytes = num_tokens * row_nbytes(geometry)
    return {
        (layer, region): memoryview(bytearray(source.randbytes(nbytes)))
        for layer in range(geometry.num_layers)
        for region in range(2)
    }


async def send_sequence(peer, geometry, generation, num_tokens, kv, chunk_tokens):
    """A whole transfer as a prefill worker sends it: chunk by chunk, layer by layer."""
    writer = TcpWriter(peer, geometry)
    digests = RegionDigests(geometry)
    size = row_nbytes(geometry)
    nbytes = 0
    for first in range(0, num_tokens, chunk_tokens):
        count = min(chunk_tokens, num_tokens - first)
        for layer in range(geometry.num_layers):
            pieces = [kv[layer, region][first * size : (first + count) * size] for region in (0, 1)]
            for region, piece in enumerate(pieces):
                digests.update(layer, region, piece)
                nbytes += piece.nbytes
            await writer.write(f"s{generation}", generation, layer, first, count, pieces)
    await writer.flush()
    await peer.send(
        Commit(f"s{generation}", generation, num_tokens, nbytes, digests.values(), 0.0, 0.0, 0.0)
    )


def test_a_transfer_lands_byte_for_byte(run):
    async def scenario():
        receiver = Receiver(LARGE, num_blocks=80, block_size=16)
        # Not in ascending order, so that the destination has several pieces.
        receiver.blocks.allocate("x", 80)
        receiver.blocks.free([*range(0, 30, 3), *range(40, 75)], "x")
        server = await receiver.serve()
        peer = await receiver.dial(server)
        receiver.grant(1, 700)
        kv = random_kv(LARGE, 700, seed=1)
        await send_sequence(peer, LARGE, 1, 700, kv, chunk_tokens=300)
        _, commit = await receiver.messages.get()
        receiver.commit(commit)
        for (layer, region), sent in kv.items():
            assert receiver.region_bytes(1, layer, region, 700) == sent
        await peer.close()
        await server.close()

    run(scenario())


@pytest.mark.parametrize("thread_min_nbytes", [1, 1 << 30, None])
def test_the_writer_digests_what_it_sends(run, thread_min_nbytes):
    async def scenario():
        receiver = Receiver(LARGE, num_blocks=50, block_size=16)
        server = await receiver.serve()
        peer = await receiver.dial(server)
        receiver.grant(1, 800)
        kv = random_kv(LARGE, 800, seed=2)
        writer = TcpWriter(peer, LARGE, thread_min_nbytes=thread_min_nbytes)
        digests = RegionDigests(LARGE)
        for layer in range(LARGE.num_layers):
            await writer.write("s1", 1, layer, 0, 800, [kv[layer, 0], kv[layer, 1]], digests)
        await writer.flush()
        nbytes = LARGE.prompt_nbytes(800)
        await peer.send(Commit("s1", 1, 800, nbytes, digests.values(), 0.0, 0.0, 0.0))
        _, commit = await receiver.messages.get()
        receiver.commit(commit)
        for (layer, region), sent in kv.items():
            assert receiver.region_bytes(1, layer, region, 800) == sent
        await peer.close()
        await server.close()

    run(scenario())


def test_a_peer_that_sends_a_large_body_slowly_is_alive(run, wire):
    """Fewer bytes than the socket waits for: each keepalive looks at what is there."""

    async def scenario():
        receiver = Receiver(LARGE, num_blocks=64, block_size=16)
        server = await serve(
            "127.0.0.1",
            0,
            identity=receiver.identity,
            handler=receiver.handle,
            landing=receiver.leases,
            keepalive_s=0.2,
        )
        peer = await receiver.dial(server)
        # A PONG must not come between the pieces of the frame that is written by hand.
        peer._driver._pause_reading()
        receiver.grant(1, 1024)
        frame = receiver.frame(wire, 1, 0, 1024, 7)
        (driver,) = server._drivers
        for start in range(0, 100_000, 20_000):
            seen = driver.num_bytes_received
            peer._driver._transport.write(frame[start : start + 20_000])
            async with asyncio.timeout(10.0):
                while driver.num_bytes_received < seen + 20_000:
                    await asyncio.sleep(0.01)
        peer._driver._transport.write(frame[100_000:])
        peer._driver._resume_reading()
        await peer.send(AbortAck("s1", 1))
        await receiver.messages.get()
        assert receiver.region_bytes(1, 0, 0, 1024) == bytes([7]) * 1024 * row_nbytes(LARGE)
        await peer.close()
        await server.close()

    run(scenario())


@pytest.mark.parametrize("kind", ["mmap", "torch"])
def test_memory_of_other_owners_can_be_sent_and_landed_in(run, kind):
    nbytes = LARGE.write_nbytes(1, 512)
    if kind == "mmap":
        memory = memoryview(mmap.mmap(-1, nbytes))
    else:
        torch = pytest.importorskip("torch")
        memory = memoryview(torch.zeros(nbytes, dtype=torch.uint8).numpy())
    memory[:] = random.Random(3).randbytes(nbytes)

    async def scenario():
        receiver = Receiver(LARGE, num_blocks=32, block_size=16)
        if kind == "torch":
            pool = torch.zeros(receiver.layout.nbytes, dtype=torch.uint8)
            receiver.pool = memoryview(pool.numpy())
            receiver.leases = LeaseTable(receiver.layout, receiver.pool, receiver.blocks)
        server = await receiver.serve()
        peer = await receiver.dial(server)
        receiver.grant(1, 512)
        writer = TcpWriter(peer, LARGE)
        half = nbytes // 2
        await writer.write("s1", 1, 1, 0, 512, [memory[:half], memory[half:]])
        await writer.flush()
        await peer.send(AbortAck("s1", 1))
        await receiver.messages.get()
        assert receiver.region_bytes(1, 1, 0, 512) == memory[:half]
        assert receiver.region_bytes(1, 1, 1, 512) == memory[half:]
        await peer.close()
        await server.close()

    run(scenario())


def test_buffers_of_the_wrong_size_are_our_fault(run):
    async def scenario():
        receiver = Receiver()
        server = await receiver.serve()
        peer = await receiver.dial(server)
        with pytest.raises(LocalProtocolError, match="buffers have 5 bytes"):
            await TcpWriter(peer, SMALL).write("s1", 1, 0, 0, 1, [memoryview(b"12345")])
        await peer.close()
        await server.close()

    run(scenario())


def test_sixteen_senders_on_one_connection_never_interleave(run):
    async def scenario():
        receiver = Receiver(num_blocks=16 * 8)
        server = await receiver.serve()
        peer = await receiver.dial(server)
        sequences = {generation: random_kv(SMALL, 30, generation) for generation in range(1, 17)}
        for generation in sequences:
            receiver.grant(generation, 30)
        async with asyncio.TaskGroup() as tasks:
            for generation, kv in sequences.items():
                tasks.create_task(
                    send_sequence(peer, SMALL, generation, 30, kv, 1 + generation % 7)
                )
        for _ in sequences:
            _, commit = await receiver.messages.get()
            receiver.commit(commit)
        for generation, kv in sequences.items():
            for (layer, region), sent in kv.items():
                assert receiver.region_bytes(generation, layer, region, 30) == sent
        await peer.close()
        await server.close()

    run(scenario())


def test_a_stale_generation_is_refused_and_the_connection_survives(run):
    async def scenario():
        receiver = Receiver()
        server = await receiver.serve()
        peer = await receiver.dial(server)
        receiver.grant(1, 4)
        receiver.leases.revoke(1)
        before = bytes(receiver.pool)
        kv = random_kv(SMALL, 4, 1)
        await send_sequence(peer, SMALL, 1, 4, kv, 2)
        error = await peer.receive()
        assert (error.code, error.sequence_id) == (ErrorCode.LEASE, "s1")
        assert "stale generation 1" in error.message
        await receiver.messages.get()
        assert receiver.pool == before
        assert (await receiver.peers.get()).stats()["num_writes_refused"] == 4
        receiver.leases.release(1)
        receiver.grant(2, 4)
        await send_sequence(peer, SMALL, 2, 4, kv, 2)
        _, commit = await receiver.messages.get()
        receiver.commit(commit)
        await peer.close()
        await server.close()

    run(scenario())


@pytest.mark.parametrize("death", ["kill", "close"])
@pytest.mark.parametrize("geometry", [SMALL, LARGE], ids=["small", "large"])
def test_a_peer_that_dies_inside_a_write_gives_its_blocks_back(
    run, raw_peer, wire, until, death, geometry
):
    async def scenario():
        receiver = Receiver(geometry)
        server = await receiver.serve()
        raw = await raw_peer.connect(server.port, receiver.prefill())
        receiver.grant(1, 256)
        frame = receiver.frame(wire, 1, 0, 256, 7)
        await raw.write(frame[: len(frame) // 2])
        await until(lambda: not receiver.leases.quiesced(1))
        # Nobody may have these blocks yet.
        receiver.leases.revoke(1)
        with pytest.raises(LocalProtocolError, match="half received"):
            receiver.leases.release(1)
        if death == "kill":
            raw.kill()
        else:
            await raw.close()
        peer = await receiver.peers.get()
        await peer.wait_closed()
        assert receiver.leases.quiesced(1)
        receiver.leases.release(1)
        assert receiver.blocks.num_free_blocks == 64
        await until(lambda: len(receiver.lost) == 1)
        await server.close()

    run(scenario())


@pytest.mark.parametrize("geometry", [SMALL, LARGE], ids=["small", "large"])
def test_blocks_used_again_after_abort_are_never_written_by_a_slow_writer(
    run, raw_peer, wire, until, geometry
):
    """The writer goes on as if it had heard nothing, one small piece after another."""

    async def scenario():
        receiver = Receiver(geometry)
        server = await receiver.serve()
        raw = await raw_peer.connect(server.port, receiver.prefill())
        receiver.grant(1, 256)
        frames = [receiver.frame(wire, 1, layer, 256, 0xAA) for layer in (0, 1)]
        half = len(frames[0]) // 2
        await raw.write(frames[0][:half])
        await until(lambda: not receiver.leases.quiesced(1))

        # Abort in the middle; everybody else wants blocks at once.
        peer = await receiver.peers.get()
        await peer.send(Abort("s1", 1, ErrorCode.CANCELLED, "client went away"))
        receiver.leases.revoke(1)
        assert receiver.blocks.num_free_blocks == 0
        with pytest.raises(LocalProtocolError):
            receiver.leases.release(1)

        # The rest of the torn write lands in quarantined blocks, the next write is refused.
        data = frames[0][half:] + frames[1]
        for start in range(0, len(data), 50_000):
            await raw.write(data[start : start + 50_000])
        raw.send(AbortAck("s1", 1))
        _, ack = await receiver.messages.get()
        assert ack == AbortAck("s1", 1)
        assert receiver.leases.quiesced(1)
        assert sorted(receiver.leases.release(1)) == list(range(64))

        # The proof is there: another sequence takes the blocks and fills them.
        receiver.grant(2, 256)
        receiver.pool[:] = b"\xee" * receiver.pool.nbytes
        for _ in range(3):
            await raw.write(frames[0] + frames[1])
        raw.send(AbortAck("s1", 1))
        await receiver.messages.get()
        assert peer.stats()["num_writes_refused"] == 7
        assert receiver.pool == b"\xee" * receiver.pool.nbytes
        await raw.close()
        await server.close()

    run(scenario())


@pytest.mark.parametrize("geometry", [SMALL, LARGE], ids=["small", "large"])
def test_blocks_used_again_after_the_connection_was_cut(run, raw_peer, wire, until, geometry):
    """No ABORT_ACK came: cutting the connection is proof as well, and at once."""

    async def scenario():
        receiver = Receiver(geometry)
        server = await receiver.serve()
        raw = await raw_peer.connect(server.port, receiver.prefill())
        receiver.grant(1, 256)
        frame = receiver.frame(wire, 1, 0, 256, 0xAA)
        await raw.write(frame[: len(frame) // 2])
        await until(lambda: not receiver.leases.quiesced(1))
        peer = await receiver.peers.get()
        receiver.leases.revoke(1)
        peer.abort("no ABORT_ACK")
        receiver.leases.release(1)
        receiver.grant(2, 256)
        receiver.pool[:] = b"\xee" * receiver.pool.nbytes

        async def go_on():
            for start in itertools.cycle(range(len(frame) // 2, len(frame), 10_000)):
                await raw.write(frame[start : start + 10_000])

        with pytest.raises(ConnectionError):
            await go_on()
        await peer.wait_closed()
        assert receiver.pool == b"\xee" * receiver.pool.nbytes
        raw.kill()
        await server.close()

    run(scenario())


class Throttle:
    """A proxy that passes a few bytes at a time and gives others their turn in between."""

    def __init__(self, port, seed):
        self.port = port
        self.source = random.Random(seed)
        self.tasks = set()

    async def pump(self, reader, writer):
        while data := await reader.read(self.source.choice([1, 100, 5000])):
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(self.source.choice([0, 0, 0, 0.0005]))
        writer.close()

    async def accept(self, reader, writer):
        async with asyncio.TaskGroup() as tasks:
            there = await asyncio.open_connection("127.0.0.1", self.port)
            tasks.create_task(self.pump(reader, there[1]))
            tasks.create_task(self.pump(there[0], writer))


def test_three_hundred_throttled_transfers_are_whole_when_they_commit(run):
    """Compared at the moment of COMMIT, not later: completion must mean applied."""
    num_transfers, num_peers = 300, 4

    async def scenario():
        receiver = Receiver(num_blocks=128)
        server = await receiver.serve()
        throttle = Throttle(server.port, seed=5)
        proxy = await asyncio.start_server(throttle.accept, "127.0.0.1", 0)
        port = proxy.sockets[0].getsockname()[1]
        sent = {}
        generations = iter(range(1, num_transfers + 1))

        async def prefill(name):
            peer = await connect("127.0.0.1", port, identity=receiver.prefill(name), timeout_s=10.0)
            for generation in generations:
                num_tokens = 1 + generation % 23
                sent[generation] = random_kv(SMALL, num_tokens, generation)
                receiver.grant(generation, num_tokens)
                chunk_tokens = 1 + generation % 11
                await send_sequence(
                    peer, SMALL, generation, num_tokens, sent[generation], chunk_tokens
                )
                assert await peer.receive() == CommitAck(f"s{generation}", generation)
            await peer.close()

        async def decode():
            for _ in range(num_transfers):
                peer, commit = await receiver.messages.get()
                generation = commit.generation
                receiver.commit(commit)
                for (layer, region), kv in sent.pop(generation).items():
                    landed = receiver.region_bytes(generation, layer, region, commit.num_tokens)
                    assert landed == kv
                receiver.blocks.free(receiver.tables.pop(generation), f"s{generation}")
                await peer.send(CommitAck(commit.sequence_id, generation))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(decode())
            for number in range(num_peers):
                tasks.create_task(prefill(f"p{number}"))
        assert receiver.blocks.num_free_blocks == 128
        assert receiver.leases.stats()["num_leases"] == 0
        await server.close()
        proxy.close()

    run(scenario())


def test_a_commit_that_lost_a_write_is_refused(run):
    async def scenario():
        receiver = Receiver()
        server = await receiver.serve()
        peer = await receiver.dial(server)
        receiver.grant(1, 8)
        kv = random_kv(SMALL, 8, 1)
        # Layer 1 is never sent, the counts are claimed all the same.
        one_layer = replace(SMALL, layers=SMALL.layers[:1])
        await send_sequence(peer, one_layer, 1, 8, kv, 3)
        _, commit = await receiver.messages.get()
        with pytest.raises(Exception, match=r"layer layers\.1 has 0 of 8 tokens"):
            receiver.commit(commit)
        await peer.close()
        await server.close()

    run(scenario())


def test_a_body_that_changed_on_its_way_is_found_by_the_digests(run, raw_peer, wire):
    kv = random_kv(SMALL, 8, 1)
    digests = RegionDigests(SMALL)
    for (layer, region), sent in kv.items():
        digests.update(layer, region, sent)
    nbytes = SMALL.prompt_nbytes(8)

    async def scenario():
        receiver = Receiver()
        server = await receiver.serve()
        raw = await raw_peer.connect(server.port, receiver.prefill())
        receiver.grant(1, 8)
        for layer in range(2):
            write = Write("s1", 1, f"layers.{layer}", 0, 8)
            body = [kv[layer, 0], kv[layer, 1]]
            shape_word = SMALL.shape_word(layer, 8)
            frame = bytearray(wire.frame(write, body, shape_word, is_body_checked=False))
            frame[-1] ^= layer  # the last byte of V of layer 1
            await raw.write(frame)
        raw.send(Commit("s1", 1, 8, nbytes, digests.values(), 0.0, 0.0, 0.0))
        _, commit = await receiver.messages.get()
        with pytest.raises(DigestMismatch, match=r"region v of layer layers\.1"):
            receiver.commit(commit)
        await raw.close()
        await server.close()

    run(scenario())


def test_a_refusal_is_sent_to_the_writer_as_a_message(run, raw_peer, wire):
    async def scenario():
        receiver = Receiver()
        server = await receiver.serve()
        raw = await raw_peer.connect(server.port, receiver.prefill())
        await raw.write(receiver.frame(wire, 9, 0, 1, 0))
        error = await raw.receive_until(Error)
        assert (error.code, error.sequence_id) == (ErrorCode.LEASE, "s9")
        await raw.close()
        await server.close()

    run(scenario())


def test_a_sender_that_never_waits_learns_of_the_end(run):
    """Between the socket's failure and ``connection_lost`` nothing that is sent would wait."""

    async def scenario():
        async def handle(peer):
            async for _ in peer:
                pass

        server = await serve("127.0.0.1", 0, identity=Identity("decode", "d"), handler=handle)
        peer = await connect(
            "127.0.0.1", server.port, identity=Identity("prefill", "p"), timeout_s=5.0
        )
        # The socket fails under the transport, as after the peer's RST.
        fd = peer._driver._transport.get_extra_info("socket").fileno()
        with socket.socket(fileno=socket.dup(fd)) as twin:
            twin.shutdown(socket.SHUT_RDWR)

        async def send_without_waiting():
            for _ in range(1000):
                await peer.send(Started("s", 1, 0.0))
                await peer.flushed()

        with pytest.raises(ConnectionLost):
            await send_without_waiting()
        peer.abort("over")
        server.abort()
        await server.wait_closed()

    run(scenario())
