"""Several connections between the same two sides, used as one: a *link* of *lanes*.

One TCP stream is limited by one congestion window and, on the way, by one queue. A link has a lane
0, which carries every message, and further lanes, which carry nothing but WRITEs and what belongs
to them. Source: docs/wire.md section 5.6.

    dialling    link = await open_link(host, port, ..., num_lanes=4)
    accepting   serve(..., handler=Links(handler).handle)      calls handler(link)

A link is used like a ``Peer``. Three things are different inside:

WRITEs      of one layer of one transfer stay on one lane, so the tokens of a layer still arrive in
            order, which is all that a lease asks for.
COMMIT      may overtake WRITEs of other lanes. ``receive`` keeps it back until ``is_complete``
            says that everything it announces has landed; what never lands is found by the deadline
            that the receiver has for a transfer without progress.
ABORT_ACK   is a promise about the lane it travels on. ``send`` sends it on every lane, on each
            behind the last WRITE there; ``receive`` delivers it once, when it has come on all.

When one lane ends, the link has ended. A lane that is torn takes the others with it at once. A
lane that ends cleanly gives the others ``CLOSE_LINGER_S`` to end likewise, because a peer that
closes a link closes all its lanes and the last words of one may arrive behind the end of another.
"""

import asyncio
import secrets
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

from kvproto.carrier import KvWriter, Landing
from kvproto.digest import RegionDigests
from kvproto.errors import (
    ConnectionLost,
    ErrorCode,
    HandshakeRefused,
    KvProtoError,
    LocalProtocolError,
    UnexpectedMessage,
)
from kvproto.geometry import KvGeometry
from kvproto.handshake import Identity
from kvproto.messages import MAX_LANES, AbortAck, Commit, Error, Hello, Message, Write
from kvproto.tcp import TcpWriter, connect
from kvproto.tcp_driver import CLOSE_LINGER_S
from kvproto.tcp_peer import SEND_TIMEOUT_S, Peer, messages_until_end

# COMMITs that wait for their WRITEs, and ABORT_ACKs that have not come on every lane. A peer that
# exceeds it loses the oldest, which then runs into the deadline of its transfer.
MAX_WAITING: Final = 4096
# Lanes belong to the opening of a link; one that comes later than this is refused.
JOIN_TIMEOUT_S: Final = 5.0

_LANE_MESSAGES: Final = (Write, AbortAck, Error)

_ValueT = TypeVar("_ValueT")


