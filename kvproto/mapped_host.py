"""The owner of a mapped region: hands it out, makes sure that it arrived, knows who still has it.

    owner, on TCP       OFFER(nonce)  ------------------------------->  writer
    owner, Unix socket                <-- nonce ----------------------  connects, in its own
                        -- region's descriptor, probe slot ---------->  directory only
    owner, on TCP                     <-- ATTACHED(nonce) ------------  mapped; canary and nonce
    reads the slot: attached                                            written into the slot

No address proves that two processes share a host; a descriptor that arrives does, because a kernel
passes descriptors only within itself. The nonce binds the Unix connection to the authenticated
TCP connection. The slot proves that the writer sees the same memory and the same numbers in it.

The Unix connection stays. A writer closes it after it has unmapped the region, and a dying process
loses its memory before its sockets, so its end, and nothing else, proves that this writer can
write no more. The end of the TCP connection proves nothing here. Source: docs/wire.md section 6.
"""

import asyncio
import hmac
import logging
import os
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvproto.errors import CarrierUnavailable, HandshakeRefused
from kvproto.handshake import CANARY_NBYTES, check_canary
from kvproto.header import HOST_ORDER
from kvproto.messages import NONCE_NBYTES, Attached, Offer
from kvproto.region import (
    ATTACH_TIMEOUT_S,
    CANARY_AND_NONCE_NBYTES,
    CARRIER,
    NUM_SLOTS,
    SLOT_INDEX,
    SLOT_NBYTES,
    Region,
)
from kvproto.socket_directory import SocketDirectory, peer_uid
from kvproto.tcp_peer import Peer

logger = logging.getLogger("kvproto.mapped")

# After the system refused a connection (no descriptors left) it may refuse the next one too.
_ACCEPT_PAUSE_S: Final = 0.1


class Attachment:
    """One writer's hold on the region. Implements ``carrier.Attachment``.

    Attributes:
        writer: instance id of the writer, as it authenticated on TCP.
        slot_index: its probe slot.
    """

    def __init__(self, writer: str, slot_index: int) -> None:
        self.writer = writer
        self.slot_index = slot_index
        self._gone = asyncio.Event()

    @property
    def is_gone(self) -> bool:
        """The writer has let go of the memory; it can write no more."""
        return self._gone.is_set()

    async def wait_gone(self) -> None:
        """Until ``is_gone``. A deadline is the caller's: a stopped process keeps what it has."""
        await self._gone.wait()

    def cut(self) -> None:
        """Cannot be: memory that another process has mapped stays with it. Does nothing."""

    async def open_keys(self) -> list[int]:
        """None: who has the memory mapped needs no key."""
        return []

    def close_keys(self, keys: list[int]) -> None:
        """There are none."""

    def end(self) -> None:
        """The host alone calls this: the writer's Unix connection has ended."""
        self._gone.set()


@dataclass(eq=False, slots=True)
class _Offer:
    """An offer that waits for its writer."""

    peer: Peer
    nonce: bytes
    answer: asyncio.Future[Attached]
    attachment: Attachment | None = None


@dataclass(slots=True)
class _State:
    """What ``MappedHost`` keeps: offers that wait, writers that are attached."""

    offers: list[_Offer] = field(default_factory=list)
    attachments: set[Attachment] = field(default_factory=set)
    free_slots: list[int] = field(default_factory=lambda: list(reversed(range(NUM_SLOTS))))
    connections: set[socket.socket] = field(default_factory=set)


