"""Peers on real sockets: sending, receiving, backpressure, and all the ways to end."""

import asyncio

import pytest

from kvproto.errors import ConnectionLost, DeadlineExceeded, ErrorCode, LocalProtocolError
from kvproto.geometry import KvGeometry
from kvproto.handshake import Identity
from kvproto.header import HEADER_NBYTES, Header
from kvproto.messages import Abort, AbortAck, Error, Ping, Started
from kvproto.tcp import Peer, TcpWriter, connect, serve
from kvproto.tcp_driver import HIGH_WATER_NBYTES, MAX_QUEUED_MESSAGES

DECODE = Identity("decode", "d")
PREFILL = Identity("prefill", "p")


class Pair:
    """A server that holds each peer until told, and one client connected to it."""

    def __init__(self):
        self.release = asyncio.Event()
        self.arrived: asyncio.Queue[Peer] = asyncio.Queue()

    async def hold(self, peer):
        self.arrived.put_nowait(peer)
        await self.release.wait()

    async def __aenter__(self):
        self.server = await serve("127.0.0.1", 0, identity=DECODE, handler=self.hold)
        self.client = await connect("127.0.0.1", self.server.port, identity=PREFILL, timeout_s=5.0)
        self.served = await self.arrived.get()
        return self

    async def __aexit__(self, *_):
        self.release.set()
        self.client.abort("the test is over")
        await self.client.wait_closed()
        await self.server.close()


def test_both_sides_know_each_other(run):
    async def scenario():
        async with Pair() as pair:
            assert pair.client.remote.instance_id == "d"
            assert pair.served.remote.role == "prefill"
            assert pair.client.name == f"decode/d@127.0.0.1:{pair.server.port}"
            assert pair.served.name.startswith("prefill/p@127.0.0.1:")

    run(scenario())


def test_messages_both_ways_in_order(run):
    async def scenario():
        async with Pair() as pair:
            for generation in range(1, 200):
                await pair.client.send(Started("s", generation, 0.0))
                await pair.served.send(Abort("s", generation, 9, ""))
            for generation in range(1, 200):
                assert await pair.served.receive() == Started("s", generation, 0.0)
                assert await pair.client.receive() == Abort("s", generation, 9, "")

    run(scenario())


def test_our_own_mistakes_leave_the_connection_usable(run):
    async def scenario():
        async with Pair() as pair:
            with pytest.raises(LocalProtocolError):
                await pair.client.send(Started("s", -1, 0.0))
            await pair.client.send(AbortAck("s", 1))
            assert await pair.served.receive() == AbortAck("s", 1)

    run(scenario())


def test_an_error_about_a_sequence_is_a_message(run):
    async def scenario():
        async with Pair() as pair:
            error = Error(ErrorCode.LEASE, "stale", "generation", "s")
            await pair.client.send(error)
            assert await pair.served.receive() == error
            await pair.client.send(AbortAck("s", 1))
            assert await pair.served.receive() == AbortAck("s", 1)

    run(scenario())


def test_an_error_about_the_connection_is_delivered_then_it_ends(run):
    async def scenario():
        async with Pair() as pair:
            await pair.client.send(Error(ErrorCode.INTERNAL, "giving up"))
            assert (await pair.served.receive()).message == "giving up"
            with pytest.raises(ConnectionLost, match="giving up") as excinfo:
                await pair.served.receive()
            assert not excinfo.value.clean
            await pair.client.wait_closed()

    run(scenario())


def test_close_flushes_and_the_other_side_ends_cleanly(run):
    async def scenario():
        async with Pair() as pair:
            for generation in range(1, 50):
                await pair.client.send(Started("s", generation, 0.0))
            closing = asyncio.create_task(pair.client.close())
            received = [message.generation async for message in pair.served]
            assert received == list(range(1, 50))
            await closing
            await pair.client.close()
            assert pair.client.is_closed
            for use in (pair.client.receive, pair.client.flushed):
                with pytest.raises(ConnectionLost) as excinfo:
                    await use()
                assert excinfo.value.clean
            with pytest.raises(ConnectionLost):
                await pair.client.send(AbortAck("s", 1))

    run(scenario())