class Link:
    """The lanes between this side and one other. Not for several threads.

    Args:
        control: lane 0.
        is_complete: whether everything that a COMMIT announces has landed, for a side that
            receives KV (``LeaseTable.is_complete``); without it every COMMIT is delivered at once.

    Attributes:
        control: lane 0.
        remote: the peer's HELLO on lane 0.
        name: as of ``Peer``, for logs.
    """

    def __init__(
        self, control: Peer, *, is_complete: Callable[[Commit], bool] | None = None
    ) -> None:
        self.control = control
        self.remote: Hello = control.remote
        self.name = control.name
        self._is_complete = is_complete
        self._lanes: list[Peer] = []
        self._numbers: set[int] = set()
        self._next_lane = 0
        self._arrived = asyncio.Event()
        self._error: KvProtoError | None = None
        self._closing_timer: asyncio.TimerHandle | None = None
        # Lanes of transfers whose WRITEs have begun; a transfer keeps those it began with.
        self._lanes_of: dict[tuple[str, int], tuple[Peer, ...]] = {}
        self._held_commits: dict[tuple[str, int], Commit] = {}
        self._acks: dict[tuple[str, int], set[int]] = {}
        self._sent_acks: list[AbortAck] | None = []
        self._add(control, 0)

    @property
    def lanes(self) -> tuple[Peer, ...]:
        """Every lane that is there, lane 0 first."""
        return tuple(self._lanes)

    @property
    def is_closed(self) -> bool:
        """Every socket is gone: no byte can arrive any more."""
        return all(lane.is_closed for lane in self._lanes)

    # -- sending -------------------------------------------------------------------------------

    async def send(self, message: Message, *, timeout_s: float = SEND_TIMEOUT_S) -> None:
        """Send on lane 0, ABORT_ACK on every lane. Contract and errors as ``Peer.send``.

        WRITEs are sent by ``writer``. ConnectionLost also if another lane has ended.
        """
        self._check_whole()
        if isinstance(message, AbortAck):
            self._forget(message)
            for lane in self.lanes:
                await lane.send(message, timeout_s=timeout_s)
            return
        if isinstance(message, Commit):
            self._lanes_of.pop((message.sequence_id, message.generation), None)
        await self.control.send(message, timeout_s=timeout_s)

    def writer(self, geometry: KvGeometry) -> KvWriter:
        """What sends KV over all lanes; ``geometry`` is the agreed one, of what travels."""
        return _LinkWriter(self, geometry)

    async def flushed(self, *, timeout_s: float = SEND_TIMEOUT_S) -> None:
        """As ``Peer.flushed``, for every lane."""
        for lane in self.lanes:
            await lane.flushed(timeout_s=timeout_s)

    def lanes_of(self, sequence_id: str, generation: int) -> tuple[Peer, ...]:
        """The lanes on which WRITEs of a transfer travel: those that were there when it began."""
        return self._lanes_of.setdefault((sequence_id, generation), self.lanes)

    # -- receiving -----------------------------------------------------------------------------

    async def receive(self) -> Message:
        """The next message of any lane. Contract and errors as ``Peer.receive``.

        Messages of one lane keep their order. What was received before the end is delivered
        first, from every lane.
        """
        while (message := self._take()) is None:
            self._check_alive()
            self._arrived.clear()
            await self._arrived.wait()
        return message

    def __aiter__(self) -> AsyncIterator[Message]:
        """Messages until the link ends cleanly; raises ConnectionLost if it does not."""
        return messages_until_end(self.receive)

    # -- ending --------------------------------------------------------------------------------

    async def close(self) -> None:
        """Flush and close every lane; takes at most ``CLOSE_LINGER_S``. Idempotent."""
        await asyncio.gather(*(lane.close() for lane in self.lanes))

    def abort(self, reason: str) -> None:
        """Close every lane at once, dropping what was not sent yet. Idempotent."""
        for lane in self.lanes:
            lane.abort(reason)

    async def wait_closed(self) -> None:
        """Return when every socket is gone; from then on nobody writes to our memory."""
        for lane in self.lanes:
            await lane.wait_closed()

    def stats(self) -> dict[str, int | bool]:
        """As of ``Peer``, summed over the lanes; flags that hold for any of them."""
        totals: dict[str, int | bool] = {"num_lanes": len(self._lanes)}
        for lane in self._lanes:
            for name, value in lane.stats().items():
                if isinstance(value, bool):
                    totals[name] = bool(totals.get(name)) or value
                else:
                    totals[name] = totals.get(name, 0) + value
        return totals

    # -- joining -------------------------------------------------------------------------------

    async def join(self, peer: Peer, lane: int) -> None:
        """Add a lane. HandshakeRefused (field ``lane``) if it is there already, or too late.

        ABORT_ACKs that were sent before are sent on it as well: they hold for this lane, too, and
        the peer waits for them on every lane that it has opened.
        """
        if lane in self._numbers or self._sent_acks is None or self._error is not None:
            raise HandshakeRefused(
                "lane",
                "",
                str(lane),
                f"lane {lane} of link {peer.remote.link_id} is refused: it is open already, or "
                "the link is older or gone; open all lanes of a new link at once",
            )
        sent_acks = list(self._sent_acks)
        self._add(peer, lane)
        for ack in sent_acks:
            await peer.send(ack)

    def end_joining(self) -> None:
        """No further lane is added."""
        self._sent_acks = None

    def _add(self, peer: Peer, lane: int) -> None:
        self._lanes.append(peer)
        self._numbers.add(lane)
        peer.report_to(self._arrived, partial(self._lane_ended, peer, lane))

    # -- inside --------------------------------------------------------------------------------

    def _take(self) -> Message | None:
        if (commit := self._take_held_commit()) is not None:
            return commit
        # Each lane in turn, so that a busy one does not keep the others waiting.
        for _ in range(len(self._lanes)):
            index = self._next_lane % len(self._lanes)
            self._next_lane = index + 1
            while (message := self._lanes[index].take()) is not None:
                if (message := self._delivered(index, message)) is not None:
                    return message
        return self._take_held_commit()

    def _delivered(self, index: int, message: Message) -> Message | None:
        """``message``, or None if it is kept back."""
        if index and not isinstance(message, _LANE_MESSAGES):
            error = UnexpectedMessage(f"{message.kind.name} on a lane that is for WRITEs alone")
            self._error = self._error or error
            self.abort(str(error))
            return None
        if isinstance(message, Commit) and self._is_complete is not None:
            # On one lane nothing can be on its way behind COMMIT: what is missing is missing.
            if len(self._lanes) > 1 and not self._is_complete(message):
                key = (message.sequence_id, message.generation)
                _put_bounded(self._held_commits, key, message)
                return None
        elif isinstance(message, AbortAck):
            return self._acknowledged(index, message)
        return message

    def _acknowledged(self, index: int, ack: AbortAck) -> AbortAck | None:
        """``ack`` if it has now come on every lane."""
        key = (ack.sequence_id, ack.generation)
        lanes = self._acks.pop(key, set()) | {index}
        if len(lanes) < len(self._lanes):
            _put_bounded(self._acks, key, lanes)
            return None
        self._held_commits.pop(key, None)
        return ack

    def _take_held_commit(self) -> Commit | None:
        if self._is_complete is not None:
            for key, commit in self._held_commits.items():
                if self._is_complete(commit):
                    return self._held_commits.pop(key)
        return None

    def _forget(self, ack: AbortAck) -> None:
        self._lanes_of.pop((ack.sequence_id, ack.generation), None)
        if self._sent_acks is not None:
            self._sent_acks.append(ack)
            if len(self._sent_acks) > MAX_WAITING:
                self.end_joining()

    def _check_whole(self) -> None:
        """ConnectionLost if any lane has ended."""
        if self._error is not None:
            is_clean = isinstance(self._error, ConnectionLost) and self._error.clean
            raise ConnectionLost(str(self._error), clean=is_clean) from self._error

    def _check_alive(self) -> None:
        """ConnectionLost if every lane has ended."""
        if all(lane.error is not None for lane in self._lanes):
            self._check_whole()

    def _lane_ended(self, peer: Peer, lane: int) -> None:
        """The connection of a lane has ended, or its socket is gone."""
        error = peer.error
        is_clean = isinstance(error, ConnectionLost) and error.clean
        if self._error is None or (not is_clean and _is_clean(self._error)):
            self._error = error
        self._arrived.set()
        if self.is_closed:
            if self._closing_timer is not None:
                self._closing_timer.cancel()
        elif not is_clean:
            self.abort(f"lane {lane} of this link was lost: {error}")
        elif self._closing_timer is None:
            loop = asyncio.get_running_loop()
            self._closing_timer = loop.call_later(
                CLOSE_LINGER_S, self.abort, f"lane {lane} of this link was closed"
            )


