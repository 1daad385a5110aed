"""The outbox: never waits for the router, and cuts off one that does not read."""

import asyncio

import pytest

from decode_svc.outbox import Outbox
from kvproto.errors import ConnectionLost
from kvproto.handshake import Identity
from kvproto.messages import Accepted, Tokens
from kvproto.tcp import Peer, connect, serve


async def test_messages_arrive_in_order_and_flush_waits_for_them() -> None:
    outboxes: asyncio.Queue[Outbox] = asyncio.Queue(1)

    async def handle(peer: Peer) -> None:
        outbox = Outbox(peer)
        outboxes.put_nowait(outbox)
        await outbox.run()

    server = await serve(
        "127.0.0.1", 0, identity=Identity(role="decode", instance_id="d"), handler=handle
    )
    router = await connect(
        "127.0.0.1", server.port, identity=Identity(role="router", instance_id="r"), timeout_s=5
    )
    async with asyncio.timeout(10):
        outbox = await outboxes.get()
        outbox.put(Accepted("s"))
        for index in range(100):
            outbox.put(Tokens("s", index, [index]))
        await outbox.flush()
        assert outbox.stats()["num_messages"] == 0
        assert await router.receive() == Accepted("s")
        for index in range(100):
            assert await router.receive() == Tokens("s", index, [index])
    router.abort("done")
    await server.close()


async def test_a_router_that_falls_behind_is_cut_off() -> None:
    outboxes: asyncio.Queue[Outbox] = asyncio.Queue(1)

    async def handle(peer: Peer) -> None:
        outboxes.put_nowait(Outbox(peer, max_messages=3))
        await peer.wait_closed()

    server = await serve(
        "127.0.0.1", 0, identity=Identity(role="decode", instance_id="d"), handler=handle
    )
    router = await connect(
        "127.0.0.1", server.port, identity=Identity(role="router", instance_id="r"), timeout_s=5
    )
    async with asyncio.timeout(10):
        outbox = await outboxes.get()
        for _ in range(3):
            outbox.put(Accepted("s"))
        assert not outbox.peer.is_closed
        outbox.put(Accepted("s"))
        await outbox.peer.wait_closed()
        with pytest.raises(ConnectionLost):
            await router.receive()
    await server.close()


async def test_flush_ends_when_nobody_is_left_to_send_to() -> None:
    outboxes: asyncio.Queue[Outbox] = asyncio.Queue(1)

    async def handle(peer: Peer) -> None:
        outboxes.put_nowait(Outbox(peer))
        await peer.wait_closed()

    server = await serve(
        "127.0.0.1", 0, identity=Identity(role="decode", instance_id="d"), handler=handle
    )
    router = await connect(
        "127.0.0.1", server.port, identity=Identity(role="router", instance_id="r"), timeout_s=5
    )
    async with asyncio.timeout(10):
        outbox = await outboxes.get()
        for _ in range(3):
            outbox.put(Accepted("s"))
        router.abort("gone")
        await outbox.peer.wait_closed()
        await outbox.run()
        await outbox.flush()
        outbox.put(Accepted("late"))
        assert outbox.stats()["num_messages"] == 0
    await server.close()
