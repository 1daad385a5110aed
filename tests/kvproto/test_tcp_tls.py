"""Peers over TLS on real sockets: the same promises as without, and every refusal."""

import asyncio
import contextlib
import logging
import mmap
import random
import ssl

import pytest

from kvproto.blocks import BlockPool
from kvproto.errors import (
    AuthenticationFailed,
    ConnectionLost,
    DeadlineExceeded,
    ErrorCode,
    HandshakeRefused,
    LocalProtocolError,
    PeerError,
)
from kvproto.geometry import KvGeometry, PoolLayout
from kvproto.handshake import Identity
from kvproto.lease import LeaseTable
from kvproto.messages import Abort, AbortAck, Error, Started, Write
from kvproto.tcp import TcpWriter, connect, serve
from kvproto.tcp_driver import HIGH_WATER_NBYTES

SECRET = b"0123456789abcdef"
DECODE = Identity("decode", "d", secret=SECRET)
PREFILL = Identity("prefill", "p", secret=SECRET)
LARGE = KvGeometry.uniform(2, 8, 128, "float16", ("layers.0", "layers.1"))


async def until_the_end(peer):
    async for _ in peer:
        pass


async def dial(port, tls, identity=PREFILL, **kwargs):
    return await connect("127.0.0.1", port, identity=identity, timeout_s=5.0, tls=tls, **kwargs)


class Pair:
    """A server that holds its peer until told, and one client connected to it, both over TLS."""

    def __init__(self, tls, port=None):
        self.tls, self.port = tls, port
        self.release = asyncio.Event()
        self.arrived = asyncio.Queue()

    async def hold(self, peer):
        self.arrived.put_nowait(peer)
        await self.release.wait()

    async def __aenter__(self):
        self.server = await serve(
            "127.0.0.1", 0, identity=DECODE, handler=self.hold, tls=self.tls.server
        )
        self.client = await dial(self.server.port, self.tls.client)
        self.served = await self.arrived.get()
        return self

    async def __aexit__(self, *_):
        self.release.set()
        self.client.abort("the test is over")
        await self.client.wait_closed()
        await self.server.close()


class Proxy:
    """Passes bytes on and keeps a copy; cuts the connection with a FIN when told."""

    def __init__(self, port):
        self.target = port
        self.seen = [bytearray(), bytearray()]
        self.writers = []

    async def __aenter__(self):
        self.listener = await asyncio.start_server(self.accept, "127.0.0.1", 0)
        self.port = self.listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self.cut()
        self.listener.close()

    def cut(self):
        for writer in self.writers:
            writer.close()

    async def pump(self, reader, writer, copy):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                copy += data
                writer.write(data)
                await writer.drain()
        writer.close()

    async def accept(self, reader, writer):
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.target)
        self.writers += [writer, there_writer]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.pump(reader, there_writer, self.seen[0]))
            tasks.create_task(self.pump(there_reader, writer, self.seen[1]))


def test_messages_both_ways_in_order_and_nothing_is_readable(run, tls):
    async def scenario():
        async with Pair(tls) as pair, Proxy(pair.server.port) as proxy:
            client = await dial(proxy.port, tls.client)
            served = await pair.arrived.get()
            for generation in range(1, 200):
                await client.send(Started("sequence-name", generation, 0.0))
                await served.send(Abort("sequence-name", generation, 9, ""))
            for generation in range(1, 200):
                assert await served.receive() == Started("sequence-name", generation, 0.0)
                assert await client.receive() == Abort("sequence-name", generation, 9, "")
            assert client.stats()["is_encrypted"]
            assert served.stats()["is_encrypted"]
            for seen in proxy.seen:
                assert seen[:2] == b"\x16\x03"
                for word in (b"\xde\xad\xbe\xaf", b"sequence-name", b"instance_id"):
                    assert word not in seen
            closing = asyncio.create_task(client.close())
            with pytest.raises(ConnectionLost) as excinfo:
                await served.receive()
            assert excinfo.value.clean
            await closing

    run(scenario())


def test_kv_lands_byte_for_byte(run, tls):
    async def scenario():
        layout = PoolLayout(LARGE, 80, 16)
        pool = memoryview(mmap.mmap(-1, layout.nbytes))
        blocks = BlockPool(80)
        leases = LeaseTable(layout, pool, blocks)
        table = blocks.allocate("s", 80)[::-1][:50]
        leases.grant("s", 1, table, 800)
        landed = asyncio.Event()

        async def handler(peer):
            async for message in peer:
                if not isinstance(message, Write):
                    landed.set()

        server = await serve(
            "127.0.0.1", 0, identity=DECODE, handler=handler, landing=leases, tls=tls.server
        )
        peer = await dial(server.port, tls.client)
        writer = TcpWriter(peer, LARGE)
        half = LARGE.write_nbytes(1, 800) // 2
        sent = memoryview(random.Random(5).randbytes(2 * half))
        await writer.write("s", 1, 1, 0, 800, [sent[:half], sent[half:]])
        await writer.flush()
        await peer.send(AbortAck("s", 1))
        await landed.wait()
        for region, pieces in enumerate(layout.pieces(1, table, 0, 800)):
            got = b"".join(pool[at : at + size] for at, size in pieces)
            assert got == sent[region * half :][:half]
        await peer.close()
        await server.close()

    run(scenario())