class _LinkWriter:
    """A ``TcpWriter`` for each lane. Implements ``KvWriter``."""

    def __init__(self, link: Link, geometry: KvGeometry) -> None:
        self._link = link
        self._geometry = geometry
        self._writers: dict[Peer, TcpWriter] = {}

    async def write(
        self,
        sequence_id: str,
        generation: int,
        layer: int,
        first_token: int,
        num_tokens: int,
        buffers: Sequence[memoryview],
        digests: RegionDigests | None = None,
    ) -> None:
        """See ``KvWriter.write``; one frame, on the lane of this layer."""
        lanes = self._link.lanes_of(sequence_id, generation)
        lane = lanes[layer % len(lanes)]
        writer = self._writers.get(lane)
        if writer is None:
            writer = self._writers[lane] = TcpWriter(lane, self._geometry)
        await writer.write(
            sequence_id, generation, layer, first_token, num_tokens, buffers, digests
        )

    async def flush(self) -> None:
        """See ``KvWriter.flush``."""
        await self._link.flushed()


async def open_link(
    host: str,
    port: int,
    *,
    identity: Identity,
    landing: Landing | None = None,
    timeout_s: float,
    keepalive_s: float = 5.0,
    tls: ssl.SSLContext | None = None,
    num_lanes: int = 1,
    is_complete: Callable[[Commit], bool] | None = None,
) -> Link:
    """Connect ``num_lanes`` lanes and do all handshakes within ``timeout_s``.

    The peer must use ``Links`` if ``num_lanes`` is above 1. Other arguments and errors as
    ``kvproto.tcp.connect`` and ``Link``; also LocalProtocolError: ``num_lanes`` outside
    1..``MAX_LANES``, and HandshakeRefused: another instance answers on a further lane.
    """
    if not 1 <= num_lanes <= MAX_LANES:
        raise LocalProtocolError(f"cannot open {num_lanes} lanes; a link has 1 to {MAX_LANES}")
    loop = asyncio.get_running_loop()
    expires_at = loop.time() + timeout_s
    link_id = secrets.token_hex(16) if num_lanes > 1 else ""

    async def dial(lane: int) -> Peer:
        return await connect(
            host,
            port,
            identity=replace(identity, link_id=link_id, lane=lane),
            landing=landing,
            timeout_s=max(0.0, expires_at - loop.time()),
            keepalive_s=keepalive_s,
            tls=tls,
        )

    link = Link(await dial(0), is_complete=is_complete)
    dialling = [asyncio.create_task(dial(lane)) for lane in range(1, num_lanes)]
    try:
        for lane, task in enumerate(dialling, 1):
            peer = await task
            _check_same_instance(link.remote, peer.remote)
            await link.join(peer, lane)
    except BaseException:
        link.abort("a lane of this link could not be opened")
        for result in await _end_all(dialling):
            if isinstance(result, Peer):
                result.abort("another lane of this link could not be opened")
        raise
    link.end_joining()
    return link


