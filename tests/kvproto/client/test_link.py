"""A connection and its inboxes."""

import asyncio

import pytest

from kvproto.client.link import Inbox, Link
from kvproto.errors import ConnectionLost, ErrorCode, PeerError, UnexpectedMessage
from kvproto.messages import Describe, Error, Finished, Heartbeat, Tokens

pytestmark = pytest.mark.timeout(30)


async def test_an_inbox_gives_what_came_before_the_end_first():
    inbox = Inbox(10, lambda _: True)
    first = Heartbeat("s", 1)
    assert inbox.put(first)
    inbox.end(ConnectionLost("gone"))
    assert await inbox.get(1.0) == first
    with pytest.raises(ConnectionLost, match="gone"):
        await inbox.get(1.0)


async def test_an_inbox_counts_and_keeps_what_is_wanted():
    inbox = Inbox(2, lambda message: message.generation == 2)
    assert inbox.put(Heartbeat("s", 1))
    assert inbox.put(Heartbeat("s", 2))
    assert not inbox.put(Heartbeat("s", 1))
    assert await inbox.get(1.0) == Heartbeat("s", 2)
    with pytest.raises(TimeoutError):
        await inbox.get(0.01)


async def test_a_waiting_reader_is_woken_by_a_wanted_message_and_by_the_end():
    inbox = Inbox(5, lambda message: message.generation == 2)
    waiting = asyncio.create_task(inbox.get(5.0))
    await asyncio.sleep(0)
    inbox.put(Heartbeat("s", 1))
    inbox.put(Heartbeat("s", 2))
    assert (await waiting).generation == 2


def answering(worker, answer):
    """Make a fake worker send ``answer`` to everything."""

    async def handle(peer):
        async for message in peer:
            assert isinstance(message, Describe)
            await answer(peer)

    worker.handle = handle
    return worker


async def test_a_stray_message_goes_to_whoever_asked_for_strays(start_worker, fake_decode):
    async def answer(peer):
        await peer.send(Tokens("nobody", 0, [1]))
        await peer.send(Finished("nobody", "stop"))
        await peer.send(Error(ErrorCode.INTERNAL, "for the connection"))

    strays = []
    worker = await start_worker(answering(fake_decode(), answer))
    async with Link("127.0.0.1", worker.port, on_stray=strays.append) as link:
        with pytest.raises(PeerError, match="for the connection"):
            await link.describe()
    assert [type(stray) for stray in strays] == [Tokens, Finished]


async def test_a_stray_handler_that_finds_the_connection_lost_harms_nobody(
    start_worker, fake_decode
):
    async def answer(peer):
        await peer.send(Tokens("nobody", 0, [1]))
        await peer.close()

    def lose(_message):
        raise ConnectionLost("gone")

    worker = await start_worker(answering(fake_decode(), answer))
    async with Link("127.0.0.1", worker.port, on_stray=lose) as link:
        with pytest.raises(ConnectionLost, match="closed the connection"):
            await link.describe()


async def test_an_answer_of_another_kind_is_none(prefill_worker):
    async with Link("127.0.0.1", prefill_worker.port) as link:
        describing = asyncio.create_task(link.describe())
        await asyncio.sleep(0)
        inbox = link._inboxes[""]
        inbox.put(Heartbeat("", 1))
        with pytest.raises(UnexpectedMessage, match="HEARTBEAT instead of DESCRIPTION"):
            await describing
        assert (await link.describe()).model == "tiny"
        assert await link.geometry() == prefill_worker.geometry


async def test_leaving_without_having_entered_is_harmless():
    await Link("127.0.0.1", 1).__aexit__(None, None, None)