def test_close_flushes_while_the_other_side_keeps_sending(run, tls):
    """No half-close in TLS: what the closing side said must arrive all the same."""

    async def scenario():
        async with Pair(tls) as pair:

            async def flood():
                with contextlib.suppress(ConnectionLost):
                    while True:
                        await pair.served.send(Error(9, "x" * 1000, "", "noise"))

            flooding = asyncio.create_task(flood())
            received = []

            async def read():
                received.extend([message.generation async for message in pair.served])

            for generation in range(1, 3000):
                await pair.client.send(Started("s", generation, 0.0))
            closing = asyncio.create_task(pair.client.close())
            await read()
            assert received == list(range(1, 3000))
            await closing
            await flooding
            with pytest.raises(ConnectionLost) as excinfo:
                await pair.client.receive()
            assert excinfo.value.clean

    run(scenario())


def test_a_fault_is_told_while_the_other_side_keeps_sending(run, tls):
    async def scenario():
        async with Pair(tls) as pair:

            async def flood():
                with contextlib.suppress(ConnectionLost):
                    while True:
                        await pair.client.send(Error(9, "x" * 1000, "", "noise"))

            flooding = asyncio.create_task(flood())
            await pair.served.receive()
            await pair.served.send(Error(ErrorCode.INTERNAL, "giving up"))
            pair.served._driver.refuse(ConnectionLost("the test says so"))
            while (message := await pair.client.receive()).message != "giving up":
                pass
            assert message.sequence_id == ""
            await flooding
            await pair.client.wait_closed()
            await pair.served.wait_closed()

    run(scenario())


def test_a_slow_handler_slows_the_sender_down(run, tls, until):
    async def scenario():
        async with Pair(tls) as pair:
            num_sent = 0

            async def flood():
                nonlocal num_sent
                while num_sent < 20_000:
                    num_sent += 1
                    await pair.client.send(Error(9, "x" * 1000, "", f"s{num_sent}"))

            flooding = asyncio.create_task(flood())
            await until(lambda: pair.served.stats()["is_reading_paused"])
            await until(lambda: pair.client.stats()["write_buffer_nbytes"] > HIGH_WATER_NBYTES / 2)
            assert not flooding.done()
            for index in range(1, 20_001):
                assert (await pair.served.receive()).sequence_id == f"s{index}"
            await flooding
            await pair.client.flushed()
            assert pair.client.stats()["write_buffer_nbytes"] == 0

    run(scenario())


def test_an_end_without_close_notify_is_not_clean(run, tls):
    async def scenario():
        async with Pair(tls) as pair, Proxy(pair.server.port) as proxy:
            client = await dial(proxy.port, tls.client)
            served = await pair.arrived.get()
            proxy.cut()
            for peer in (client, served):
                with pytest.raises(ConnectionLost, match="without close_notify") as excinfo:
                    await peer.receive()
                assert not excinfo.value.clean
                await peer.wait_closed()

    run(scenario())


def test_abort_is_immediate(run, tls):
    async def scenario():
        async with Pair(tls) as pair:
            pair.client.abort("the test says so")
            await pair.client.wait_closed()
            with pytest.raises(ConnectionLost) as excinfo:
                await pair.served.receive()
            assert not excinfo.value.clean
            await pair.served.wait_closed()

    run(scenario())


def test_the_secret_is_still_asked_for(run, tls):
    async def scenario():
        async with Pair(tls) as pair:
            for secret in (None, b"another secret!!"):
                with pytest.raises(AuthenticationFailed, match="secret"):
                    await dial(
                        pair.server.port, tls.client, Identity("prefill", "p", secret=secret)
                    )

    run(scenario())


def test_a_peer_without_certificate(run, tls, caplog):
    async def scenario():
        bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        bare.check_hostname = False
        bare.load_verify_locations(tls.files.ca)
        async with Pair(tls) as pair:
            with pytest.raises(AuthenticationFailed, match="certificate required"):
                await dial(pair.server.port, bare)

    with caplog.at_level(logging.INFO, "kvproto.tcp"):
        run(scenario())
    assert "the peer sent no certificate" in caplog.text


@pytest.mark.parametrize("wrong", ["alien", "expired"])
def test_a_certificate_that_is_not_accepted(run, tls, wrong_tls, wrong, caplog):
    words = {"alien": "unable to get local issuer", "expired": "certificate has expired"}[wrong]

    async def scenario():
        client, server_context = wrong_tls(wrong)
        async with Pair(tls) as pair:
            with pytest.raises(AuthenticationFailed, match="does not accept this side's"):
                await dial(pair.server.port, client)
        server = await serve(
            "127.0.0.1", 0, identity=DECODE, handler=until_the_end, tls=server_context
        )
        with pytest.raises(AuthenticationFailed, match=words):
            await dial(server.port, tls.client)
        await server.close()

    with caplog.at_level(logging.INFO, "kvproto.tcp"):
        run(scenario())
    assert words in caplog.text
    assert "does not accept this side's certificate" in caplog.text