def test_abort_wakes_everybody_who_waits(run):
    async def scenario():
        async with Pair() as pair:
            waiting = [asyncio.create_task(pair.client.receive()) for _ in range(3)]
            await asyncio.sleep(0)
            pair.client.abort("first reason")
            pair.client.abort("second reason")
            for result in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(result, ConnectionLost)
                assert "first reason" in result.reason
            await pair.client.wait_closed()
            with pytest.raises(ConnectionLost):
                await pair.served.receive()

    run(scenario())


def test_iteration_raises_if_the_end_is_not_clean(run, raw_peer, wire):
    async def scenario():
        outcome = asyncio.get_running_loop().create_future()

        async def handler(peer):
            try:
                async for _ in peer:
                    pass
            except ConnectionLost as exc:
                outcome.set_result(exc)

        server = await serve("127.0.0.1", 0, identity=DECODE, handler=handler)
        raw = await raw_peer.connect(server.port, PREFILL)
        await raw.write(wire.frame(Started("s", 1, 0.0))[:-1])
        await raw.close()
        assert "inside a frame" in (await outcome).reason
        await server.close()

    run(scenario())


def test_a_fault_is_answered_with_error_before_the_end(run, raw_peer):
    async def scenario():
        async with Pair() as pair:
            raw = await raw_peer.connect(pair.server.port, PREFILL)
            served = await pair.arrived.get()
            await raw.write(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            error = await raw.receive_until(Error)
            assert error.code == ErrorCode.BAD_MAGIC
            assert await raw.read_all() == b""
            with pytest.raises(ConnectionLost, match="does not speak kvproto"):
                await served.receive()
            await raw.close()

    run(scenario())


def test_a_slow_handler_slows_the_sender_down(run, until):
    async def scenario():
        async with Pair() as pair:
            num_sent = 0

            async def flood():
                nonlocal num_sent
                while num_sent < 20_000:
                    num_sent += 1
                    await pair.client.send(Error(9, "x" * 1000, "", f"s{num_sent}"))

            flooding = asyncio.create_task(flood())
            await until(lambda: pair.served.stats()["is_reading_paused"])
            await until(lambda: pair.client.stats()["write_buffer_nbytes"] > HIGH_WATER_NBYTES / 2)
            num_before = -1
            while num_before != num_sent:
                num_before = num_sent
                await asyncio.sleep(0.05)
            assert not flooding.done()
            queued = pair.served.stats()["num_queued_messages"]
            assert MAX_QUEUED_MESSAGES <= queued <= MAX_QUEUED_MESSAGES + 64 * 1024 // 1000
            for index in range(1, 20_001):
                assert (await pair.served.receive()).sequence_id == f"s{index}"
            await flooding

    run(scenario())


def test_a_peer_that_takes_nothing_fails_the_sender_at_its_deadline(run, raw_peer):
    async def scenario():
        async with Pair() as pair:
            raw = await raw_peer.connect(pair.server.port, PREFILL)
            served = await pair.arrived.get()

            async def flood():
                while True:
                    await served.send(Error(9, "x" * 1000, "", "s"), timeout_s=0.2)

            with pytest.raises(DeadlineExceeded, match="took no bytes"):
                await flood()
            with pytest.raises(ConnectionLost):
                await served.send(AbortAck("s", 1))
            await served.wait_closed()
            raw.kill()

    run(scenario())


def test_flushed_returns_when_the_last_byte_has_left(run, raw_peer, until):
    async def scenario():
        async with Pair() as pair:
            raw = await raw_peer.connect(pair.server.port, PREFILL)
            served = await pair.arrived.get()
            await served.flushed()
            while served.stats()["write_buffer_nbytes"] < 100_000:
                await served.send(Error(9, "x" * 1000, "", "s"))
            flushing = asyncio.create_task(served.flushed())
            done, _ = await asyncio.wait([flushing], timeout=0.1)
            assert not done
            while not flushing.done():
                await raw.receive()
            await flushing
            assert served.stats()["write_buffer_nbytes"] == 0
            # The marks are back: one frame does not block.
            await served.send(Abort("s", 1, 9, ""))
            await raw.receive_until(Abort)
            await raw.close()

    run(scenario())


def test_many_senders_together_overfill_the_buffer_by_one_frame_at_most(run, raw_peer, until):
    geometry = KvGeometry.uniform(1, 16, 128, "float32", ("a",))
    body = memoryview(bytes(geometry.write_nbytes(0, 64)))
    assert body.nbytes == 1 << 20

    async def scenario():
        port, peers, server = await raw_peer.accept(DECODE)
        client = await connect("127.0.0.1", port, identity=PREFILL, timeout_s=5.0)
        raw = await peers.get()
        writer = TcpWriter(client, geometry)
        senders = [asyncio.create_task(writer.write("s", 1, 0, 0, 64, [body])) for _ in range(40)]
        await until(lambda: client.stats()["write_buffer_nbytes"] > HIGH_WATER_NBYTES)
        await until(lambda: any(sender.done() for sender in senders))
        assert client.stats()["write_buffer_nbytes"] < HIGH_WATER_NBYTES + 2 * body.nbytes
        client.abort("the test is over")
        results = await asyncio.gather(*senders, return_exceptions=True)
        assert any(isinstance(result, ConnectionLost) for result in results)
        await client.wait_closed()
        raw.kill()
        server.close()

    run(scenario())


def test_a_cancelled_send_leaves_whole_frames(run):
    async def scenario():
        async with Pair() as pair:
            senders = [
                asyncio.create_task(pair.client.send(Error(9, "x" * 1000, "", f"s{index}")))
                for index in range(8000)
            ]
            await asyncio.sleep(0.01)
            for sender in senders[::2]:
                sender.cancel()

            async def read():
                return {message.sequence_id async for message in pair.served}

            reading = asyncio.create_task(read())
            results = await asyncio.gather(*senders, return_exceptions=True)
            await pair.client.close()
            seen = await reading
            for index, result in enumerate(results):
                assert result is None or isinstance(result, asyncio.CancelledError)
                if result is None:
                    assert f"s{index}" in seen

    run(scenario())


def test_a_silent_peer_is_aborted(run, raw_peer):
    async def scenario():
        arrived = asyncio.Queue()

        async def handler(peer):
            with pytest.raises(ConnectionLost, match="silent"):
                await peer.receive()
            arrived.put_nowait(peer)

        server = await serve("127.0.0.1", 0, identity=DECODE, handler=handler, keepalive_s=0.05)
        raw = await raw_peer.connect(server.port, PREFILL)
        # It reads nothing and says nothing from now on.
        peer = await arrived.get()
        await peer.wait_closed()
        raw.kill()
        await server.close()

    run(scenario())


def test_two_quiet_peers_keep_each_other_alive(run):
    async def scenario():
        release, peers = asyncio.Event(), asyncio.Queue()

        async def handler(peer):
            peers.put_nowait(peer)
            await release.wait()

        server = await serve("127.0.0.1", 0, identity=DECODE, handler=handler, keepalive_s=0.05)
        client = await connect(
            "127.0.0.1", server.port, identity=PREFILL, timeout_s=5.0, keepalive_s=0.05
        )
        served = await peers.get()
        # Long enough for many rounds: the frames are PINGs and PONGs.
        while min(peer.stats()["num_frames_received"] for peer in (client, served)) < 30:
            assert not client.is_closed
            await asyncio.sleep(0.01)
        release.set()
        await client.close()
        await server.close()

    run(scenario())


def test_pings_are_answered(run, raw_peer, wire):
    async def scenario():
        async with Pair() as pair:
            raw = await raw_peer.connect(pair.server.port, PREFILL)
            await raw.write(wire.frame(Ping(41)) + wire.frame(Ping(42)))
            data = b""
            async with asyncio.timeout(10):
                while len(data) < HEADER_NBYTES:
                    data += await raw.reader.read(4096)
            assert Header.decode(data[:32], max_payload_nbytes=100).kind.name == "PONG"
            await raw.close()

    run(scenario())


def test_a_message_queued_before_the_end_is_still_delivered(run, until):
    async def scenario():
        async with Pair() as pair:
            await pair.client.send(Started("s", 1, 0.0))
            await pair.client.close()
            assert await pair.served.receive() == Started("s", 1, 0.0)
            with pytest.raises(ConnectionLost) as excinfo:
                await pair.served.receive()
            assert excinfo.value.clean

    run(scenario())
