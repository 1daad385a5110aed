"""The owner of a pool: connects writers to it, gives them keys, takes the keys back.

    owner                                              writer
    makes queue pairs    -- OFFER(nonce, its ends) -->
                                                       makes its own, connects them
                         <-- ATTACHED(its ends) ----
    connects its own
    opens a key          -- PREFILL or PROBE(keys) -->  writes, on TCP: PLACED ... COMMIT
    closes the key

Where the device has memory windows, the pool itself is open to nobody: each lease opens one window
on each connection, for as long as the lease lives, in which the pool begins at 0. So no address of
ours leaves this process. Without windows the pool has one key, which the writer may use as long as
it is connected.

The end of a connection on this side is proof: a device puts nothing into memory for a queue pair
that is gone. So, unlike mapped memory, a silent writer is simply cut off. Source: docs/wire.md
section 6.
"""

import asyncio
import hmac
import logging
import secrets
from dataclasses import dataclass
from typing import Any, Final

from kvproto.errors import CarrierLost, CarrierUnavailable
from kvproto.geometry import PoolLayout
from kvproto.header import HOST_ORDER
from kvproto.messages import NONCE_NBYTES, Attached, Offer
from kvproto.rdma.completion import CompletionQueue
from kvproto.rdma.constants import MW_TYPE_2, Access
from kvproto.rdma.device import Device
from kvproto.rdma.memory import RegisteredMemory
from kvproto.rdma.queue_pair import QueuePair
from kvproto.rdma.verbs import in_use_for
from kvproto.tcp_peer import Peer

logger = logging.getLogger("kvproto.rdma")

CARRIER: Final = "rdma"
MAX_WRITERS: Final = 256
ATTACH_TIMEOUT_S: Final = 5.0


class RdmaAttachment:
    """One writer's connections to our pool. Implements ``carrier.Attachment``.

    Attributes:
        writer: instance id of the writer, as it authenticated on TCP.
    """

    def __init__(self, host: "RdmaHost", writer: str) -> None:
        self.writer = writer
        self._host = host
        self._gone = asyncio.Event()
        device = host.device
        num_queue_pairs = device.settings.num_queue_pairs
        self._completions = CompletionQueue(device, num_queue_pairs * device.max_send_wr)
        self.queue_pairs: list[QueuePair] = []
        self._windows: dict[int, Any] = {}
        try:
            for _ in range(num_queue_pairs):
                self.queue_pairs.append(QueuePair(device, self._completions, is_target=True))
        except BaseException:
            self.cut()
            raise

    @property
    def is_gone(self) -> bool:
        """The connections have ended on this side: the writer can write no more."""
        return self._gone.is_set()

    async def wait_gone(self) -> None:
        """Until ``is_gone``, which is when somebody on this side calls ``cut``."""
        await self._gone.wait()

    def cut(self) -> None:
        """End the connections and with them every key. Idempotent."""
        # A queue pair cannot go while a window is bound to it: some devices wait for ever.
        self.close_keys(list(self._windows))
        for queue_pair in self.queue_pairs:
            queue_pair.close()
        self._completions.close()
        self._host.forget(self)
        self._gone.set()

    async def open_keys(self) -> list[int]:
        """One key for each connection; none if the device has no windows. CarrierLost."""
        keys: list[int] = []
        if not self._host.device.has_windows:
            return keys
        try:
            for queue_pair in self.queue_pairs:
                window = self._host.make_window()
                try:
                    key = await queue_pair.bind(window, self._host.bind_info())
                except BaseException:
                    self._close_window(window)
                    raise
                self._windows[key] = window
                keys.append(key)
        except CarrierLost:
            self.close_keys(keys)
            raise
        except BaseException:
            # Interrupted: a window may be bound at any moment, and nobody would know its key.
            self.cut()
            raise
        return keys

    def close_keys(self, keys: list[int]) -> None:
        """They open nothing any more when this returns. A write under way with one fails."""
        for key in keys:
            window = self._windows.pop(key, None)
            if window is not None:
                self._close_window(window)

    def _close_window(self, window: Any) -> None:
        try:
            window.close()
        except self._host.device.verbs.error as exc:
            # Its connection goes, and with it what the window opens.
            logger.warning("a memory window of %s cannot be closed: %s", self.writer, exc)
            for queue_pair in self.queue_pairs:
                queue_pair.fail("a memory window cannot be closed")


@dataclass(eq=False, slots=True)
class _Offer:
    """An offer that waits for its writer."""

    peer: Peer
    nonce: bytes
    answer: asyncio.Future[Attached]