class Links:
    """Joins the lanes that peers open into links; ``handle`` is the handler for ``serve``.

    Args:
        handler: called once for each link, as soon as its lane 0 is there; further lanes join
            while it runs. When it returns the link is closed, when it raises all lanes of this
            link are aborted.
        is_complete: see ``Link``.
        join_timeout_s: how long a lane may wait for its lane 0, and lane 0 for its lanes.
    """

    def __init__(
        self,
        handler: Callable[[Link], Awaitable[None]],
        *,
        is_complete: Callable[[Commit], bool] | None = None,
        join_timeout_s: float = JOIN_TIMEOUT_S,
    ) -> None:
        self._handler = handler
        self._is_complete = is_complete
        self._join_timeout_s = join_timeout_s
        # By link id; a link id is new and random, so nobody else's is met by chance.
        self._links: dict[str, Link] = {}
        self._opened = asyncio.Condition()

    async def handle(self, peer: Peer) -> None:
        """Serve one connection: lane 0 by ``handler``, another one by joining its link."""
        remote = peer.remote
        if not remote.lane:
            await self._serve(peer)
            return
        try:
            await (await self._find(remote)).join(peer, remote.lane)
        except HandshakeRefused as exc:
            await peer.send(Error(ErrorCode.INCOMPATIBLE, str(exc), exc.field))
            return  # and the server closes it
        await peer.wait_closed()

    async def _serve(self, peer: Peer) -> None:
        link_id = peer.remote.link_id
        link = Link(peer, is_complete=self._is_complete)
        joining: asyncio.TimerHandle | None = None
        if not link_id:
            link.end_joining()
        elif link_id in self._links:
            text = f"link {link_id} has a lane 0 already; open a new link"
            await peer.send(Error(ErrorCode.INCOMPATIBLE, text, "link_id"))
            return
        else:
            self._links[link_id] = link
            loop = asyncio.get_running_loop()
            joining = loop.call_later(self._join_timeout_s, link.end_joining)
            async with self._opened:
                self._opened.notify_all()
        try:
            await self._handler(link)
            await link.close()
        finally:
            # After an error; nothing is left of a link that was closed.
            link.abort("the handler of this link failed")
            if joining is not None:
                joining.cancel()
                del self._links[link_id]

    async def _find(self, remote: Hello) -> Link:
        """The link of a lane; lane 0 may be a moment behind. HandshakeRefused (``link_id``)."""
        try:
            async with asyncio.timeout(self._join_timeout_s), self._opened:
                await self._opened.wait_for(lambda: remote.link_id in self._links)
        except TimeoutError:
            raise _no_link(remote, "no lane 0 of that link is open") from None
        link = self._links[remote.link_id]
        if not _is_same_instance(link.remote, remote):
            raise _no_link(remote, "that link is another instance's")
        return link


def _is_same_instance(one: Hello, other: Hello) -> bool:
    return (one.role, one.instance_id) == (other.role, other.instance_id)


def _check_same_instance(control: Hello, lane: Hello) -> None:
    if not _is_same_instance(control, lane):
        raise HandshakeRefused(
            "instance_id",
            control.instance_id,
            lane.instance_id,
            f"handshake refused: {control.role} {control.instance_id} answers on lane 0, but "
            f"{lane.role} {lane.instance_id} on another; was it restarted?",
        )


def _no_link(remote: Hello, reason: str) -> HandshakeRefused:
    return HandshakeRefused(
        "link_id",
        "",
        remote.link_id,
        f"lane {remote.lane} of link {remote.link_id!r} is refused: {reason}",
    )


def _is_clean(error: KvProtoError) -> bool:
    return isinstance(error, ConnectionLost) and error.clean


def _put_bounded(
    waiting: dict[tuple[str, int], _ValueT], key: tuple[str, int], value: _ValueT
) -> None:
    waiting[key] = value
    if len(waiting) > MAX_WAITING:
        del waiting[next(iter(waiting))]


async def _end_all(tasks: Sequence[asyncio.Task[Peer]]) -> list[Peer | BaseException]:
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)
