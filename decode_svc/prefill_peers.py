"""Connections to prefill workers: one for each worker, opened on first use, shared by handoffs.

Addresses come from the router's registry alone. A worker that answers with another instance id
than the router named has been restarted meanwhile and is refused: the router will name the new one.
"""

import asyncio
import ssl
import time
from dataclasses import dataclass, field

import structlog

from decode_svc.letter_box import LetterBox, Lost
from kvproto.errors import ConnectionLost, HandshakeRefused, KvProtoError
from kvproto.handshake import Identity
from kvproto.lease import LeaseTable
from kvproto.messages import Abort, AbortAck, Commit, Error, Message, PrefillWorker, Started
from kvproto.tcp import Peer, connect

# Prefill workers come and go under new names; more of them than this are not alive at once.
_MAX_DOORS = 1024


@dataclass(slots=True)
class _Door:
    """The way to one worker: one opens it at a time, and the last failure is remembered."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    failed_at: float = 0.0
    failure: str = ""


class PrefillPeers:
    """The connections, and the letter boxes of the handoffs that run over them."""

    def __init__(
        self,
        identity: Identity,
        leases: LeaseTable,
        *,
        connect_timeout_s: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._identity = identity
        self._leases = leases
        self._connect_timeout_s = connect_timeout_s
        self._tls = tls
        self._peers: dict[str, Peer] = {}
        self._doors: dict[str, _Door] = {}
        self._boxes: dict[tuple[Peer, str, int], LetterBox] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._log = structlog.get_logger("decode.prefill_peers")

    async def run(self) -> None:
        """Own the reading tasks until cancelled, then close every connection."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                await asyncio.Event().wait()
        finally:
            self._tasks = None
            for peer in list(self._peers.values()):
                peer.abort("the decode worker stops")

    async def get(self, worker: PrefillWorker) -> Peer:
        """The connection to ``worker``.

        Raises ConnectionLost, DeadlineExceeded, HandshakeRefused or AuthenticationFailed of
        ``kvproto.tcp.connect``, and HandshakeRefused if another instance answers.
        """
        door = self._door(worker.instance_id)
        asked_at = time.monotonic()
        # Two handoffs at once must not open two connections.
        async with door.lock:
            peer = self._peers.get(worker.instance_id)
            if peer is not None:
                return peer
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

    def open_box(self, peer: Peer, sequence_id: str, generation: int) -> LetterBox:
        """Start to receive letters for one attempt."""
        box = self._boxes[peer, sequence_id, generation] = LetterBox()
        return box

    def close_box(self, peer: Peer, sequence_id: str, generation: int) -> None:
        """Stop; later letters for this attempt are answered or ignored."""
        del self._boxes[peer, sequence_id, generation]

    def stats(self) -> dict[str, dict[str, object]]:
        """For the health answer."""
        return {name: dict(peer.stats()) for name, peer in self._peers.items()}

    async def _open(self, worker: PrefillWorker) -> Peer:
        if self._tasks is None:
            raise ConnectionLost("the decode worker stops")
        peer = await connect(
            worker.host,
            worker.port,
            identity=self._identity,
            landing=self._leases,
            timeout_s=self._connect_timeout_s,
            tls=self._tls,
        )
        for fact, wanted, found in (
            ("role", "prefill", peer.remote.role),
            ("instance_id", worker.instance_id, peer.remote.instance_id),
        ):
            if wanted != found:
                peer.abort(f"wrong {fact}")
                raise HandshakeRefused(fact, wanted, found)
        self._peers[worker.instance_id] = peer
        self._log.info("connected to prefill worker", peer=peer.name)
        self._tasks.create_task(self._read(worker.instance_id, peer), name=f"read {peer.name}")
        return peer

    async def _read(self, instance_id: str, peer: Peer) -> None:
        reason = "the prefill worker closed the connection"
        try:
            async for message in peer:
                await self._route(peer, message)
        except KvProtoError as exc:
            reason = str(exc)
        finally:
            peer.abort("the reader has ended")
            if self._peers.get(instance_id) is peer:
                del self._peers[instance_id]
            self._log.warning("prefill worker lost", peer=peer.name, reason=reason)
            for (box_peer, *_), box in list(self._boxes.items()):
                if box_peer is peer:
                    box.put(Lost(reason))

    async def _route(self, peer: Peer, message: Message) -> None:
        match message:
            case Started() | Commit() | Abort() | AbortAck():
                box = self._boxes.get((peer, message.sequence_id, message.generation))
                if box is None:
                    if isinstance(message, Abort):
                        # Terminal messages are idempotent: nothing of ours is left to stop.
                        await peer.send(AbortAck(message.sequence_id, message.generation))
                elif not box.put(message):
                    peer.abort(f"{peer.name} floods {message.sequence_id}")
            case Error():
                for (box_peer, sequence_id, _), box in list(self._boxes.items()):
                    if box_peer is peer and message.sequence_id in ("", sequence_id):
                        box.put(message)
            case _:
                pass  # WRITE: its bytes have landed already
