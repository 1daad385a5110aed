"""Links to prefill workers: one for each worker, opened on first use, shared by handoffs.

A link is a connection and the path that its KV takes.

Addresses come from the router's registry alone. A worker that answers with another instance id
than the router named has been restarted meanwhile and is refused: the router will name the new one.
"""

import asyncio
import ssl
import time
from dataclasses import dataclass, field, replace

import structlog

from decode_svc.letter_box import LetterBoxes
from decode_svc.path import TCP, Path, PathChooser
from kvproto.errors import ConnectionLost, HandshakeRefused, KvProtoError
from kvproto.handshake import Identity
from kvproto.lease import LeaseTable
from kvproto.messages import Attached, PrefillWorker
from kvproto.tcp_link import Link, open_link

# Prefill workers come and go under new names; more of them than this are not alive at once.
_MAX_DOORS = 1024
# Less gain is noise, or not worth the connections.
_LANES_MIN_GAIN = 1.2


@dataclass(slots=True)
class _Door:
    """The way to one worker: one opens it at a time, and the last failure is remembered."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    failed_at: float = 0.0
    failure: str = ""


@dataclass(eq=False, slots=True)
class PrefillLink:
    """The connection to one prefill worker, and the way its KV comes back.

    ``is_carrier_lost``: the connection was ended because that way broke; a new one finds another.
    """

    peer: Link
    path: Path
    is_carrier_lost: bool = False


class PrefillPeers:
    """The links; what arrives on them goes into the letter boxes."""

    def __init__(
        self,
        identity: Identity,
        leases: LeaseTable,
        boxes: LetterBoxes,
        paths: PathChooser,
        *,
        connect_timeout_s: float,
        max_lanes: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._identity = identity
        self._leases = leases
        self._connect_timeout_s = connect_timeout_s
        self._max_lanes = max_lanes
        self._tls = tls
        self._links: dict[str, PrefillLink] = {}
        # Links whose reader runs; without one a link is dead, whatever its sockets say.
        self._being_read: set[Link] = set()
        self._doors: dict[str, _Door] = {}
        self._boxes = boxes
        self._paths = paths
        self._tasks: asyncio.TaskGroup | None = None
        self._log = structlog.get_logger("decode.prefill_peers")

    async def run(self) -> None:
        """Own the reading tasks until cancelled, then close every connection."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                await asyncio.Event().wait()
        finally:
            self._tasks = None
            for link in list(self._links.values()):
                link.peer.abort("the decode worker stops")

    async def get(self, worker: PrefillWorker) -> PrefillLink:
        """The link to ``worker``, its path proven.

        Raises ConnectionLost, DeadlineExceeded, HandshakeRefused or AuthenticationFailed of
        ``kvproto.tcp.connect``, HandshakeRefused if another instance answers, and what
        ``PathChooser.choose`` and ``accept`` raise.
        """
        door = self._door(worker.instance_id)
        asked_at = time.monotonic()
        # Two handoffs at once must not open two connections.
        async with door.lock:
            link = self._links.get(worker.instance_id)
            if link is not None:
                if not link.peer.is_closed:
                    return link
                # Its reader has not noticed yet, and must not take the new link for it.
                self._forget(worker.instance_id, link)
            if door.failed_at > asked_at:
                # The one before us tried while we waited: do not spend the time-out once more.
                raise ConnectionLost(door.failure)
            try:
                return await self._open(worker)
            except KvProtoError as exc:
                door.failed_at, door.failure = time.monotonic(), str(exc)
                raise

    def _door(self, instance_id: str) -> _Door:
        """The door of a worker; those of workers long gone are forgotten."""
        if len(self._doors) >= _MAX_DOORS:
            idle = [name for name, door in self._doors.items() if not door.lock.locked()]
            for name in idle:
                del self._doors[name]
        return self._doors.setdefault(instance_id, _Door())

    def stats(self) -> dict[str, dict[str, object]]:
        """For the health answer."""
        return {
            name: {**link.peer.stats(), **link.path.stats()} for name, link in self._links.items()
        }

    async def _open(self, worker: PrefillWorker) -> PrefillLink:
        link = await self._dial(worker, num_lanes=1)
        if self._max_lanes > 1 and link.path.carrier == TCP and link.path.report is not None:
            link = await self._widened(worker, link)
        try:
            self._paths.accept(link.peer, link.path)
        except KvProtoError as exc:
            link.path.let_go()
            link.peer.abort(str(exc))
            raise
        if link.peer in self._being_read:
            self._links[worker.instance_id] = link
        else:
            link.path.let_go()
        return link

    async def _widened(self, worker: PrefillWorker, narrow: PrefillLink) -> PrefillLink:
        """A link of several lanes instead, if it is worth its connections."""
        try:
            wide = await self._dial(worker, num_lanes=self._max_lanes)
        except KvProtoError as exc:
            self._log.info("several lanes are not used", worker=worker.instance_id, reason=str(exc))
            return narrow
        is_worth_it = wide.path.bandwidth > _LANES_MIN_GAIN * narrow.path.bandwidth
        better, worse = (wide, narrow) if is_worth_it else (narrow, wide)
        # Other carriers were tried for the first one alone.
        better.path = replace(better.path, passed_over=narrow.path.passed_over)
        await worse.peer.close()
        return better

    async def _dial(self, worker: PrefillWorker, *, num_lanes: int) -> PrefillLink:
        if self._tasks is None:
            raise ConnectionLost("the decode worker stops")
        peer = await open_link(
            worker.host,
            worker.port,
            identity=self._identity,
            landing=self._leases,
            timeout_s=self._connect_timeout_s,
            tls=self._tls,
            num_lanes=num_lanes,
            is_complete=self._leases.is_complete,
        )
        for fact, wanted, found in (
            ("role", "prefill", peer.remote.role),
            ("instance_id", worker.instance_id, peer.remote.instance_id),
        ):
            if wanted != found:
                peer.abort(f"wrong {fact}")
                raise HandshakeRefused(fact, wanted, found)
        self._log.info("connected to prefill worker", peer=peer.name)
        # The path is proven with messages, so they are read already.
        self._being_read.add(peer)
        self._tasks.create_task(self._read(worker.instance_id, peer), name=f"read {peer.name}")
        try:
            path = await self._paths.choose(peer, is_tcp_only=num_lanes > 1)
        except BaseException:
            peer.abort("no path for KV")
            raise
        return PrefillLink(peer, path)

    def _forget(self, instance_id: str, link: PrefillLink) -> None:
        """The link is dead."""
        del self._links[instance_id]
        self._paths.forget(link.peer, link.path)

    async def _read(self, instance_id: str, peer: Link) -> None:
        reason = "the prefill worker closed the connection"
        try:
            async for message in peer:
                if isinstance(message, Attached):
                    self._paths.attached(peer, message)
                else:
                    await self._boxes.route(peer, message)
        except KvProtoError as exc:
            reason = str(exc)
        finally:
            peer.abort("the reader has ended")
            self._being_read.discard(peer)
            link = self._links.get(instance_id)
            if link is not None and link.peer is peer:
                self._forget(instance_id, link)
                self._log.warning("prefill worker lost", peer=peer.name, reason=reason)
            self._boxes.lose(peer, reason)