class MappedHost:
    """Serves one region. Made by ``start``; ``close`` before the region is closed.

    At most NUM_SLOTS writers at a time. Implements ``carrier.CarrierHost``.
    """

    carrier = CARRIER
    # Who has the memory mapped can write all of it.
    has_lease_keys = False

    def __init__(self, region: Region, directory: SocketDirectory, listener: socket.socket) -> None:
        self._region = region
        self._directory = directory
        self._listener = listener
        self._state = _State()
        self._serving = asyncio.create_task(self._serve(), name=f"mapped:{region.instance_id}")

    @classmethod
    async def start(cls, region: Region, directory: Path | None = None) -> "MappedHost":
        """Listen as ``region.instance_id`` in ``directory`` (None: the default one).

        CarrierUnavailable as ``SocketDirectory.open`` and ``listen``.
        """
        opened = SocketDirectory.open(directory, is_owner=True)
        try:
            listener = opened.listen(region.instance_id)
        except CarrierUnavailable:
            opened.close()
            raise
        return cls(region, opened, listener)

    async def attach(self, peer: Peer, *, timeout_s: float = ATTACH_TIMEOUT_S) -> Attachment:
        """Offer the region to ``peer``; return once it has proven that it reached it.

        Whoever reads from ``peer`` must pass its ATTACHED to ``attached``. CarrierUnavailable: no
        slot is free, no proof within ``timeout_s``, the writer says why it cannot, it never came
        for the region, what it wrote is not in our memory. ConnectionLost. After any of these use
        TCP. A writer that came for the region and failed then may still have it mapped; it knows
        no block of ours.
        """
        if not self._state.free_slots:
            raise CarrierUnavailable(f"{NUM_SLOTS} writers are attached, the limit")
        nonce = secrets.token_bytes(NONCE_NBYTES)
        offer = _Offer(peer, nonce, asyncio.get_running_loop().create_future())
        self._state.offers.append(offer)
        try:
            async with asyncio.timeout(timeout_s):
                await peer.send(Offer(CARRIER, nonce))
                answer = await offer.answer
        except TimeoutError:
            raise CarrierUnavailable(
                f"{peer.name} did not answer the offer of mapped memory within {timeout_s:g} s"
            ) from None
        finally:
            self._state.offers.remove(offer)
        if answer.reason:
            raise CarrierUnavailable(f"{peer.name} cannot attach: {answer.reason}")
        attachment = offer.attachment
        if attachment is None or attachment.is_gone:
            raise CarrierUnavailable(f"{peer.name} says that it attached, and did not")
        self._check_slot(attachment.slot_index, nonce, peer.name)
        return attachment

    def attached(self, peer: Peer, message: Attached) -> None:
        """ATTACHED came from ``peer``. An answer to no offer, or to one of another, is ignored."""
        offer = self._find_offer(message.nonce)
        if offer is not None and offer.peer is peer and not offer.answer.done():
            offer.answer.set_result(message)

    def stats(self) -> dict[str, int]:
        """Writers attached, their limit, offers without an answer, Unix connections."""
        return {
            "num_attached": len(self._state.attachments),
            "max_attached": NUM_SLOTS,
            "num_offers": len(self._state.offers),
            "num_connections": len(self._state.connections),
        }

    async def close(self) -> None:
        """Stop listening and cut every Unix connection. Idempotent.

        Attachments that were not gone never will be: nobody watches them any more.
        """
        self._serving.cancel()
        await asyncio.wait([self._serving])
        # Not in the tasks: one that is cancelled before its first step does nothing at its end.
        for connection in self._state.connections:
            connection.close()
        if self._listener.fileno() >= 0:
            self._listener.close()
            self._directory.unlink(self._region.instance_id)
            self._directory.close()

    # -- inside --------------------------------------------------------------------------------

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            while True:
                try:
                    connection, _ = await loop.sock_accept(self._listener)
                except OSError as exc:
                    logger.warning("mapped memory: cannot accept a writer: %s", exc)
                    await asyncio.sleep(_ACCEPT_PAUSE_S)
                    continue
                if len(self._state.connections) >= NUM_SLOTS:
                    connection.close()  # it was given nothing
                    continue
                self._state.connections.add(connection)
                tasks.create_task(self._serve_writer(connection), name="mapped:writer")

    async def _serve_writer(self, connection: socket.socket) -> None:
        """One Unix connection: its nonce, the region, its end."""
        loop = asyncio.get_running_loop()
        attachment: Attachment | None = None
        try:
            with connection:
                connection.setblocking(False)
                async with asyncio.timeout(ATTACH_TIMEOUT_S):
                    attachment = self._admit(connection, await _receive_nonce(loop, connection))
                # It has nothing more to say; what it says all the same is dropped.
                with suppress(ConnectionError):
                    while await loop.sock_recv(connection, NONCE_NBYTES):
                        pass
        except (OSError, TimeoutError, CarrierUnavailable) as exc:
            logger.warning("mapped memory: a writer was turned away: %s", exc)
        except Exception:
            # A bug of ours; the other writers must not fall with this one.
            logger.exception("mapped memory: serving a writer failed")
        else:
            attachment.end()
        finally:
            self._state.connections.discard(connection)
            if attachment is not None:
                self._state.attachments.discard(attachment)
                self._state.free_slots.append(attachment.slot_index)

    def _admit(self, connection: socket.socket, nonce: bytes) -> Attachment:
        """Pass the region to a writer that we offered it to."""
        if (uid := peer_uid(connection)) != os.geteuid():
            raise CarrierUnavailable(f"it runs as uid {uid}")
        offer = self._find_offer(nonce)
        if offer is None:
            raise CarrierUnavailable("it has no nonce of an open offer")
        if offer.attachment is not None:
            raise CarrierUnavailable(f"the nonce of {offer.peer.name} was used before")
        index = self._state.free_slots.pop()
        self._region.slot(index)[:] = bytes(SLOT_NBYTES)
        attachment = Attachment(offer.peer.remote.instance_id, index)
        try:
            socket.send_fds(connection, [SLOT_INDEX.pack(index)], [self._region.fd])
        except OSError:
            self._state.free_slots.append(index)
            raise
        offer.attachment = attachment
        self._state.attachments.add(attachment)
        return attachment

    def _find_offer(self, nonce: bytes) -> _Offer | None:
        found = None
        for offer in self._state.offers:
            # All of them, each in constant time: how long it takes says nothing.
            if hmac.compare_digest(offer.nonce, nonce):
                found = offer
        return found

    def _check_slot(self, index: int, nonce: bytes, name: str) -> None:
        raw = bytes(self._region.slot(index)[:CANARY_AND_NONCE_NBYTES])
        try:
            check_canary(raw[:CANARY_NBYTES], HOST_ORDER)
        except HandshakeRefused as exc:
            raise CarrierUnavailable(f"{name} wrote a canary that does not read so here") from exc
        if not hmac.compare_digest(raw[CANARY_NBYTES:], nonce):
            raise CarrierUnavailable(f"{name} wrote another nonce than it was offered")


async def _receive_nonce(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> bytes:
    nonce = b""
    while len(nonce) < NONCE_NBYTES:
        piece = await loop.sock_recv(connection, NONCE_NBYTES - len(nonce))
        if not piece:
            raise CarrierUnavailable("it went away before it sent a nonce")
        nonce += piece
    return nonce