def test_a_plain_peer_at_a_port_with_tls(run, tls):
    async def scenario():
        async with Pair(tls) as pair:
            with pytest.raises(HandshakeRefused, match="uses TLS and the peer does not") as excinfo:
                await dial(pair.server.port, None)
            assert excinfo.value.field == "tls"

    run(scenario())


def test_a_peer_with_tls_at_a_plain_port(run, tls, caplog):
    async def scenario():
        server = await serve("127.0.0.1", 0, identity=DECODE, handler=until_the_end)
        with pytest.raises(HandshakeRefused, match="uses TLS and the peer does not"):
            await dial(server.port, tls.client)
        await server.close()

    with caplog.at_level(logging.INFO, "kvproto.tcp"):
        run(scenario())
    assert "the peer uses TLS and this side does not" in caplog.text


def test_a_stranger_at_a_port_with_tls(run, tls, raw_peer, caplog):
    async def scenario():
        async with Pair(tls) as pair:
            raw = await raw_peer.connect(pair.server.port)
            await raw.write(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert b"\xde\xad" not in await raw.read_all()
            await raw.close()

    with caplog.at_level(logging.INFO, "kvproto.tcp"):
        run(scenario())
    assert "neither TLS nor kvproto" in caplog.text


def test_a_stranger_who_hangs_up(run, tls, raw_peer, caplog, until):
    async def scenario():
        async with Pair(tls) as pair:
            raw = await raw_peer.connect(pair.server.port)
            await raw.close()
            await until(lambda: "during the handshake of TLS" in caplog.text)

    with caplog.at_level(logging.INFO, "kvproto.tcp"):
        run(scenario())


def test_silence_in_the_handshake_of_tls(run, tls, raw_peer, monkeypatch):
    monkeypatch.setattr("kvproto.tcp_driver.FAULT_LINGER_S", 0.05)

    async def scenario():
        server = await serve(
            "127.0.0.1",
            0,
            identity=DECODE,
            handler=until_the_end,
            handshake_timeout_s=0.05,
            tls=tls.server,
        )
        raw = await raw_peer.connect(server.port)
        assert await raw.read_all() == b""
        await raw.close()
        await server.close()

    run(scenario())


def test_a_server_that_is_silent(run, tls):
    async def scenario():
        accepted = []

        async def silent(reader, writer):
            accepted.append(writer)

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(DeadlineExceeded, match=f"127.0.0.1:{port} within 0.1 s"):
            await connect("127.0.0.1", port, identity=PREFILL, timeout_s=0.1, tls=tls.client)
        server.close()
        for writer in accepted:
            writer.close()
            await writer.wait_closed()

    run(scenario())


def test_stopping_does_not_wait_for_a_silent_stranger(run, tls, raw_peer, monkeypatch, until):
    monkeypatch.setattr("kvproto.tcp_driver.CLOSE_LINGER_S", 1000.0)
    monkeypatch.setattr("kvproto.tcp_server.CLOSE_LINGER_S", 1000.0)

    async def scenario():
        server = await serve("127.0.0.1", 0, identity=DECODE, handler=until_the_end, tls=tls.server)
        raw = await raw_peer.connect(server.port)
        await until(lambda: server.stats()["num_handshakes"] == 1)
        await server.close()
        raw.kill()

    run(scenario())


def test_peers_beyond_the_limit_are_told_so(run, tls):
    async def scenario():
        server = await serve(
            "127.0.0.1",
            0,
            identity=DECODE,
            handler=until_the_end,
            max_peers=1,
            tls=tls.server,
        )
        client = await dial(server.port, tls.client)
        with pytest.raises(PeerError, match="serves 1 peers") as excinfo:
            await dial(server.port, tls.client)
        assert excinfo.value.code == ErrorCode.OVERLOADED
        await client.close()
        await server.close()

    run(scenario())


def test_a_context_that_demands_no_certificate_is_refused(run, tls):
    async def scenario():
        open_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with pytest.raises(LocalProtocolError, match="does not demand a certificate"):
            await serve("127.0.0.1", 0, identity=DECODE, handler=until_the_end, tls=open_context)
        with pytest.raises(LocalProtocolError, match="does not demand a certificate"):
            await dial(1, open_context)

    run(scenario())


def test_beyond_this_host_a_certificate_does_not_replace_the_secret(run, tls):
    async def scenario():
        with pytest.raises(LocalProtocolError, match="without a secret"):
            await serve(
                "0.0.0.0",
                0,
                identity=Identity("decode", "d"),
                handler=until_the_end,
                tls=tls.server,
            )

    run(scenario())


def test_a_context_that_cannot_begin_fails_at_once(run, tls):
    async def scenario():
        async with Pair(tls) as pair:
            useless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            useless.check_hostname = False
            useless.minimum_version = ssl.TLSVersion.TLSv1_3
            useless.maximum_version = ssl.TLSVersion.TLSv1_2
            with pytest.raises(HandshakeRefused, match="no TLS version in common"):
                await dial(pair.server.port, useless)

    run(scenario())