class RdmaHost:
    """Serves one pool on one device. Implements ``carrier.CarrierHost``.

    Args:
        device: closed by its owner, after ``close``.
        layout, pool: the memory, registered here once; kept until ``close``.

    CarrierUnavailable if the pool cannot be registered.

    Attributes:
        carrier: "rdma".
        device: the one.
    """

    carrier = CARRIER

    def __init__(self, device: Device, layout: PoolLayout, pool: memoryview) -> None:
        self.device = device
        self._layout = layout
        access = Access.LOCAL_WRITE
        access |= Access.MW_BIND if device.has_windows else Access.REMOTE_WRITE
        self._memory = RegisteredMemory(device, pool, access, "the KV pool")
        self._offers: list[_Offer] = []
        self._attachments: set[RdmaAttachment] = set()
        logger.info(
            "RDMA: %d bytes registered on %s in %.0f ms, %s",
            self._memory.nbytes,
            device.chosen.port.name,
            self._memory.elapsed_s * 1e3,
            "one key for each lease" if device.has_windows else "one key for all leases",
        )

    @property
    def has_lease_keys(self) -> bool:
        """The device has memory windows; without them one key is good for all of the pool."""
        return self.device.has_windows

    async def attach(self, peer: Peer, *, timeout_s: float = ATTACH_TIMEOUT_S) -> RdmaAttachment:
        """Connect ``peer`` to the pool; it has no key yet.

        Whoever reads from ``peer`` must pass its ATTACHED to ``attached``. CarrierUnavailable: the
        limit of writers, the device, no answer within ``timeout_s``, the writer says why it cannot,
        it has another byte order, its ends do not fit. ConnectionLost. Nothing is left then.
        """
        if len(self._attachments) >= MAX_WRITERS:
            raise CarrierUnavailable(f"{MAX_WRITERS} writers are attached, the limit")
        attachment = RdmaAttachment(self, peer.remote.instance_id)
        self._attachments.add(attachment)
        try:
            await self._connect(peer, attachment, timeout_s)
        except BaseException:
            attachment.cut()
            raise
        return attachment

    async def _connect(self, peer: Peer, attachment: RdmaAttachment, timeout_s: float) -> None:
        nonce = secrets.token_bytes(NONCE_NBYTES)
        offer = _Offer(peer, nonce, asyncio.get_running_loop().create_future())
        self._offers.append(offer)
        gid = self.device.chosen.gid
        try:
            async with asyncio.timeout(timeout_s):
                await peer.send(
                    Offer(
                        CARRIER,
                        nonce,
                        queue_pairs=[pair.facts(gid) for pair in attachment.queue_pairs],
                        byte_order=HOST_ORDER,
                        num_blocks=self._layout.num_blocks,
                        block_size=self._layout.block_size,
                        base=0 if self.device.has_windows else self._memory.address,
                        key=0 if self.device.has_windows else self._memory.rkey,
                    )
                )
                answer = await offer.answer
        except TimeoutError:
            raise CarrierUnavailable(
                f"{peer.name} did not answer the offer of RDMA within {timeout_s:g} s"
            ) from None
        finally:
            self._offers.remove(offer)
        if answer.reason:
            raise CarrierUnavailable(f"{peer.name} cannot attach: {answer.reason}")
        check_byte_order(answer.byte_order, peer.name)
        if len(answer.queue_pairs) != len(attachment.queue_pairs):
            raise CarrierUnavailable(
                f"{peer.name} has {len(answer.queue_pairs)} ends for "
                f"{len(attachment.queue_pairs)} connections"
            )
        for queue_pair, remote in zip(attachment.queue_pairs, answer.queue_pairs, strict=True):
            queue_pair.connect(remote, gid)

    def attached(self, peer: Peer, message: Attached) -> None:
        """ATTACHED came from ``peer``. An answer to no offer, or to one of another, is ignored."""
        for offer in self._offers:
            is_answer = hmac.compare_digest(offer.nonce, message.nonce)
            if is_answer and offer.peer is peer and not offer.answer.done():
                offer.answer.set_result(message)

    def stats(self) -> dict[str, str | int]:
        """For the health answer."""
        return {**self.device.stats(), "num_attached": len(self._attachments)}

    def close(self) -> None:
        """Cut every writer off, then unregister the pool. Idempotent."""
        for attachment in list(self._attachments):
            attachment.cut()
        self._memory.close()

    # -- for attachments -----------------------------------------------------------------------

    def forget(self, attachment: RdmaAttachment) -> None:
        """It has been cut."""
        self._attachments.discard(attachment)

    def make_window(self) -> Any:
        """A memory window, not bound yet. CarrierLost."""
        verbs = self.device.verbs
        with in_use_for(verbs, "make a memory window"):
            return verbs.mw(self.device.pd, MW_TYPE_2)

    def bind_info(self) -> Any:
        """What a window opens: writing into the pool, which begins at 0 in it."""
        return self.device.verbs.mw_bind_info(
            self._memory.region,
            self._memory.address,
            self._memory.nbytes,
            int(Access.REMOTE_WRITE | Access.ZERO_BASED),
        )


def check_byte_order(order: int, name: str) -> None:
    """CarrierUnavailable if the numbers in the peer's memory have another order than ours."""
    if order != HOST_ORDER:
        raise CarrierUnavailable(
            f"{name} has numbers of another byte order in its memory ({order}, here "
            f"{int(HOST_ORDER)}): RDMA moves memory as it is, so this pair uses tcp, which converts"
        )
