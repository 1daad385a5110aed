"""One connection, many sequences: inboxes, loss, cancelling."""

import asyncio
from typing import Any

import pytest

from kvproto.errors import ConnectionLost, ErrorCode, LocalProtocolError
from kvproto.messages import (
    Abort,
    AbortAck,
    Accepted,
    Error,
    Finished,
    Generate,
    Message,
    Ping,
    Tokens,
)
from router_svc.decode_link import DecodeLink, SequenceInbox, WorkerLostError

GENERATE = Generate(
    sequence_id="s",
    tokens=[1],
    num_prompt_tokens=1,
    max_output_tokens=2,
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    seed=0,
    stop_token_ids=[],
    ignore_eos=False,
    prefill_workers=[],
    timeout_s=1.0,
)


class FakePeer:
    """What a link needs of a peer; the real one is used in the tests of the whole router."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.incoming: asyncio.Queue[Message | Exception] = asyncio.Queue()
        self.abort_reasons: list[str] = []
        self.send_error: Exception | None = None
        self.is_stuck = False

    async def send(self, message: Message) -> None:
        if self.send_error is not None:
            raise self.send_error
        if self.is_stuck:
            await asyncio.Event().wait()
        self.sent.append(message)

    async def receive(self) -> Message:
        message = await self.incoming.get()
        if isinstance(message, Exception):
            raise message
        return message

    def abort(self, reason: str) -> None:
        self.abort_reasons.append(reason)
        self.incoming.put_nowait(ConnectionLost(reason))


@pytest.fixture
def peer() -> FakePeer:
    return FakePeer()


@pytest.fixture
def lost() -> list[DecodeLink]:
    return []


@pytest.fixture
async def link(peer: FakePeer, lost: list[DecodeLink]) -> Any:
    link = DecodeLink("d", peer, lost.append)  # type: ignore[arg-type]
    task = asyncio.create_task(link.run())
    yield link
    peer.abort("the test ends")
    await task


async def test_messages_reach_their_sequence(link: DecodeLink, peer: FakePeer) -> None:
    inbox = await link.start(GENERATE)
    assert peer.sent == [GENERATE]
    for message in (Accepted("s"), Tokens("other", 0, [9]), Tokens("s", 0, [1]), AbortAck("x", 0)):
        peer.incoming.put_nowait(message)
    peer.incoming.put_nowait(Finished("s", "stop"))
    assert [await inbox.get() for _ in range(3)] == [
        Accepted("s"),
        Tokens("s", 0, [1]),
        Finished("s", "stop"),
    ]
    link.forget("s")
    assert link.num_sequences == 0


async def test_error_of_a_sequence_is_its_own(link: DecodeLink, peer: FakePeer) -> None:
    inbox = await link.start(GENERATE)
    peer.incoming.put_nowait(Error(1, "broken", sequence_id="unknown"))
    peer.incoming.put_nowait(Error(1, "broken", sequence_id="s"))
    assert await inbox.get() == Error(1, "broken", sequence_id="s")
    assert not link.is_lost


@pytest.mark.parametrize("message", [Error(1, "all of it"), Ping(3)])
async def test_connection_is_ended_by(
    link: DecodeLink, peer: FakePeer, lost: list[DecodeLink], message: Message
) -> None:
    inbox = await link.start(GENERATE)
    peer.incoming.put_nowait(message)
    with pytest.raises(WorkerLostError):
        await inbox.get()
    assert lost == [link]
    assert peer.abort_reasons


async def test_loss_comes_after_what_has_arrived(
    link: DecodeLink, peer: FakePeer, lost: list[DecodeLink]
) -> None:
    inbox = await link.start(GENERATE)
    peer.incoming.put_nowait(Tokens("s", 0, [1]))
    peer.incoming.put_nowait(ConnectionLost("reset by peer"))
    assert await inbox.get() == Tokens("s", 0, [1])
    with pytest.raises(WorkerLostError, match="reset by peer"):
        await inbox.get()
    assert lost == [link]
    with pytest.raises(WorkerLostError):
        await link.start(GENERATE)


async def test_inbox_is_bounded() -> None:
    inbox = SequenceInbox(2)
    for _ in range(3):
        inbox.put_nowait(Accepted("s"))
    assert len(inbox) == 2
    await inbox.get()
    await inbox.get()
    with pytest.raises(WorkerLostError, match="more messages"):
        await inbox.get()


async def test_cancel_sends_abort_for_the_whole_sequence(link: DecodeLink, peer: FakePeer) -> None:
    await link.start(GENERATE)
    await link.cancel("s", ErrorCode.CANCELLED, "enough")
    assert peer.sent[-1] == Abort("s", 0, ErrorCode.CANCELLED, "enough")


async def test_worker_that_takes_no_abort_is_lost(
    link: DecodeLink,
    peer: FakePeer,
    lost: list[DecodeLink],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router_svc.decode_link.ABORT_TIMEOUT_S", 0.01)
    inbox = await link.start(GENERATE)
    peer.is_stuck = True
    await link.cancel("s", ErrorCode.CANCELLED, "enough")
    assert lost == [link]
    with pytest.raises(WorkerLostError, match="ABORT"):
        await inbox.get()
    await link.cancel("s", ErrorCode.CANCELLED, "again")


async def test_failed_send_is_a_loss_and_a_wrong_message_is_not(
    link: DecodeLink, peer: FakePeer
) -> None:
    peer.send_error = ConnectionLost("gone")
    with pytest.raises(WorkerLostError, match="gone"):
        await link.start(GENERATE)
    await link.cancel("s", ErrorCode.CANCELLED, "a lost worker needs no telling")
    peer.send_error = LocalProtocolError("bad field")
    with pytest.raises(LocalProtocolError):
        await link.start(GENERATE)


async def test_retired_link_closes_with_its_last_sequence(link: DecodeLink, peer: FakePeer) -> None:
    await link.start(GENERATE)
    link.retire()
    assert peer.abort_reasons == []
    link.forget("s")
    assert len(peer.abort_reasons) == 1


async def test_idle_link_closes_when_retired(link: DecodeLink, peer: FakePeer) -> None:
    link.retire()
    assert len(peer.abort_reasons) == 1
