"""Listening: handlers, limits, refusals, and shutting down."""

import asyncio
import contextlib
import logging
import socket

import pytest

from kvproto.errors import (
    AuthenticationFailed,
    ConnectionLost,
    DeadlineExceeded,
    ErrorCode,
    HandshakeRefused,
    LocalProtocolError,
    PeerError,
)
from kvproto.handshake import Identity
from kvproto.messages import AbortAck
from kvproto.tcp import connect, serve
from kvproto.tcp_door import DoorLimits
from kvproto.tcp_server import is_loopback

SECRET = b"0123456789abcdef"
DECODE = Identity("decode", "d")
PREFILL = Identity("prefill", "p")


async def until_the_end(peer):
    async for _ in peer:
        pass


async def dial(server, identity=PREFILL, **kwargs):
    return await connect("127.0.0.1", server.port, identity=identity, timeout_s=5.0, **kwargs)


def test_the_peer_is_closed_when_the_handler_returns(run):
    async def scenario():
        async def handler(peer):
            await peer.send(AbortAck("s", 1))

        server = await serve("127.0.0.1", 0, identity=DECODE, handler=handler)
        client = await dial(server)
        assert [message async for message in client] == [AbortAck("s", 1)]
        await client.close()
        await server.close()
        assert server.num_peers == 0

    run(scenario())


def test_a_handler_that_raises_aborts_its_own_peer_alone(run, caplog):
    async def scenario():
        async def handler(peer):
            message = await peer.receive()
            if message.sequence_id == "bad":
                raise RuntimeError("handler bug")
            await peer.send(message)

        server = await serve("127.0.0.1", 0, identity=DECODE, handler=handler)
        good, bad = await dial(server), await dial(server)
        await bad.send(AbortAck("bad", 1))
        with pytest.raises(ConnectionLost) as excinfo:
            await bad.receive()
        assert not excinfo.value.clean
        await good.send(AbortAck("good", 1))
        assert await good.receive() == AbortAck("good", 1)
        for client in (good, bad):
            await client.close()
        await server.close()

    with caplog.at_level(logging.ERROR):
        run(scenario())
    assert "handler bug" in caplog.text


@pytest.mark.parametrize(
    ("ours", "theirs"), [(SECRET, b"another secret!!"), (SECRET, None), (None, SECRET)]
)
def test_secrets_must_be_the_same(run, ours, theirs):
    async def scenario():
        async def handler(peer):
            pytest.fail("an unauthenticated peer reached the handler")

        server = await serve(
            "127.0.0.1", 0, identity=Identity("decode", "d", secret=theirs), handler=handler
        )
        with pytest.raises(AuthenticationFailed):
            await dial(server, Identity("prefill", "p", secret=ours))
        await server.close()

    run(scenario())


def test_the_same_secret_connects(run):
    async def scenario():
        server = await serve(
            "127.0.0.1",
            0,
            identity=Identity("decode", "d", secret=SECRET),
            handler=until_the_end,
        )
        client = await dial(server, Identity("prefill", "p", secret=SECRET))
        await client.close()
        await server.close()

    run(scenario())


def test_another_model_is_refused_and_named(run):
    async def scenario():
        server = await serve(
            "127.0.0.1",
            0,
            identity=Identity("decode", "d", {"dtype": "float32"}),
            handler=until_the_end,
        )
        with pytest.raises(HandshakeRefused) as excinfo:
            await dial(server, Identity("prefill", "p", {"dtype": "float16"}))
        assert excinfo.value.field == "dtype"
        await server.close()

    run(scenario())


def test_peers_beyond_the_limit_are_told_so(run, until):
    async def scenario():
        server = await serve("127.0.0.1", 0, identity=DECODE, handler=until_the_end, max_peers=2)
        clients = [await dial(server), await dial(server)]
        with pytest.raises(PeerError, match="serves 2 peers") as excinfo:
            await dial(server)
        assert excinfo.value.code == ErrorCode.OVERLOADED
        await until(lambda: server.stats()["num_handshakes"] == 0)
        assert server.stats() == {
            "num_peers": 2,
            "max_peers": 2,
            "num_handshakes": 0,
            "max_handshakes": 128,
        }
        # The others do not notice, and room is found again.
        await clients.pop().close()
        await until(lambda: server.num_peers == 1)
        clients.append(await dial(server))
        for client in clients:
            await client.close()
        await server.close()

    run(scenario())


def test_silent_strangers_keep_nobody_out(run, raw_peer, until):
    """More connections than there is room for say nothing; honest peers come and go."""

    async def scenario():
        server = await serve(
            "127.0.0.1",
            0,
            identity=DECODE,
            handler=until_the_end,
            max_peers=2,
            max_handshakes_per_address=3,
            handshake_timeout_s=1000.0,
        )
        strangers = [await raw_peer.connect(server.port) for _ in range(5)]
        await until(lambda: server.stats()["num_handshakes"] == 3)
        clients = [await dial(server), await dial(server)]
        for client in clients:
            await client.send(AbortAck("s", 1))
        await until(lambda: server.stats()["num_peers"] == 2)
        # The first ones were told why they had to go.
        assert b"too many handshakes at once" in await strangers[0].read_all()
        for stranger in strangers:
            stranger.kill()
        for client in clients:
            await client.close()
        await server.close()

    run(scenario())


def test_a_flood_of_silent_strangers_is_cut_off_without_words(run, raw_peer, until, monkeypatch):
    monkeypatch.setattr("kvproto.tcp_server.MAX_REFUSED_PEERS", 1)

    async def scenario():
        server = await serve(
            "127.0.0.1",
            0,
            identity=DECODE,
            handler=until_the_end,
            max_handshakes=1,
            handshake_timeout_s=1000.0,
        )
        strangers = [await raw_peer.connect(server.port) for _ in range(10)]
        await until(lambda: server.num_peers <= 2)
        client = await dial(server)
        for stranger in strangers:
            stranger.kill()
        await client.close()
        await server.close()

    run(scenario())


def test_connections_of_one_instance_are_bounded(run):
    async def scenario():
        server = await serve(
            "127.0.0.1", 0, identity=DECODE, handler=until_the_end, max_peers_per_instance=1
        )
        client = await dial(server)

        async def dial_and_listen():
            # The refusal follows the handshake: it comes before or after "connected".
            again = await dial(server)
            try:
                assert (await again.receive()).code == ErrorCode.OVERLOADED
                await again.receive()
            finally:
                await again.close()

        with pytest.raises((ConnectionLost, PeerError), match="max_peers_per_instance"):
            await dial_and_listen()
        other = await dial(server, Identity("prefill", "another"))
        for peer in (client, other):
            await peer.send(AbortAck("s", 1))
            await peer.close()
        await server.close()

    run(scenario())


def test_refusals_are_bounded_too(run, raw_peer, monkeypatch):
    monkeypatch.setattr("kvproto.tcp_server.MAX_REFUSED_PEERS", 1)

    async def scenario():
        server = await serve("127.0.0.1", 0, identity=DECODE, handler=until_the_end, max_peers=1)
        client = await dial(server)
        lingering = await raw_peer.connect(server.port)
        assert b"serves 1 peers" in await lingering.read_all()
        with pytest.raises((ConnectionLost, PeerError)):
            await dial(server)
        await lingering.close()
        await client.close()
        await server.close()

    run(scenario())


def test_a_peer_that_is_silent_in_the_handshake_is_let_go(run, raw_peer, until):
    async def scenario():
        server = await serve(
            "127.0.0.1",
            0,
            identity=DECODE,
            handler=until_the_end,
            handshake_timeout_s=0.05,
        )
        raw = await raw_peer.connect(server.port)
        assert b"no handshake within 0.05 s" in await raw.read_all()
        await raw.close()
        await until(lambda: server.num_peers == 0)
        await server.close()

    run(scenario())


def test_a_server_that_is_silent_in_the_handshake(run):
    async def scenario():
        accepted = []

        async def silent(reader, writer):
            accepted.append(writer)

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(DeadlineExceeded, match=f"127.0.0.1:{port} within 0.1 s"):
            await connect("127.0.0.1", port, identity=PREFILL, timeout_s=0.1)
        server.close()
        for writer in accepted:
            writer.close()
            await writer.wait_closed()

    run(scenario())


def test_nobody_listens(run):
    async def scenario():
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with pytest.raises(ConnectionLost, match="is the service running"):
            await connect("127.0.0.1", port, identity=PREFILL, timeout_s=5.0)

    run(scenario())


def test_a_server_that_closes_in_the_handshake(run):
    async def scenario():
        async def hang_up(reader, writer):
            writer.close()

        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectionLost):
            await connect("127.0.0.1", port, identity=PREFILL, timeout_s=5.0)
        server.close()

    run(scenario())


def test_a_cancelled_connect_leaves_nothing(run):
    async def scenario():
        arrived, closed = asyncio.Event(), asyncio.Event()

        async def wait_for_end(reader, writer):
            arrived.set()
            # RST is seen as an error.
            with contextlib.suppress(ConnectionResetError):
                await reader.read(-1)
            writer.close()
            closed.set()

        server = await asyncio.start_server(wait_for_end, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        dialling = asyncio.create_task(connect("127.0.0.1", port, identity=PREFILL, timeout_s=60.0))
        await arrived.wait()
        dialling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dialling
        await closed.wait()
        server.close()

    run(scenario())


def test_a_busy_port_is_one_clear_sentence(run):
    async def scenario():
        server = await serve("127.0.0.1", 0, identity=DECODE, handler=until_the_end)
        with pytest.raises(LocalProtocolError) as excinfo:
            await serve("127.0.0.1", server.port, identity=DECODE, handler=until_the_end)
        assert str(excinfo.value) == (
            f"cannot listen on 127.0.0.1:{server.port}: another process uses this port; "
            "stop it or choose another port"
        )
        await server.close()

    run(scenario())


def test_an_address_of_another_host_cannot_be_listened_on(run):
    async def scenario():
        identity = Identity("decode", "d", secret=SECRET)
        with pytest.raises(LocalProtocolError, match=r"cannot listen on 192\.0\.2\.1:0"):
            await serve("192.0.2.1", 0, identity=identity, handler=until_the_end)

    run(scenario())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "", "example.org"])
def test_beyond_this_host_only_with_a_secret(run, host):
    async def scenario():
        with pytest.raises(LocalProtocolError, match="without a secret"):
            await serve(host, 0, identity=DECODE, handler=until_the_end)

    run(scenario())


def test_beyond_this_host_with_a_secret(run):
    async def scenario():
        identity = Identity("decode", "d", secret=SECRET)
        server = await serve("0.0.0.0", 0, identity=identity, handler=until_the_end)
        client = await dial(server, Identity("prefill", "p", secret=SECRET))
        await client.close()
        await server.close()

    run(scenario())


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.1", False),
        ("localhost.", False),
    ],
)
def test_what_counts_as_loopback(host, expected):
    assert is_loopback(host) is expected


def test_close_ends_idle_and_busy_handlers(run):
    async def scenario():
        ended = []

        async def handler(peer):
            try:
                async for _ in peer:
                    pass
            finally:
                ended.append(peer.name)

        server = await serve("127.0.0.1", 0, identity=DECODE, handler=handler)
        clients = [await dial(server) for _ in range(3)]
        closing = asyncio.create_task(server.close())
        for client in clients:
            assert [message async for message in client] == []
            await client.close()
        await closing
        assert len(ended) == 3
        await server.close()
        with pytest.raises(ConnectionLost):
            await dial(server)

    run(scenario())


def test_close_cancels_a_handler_that_does_not_end(run, monkeypatch):
    monkeypatch.setattr("kvproto.tcp_server.CLOSE_LINGER_S", 0.05)

    async def scenario():
        started, cancelled = asyncio.Event(), asyncio.Event()

        async def stubborn(peer):
            started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        server = await serve("127.0.0.1", 0, identity=DECODE, handler=stubborn)
        client = await dial(server)
        await started.wait()
        await server.close()
        assert cancelled.is_set()
        await client.close()

    run(scenario())


def test_abort_is_immediate(run):
    async def scenario():
        server = await serve("127.0.0.1", 0, identity=DECODE, handler=until_the_end)
        client = await dial(server)
        server.abort()
        server.abort()
        await server.wait_closed()
        with pytest.raises(ConnectionLost):
            await client.receive()
        await client.close()

    run(scenario())


def test_a_connection_made_while_stopping_is_aborted(run, raw_peer):
    async def scenario():
        server = await serve("127.0.0.1", 0, identity=DECODE, handler=until_the_end)
        server._is_closing.set()
        raw = await raw_peer.connect(server.port)
        with contextlib.suppress(ConnectionResetError):
            assert await raw.read_all() == b""
        await raw.close()
        await server.close()
        assert server.num_peers == 0

    run(scenario())


def test_a_server_that_never_started_can_be_closed(run):
    async def scenario():
        busy = await serve("127.0.0.1", 0, identity=DECODE, handler=until_the_end)
        server = type(busy)(
            identity=DECODE,
            handler=until_the_end,
            landing=None,
            limits=DoorLimits(),
            handshake_timeout_s=1.0,
            keepalive_s=1.0,
            tls=None,
        )
        with pytest.raises(LocalProtocolError):
            await server.start("127.0.0.1", busy.port)
        await server.close()
        await busy.close()

    run(scenario())
