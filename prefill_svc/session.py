"""One connection of a decode worker or client: what it asks for, and how its KV goes back."""

import asyncio
import contextlib
from pathlib import Path

import structlog

from kvproto.carrier import KvWriter, PlacingWriter
from kvproto.errors import (
    CarrierLost,
    ConnectionLost,
    DeadlineExceeded,
    ErrorCode,
    KvProtoError,
    LeaseError,
)
from kvproto.geometry import KvGeometry
from kvproto.mapped import MappedWriter, answer_offer
from kvproto.messages import (
    Abort,
    AbortAck,
    CommitAck,
    Describe,
    Description,
    Error,
    Message,
    Offer,
    Prefill,
    Probe,
)
from kvproto.probe import answer_probe
from kvproto.rdma.host import CARRIER as RDMA
from kvproto.tcp_link import Link
from prefill_svc.errors import PromptRefused
from prefill_svc.metrics import PrefillMetrics
from prefill_svc.prefiller import Prefiller
from prefill_svc.rdma_pool import RdmaPool
from prefill_svc.transfer import Transfer


class Session:
    """Reads one connection until it ends.

    Args:
        peer: the decode worker or client.
        tasks: owns what takes longer than a message: attaching and probes.
        mapped_dir: where the sockets of mapped memory are; None for the default.
        rdma: this worker's end of RDMA.
    """

    def __init__(
        self,
        peer: Link,
        prefiller: Prefiller,
        metrics: PrefillMetrics,
        tasks: asyncio.TaskGroup,
        *,
        geometry: KvGeometry,
        description: Description,
        mapped_dir: Path | None,
        rdma: RdmaPool,
    ) -> None:
        self._peer = peer
        self._prefiller = prefiller
        self._metrics = metrics
        self._tasks = tasks
        self._geometry = geometry
        self._description = description
        self._mapped_dir = mapped_dir
        self._rdma = rdma
        # By carrier: what writes into the peer's memory, and offers that were taken on.
        self._placing: dict[str, PlacingWriter] = {}
        self._offered: set[str] = set()
        self._attaching: asyncio.Task[None] | None = None
        self._probing: asyncio.Task[None] | None = None
        self._probe_key = ("", 0)
        self._log = structlog.get_logger("prefill.session")

    async def read(self) -> None:
        """Handle messages until the connection ends. Raises ConnectionLost if not cleanly."""
        async for message in self._peer:
            await self._on_message(message)

    async def close(self) -> None:
        """After the connection and the pusher have ended: detach from the peer's memory."""
        for task in (self._attaching, self._probing):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        for writer in self._placing.values():
            await writer.close()

    async def _on_message(self, message: Message) -> None:
        peer = self._peer
        match message:
            case Prefill():
                await self._on_prefill(message)
            case Describe():
                await peer.send(self._description)
            case CommitAck():
                self._prefiller.acknowledge(peer, message.sequence_id, message.generation)
            case Abort():
                await self._on_abort(message)
            case AbortAck():
                pass  # the peer heard that we gave up
            case Offer():
                await self._on_offer(message)
            case Probe():
                await self._on_probe(message)
            case Error() if message.sequence_id:
                # A write came after the lease was withdrawn; the ABORT that explains it follows.
                self._log.debug("write refused", peer=peer.name, reason=message.message)
            case _:
                code = ErrorCode.UNEXPECTED_MESSAGE
                text = f"a prefill worker does not take {type(message).__name__}"
                await peer.send(Error(code=code, message=text))

    async def _on_prefill(self, message: Prefill) -> None:
        transfer = None
        try:
            transfer = Transfer(message, self._geometry, self._peer, self._placing)
            self._prefiller.submit(message, self._peer, transfer)
        except PromptRefused as exc:
            if transfer is not None:
                transfer.end()
            self._metrics.refusals.labels(code=exc.code.name.lower()).inc()
            self._log.info("prompt refused", sequence_id=message.sequence_id, reason=str(exc))
            await self._refuse(message, exc.code, str(exc))

    async def _on_abort(self, message: Abort) -> None:
        key = (message.sequence_id, message.generation)
        if key == self._probe_key and self._probing is not None:
            self._probing.cancel()
            self._tasks.create_task(
                self._confirm_abort(self._probing, key), name=f"abort {self._peer.name}"
            )
            self._probe_key = ("", 0)
        elif not self._prefiller.cancel(self._peer, *key):
            # Finished, released or never seen: certainly nothing will be written.
            await self._peer.send(AbortAck(*key))

    # ---- other carriers than TCP

    async def _on_offer(self, message: Offer) -> None:
        is_busy = self._attaching is not None and not self._attaching.done()
        if is_busy or message.carrier in self._offered:
            text = "one OFFER of each carrier for each connection, one after the other"
            await self._peer.send(Error(code=ErrorCode.UNEXPECTED_MESSAGE, message=text))
            return
        self._offered.add(message.carrier)
        self._attaching = self._tasks.create_task(
            self._attach(message), name=f"attach {self._peer.name}"
        )

    async def _attach(self, offer: Offer) -> None:
        with contextlib.suppress(ConnectionLost, DeadlineExceeded):
            writer = await self._answer(offer)
            if writer is not None:
                self._placing[offer.carrier] = writer
                self._log.info("attached", peer=self._peer.name, carrier=offer.carrier)

    async def _answer(self, offer: Offer) -> PlacingWriter | None:
        peer = self._peer.control
        if offer.carrier == RDMA and self._rdma.is_open:
            return await self._rdma.answer(peer, offer, self._geometry)
        attachment = await answer_offer(peer, offer, self._geometry, directory=self._mapped_dir)
        return None if attachment is None else MappedWriter(peer, attachment)

    async def _on_probe(self, message: Probe) -> None:
        if self._probing is not None and not self._probing.done():
            await self._refuse(message, ErrorCode.OVERLOADED, "a probe is under way")
            return
        self._probe_key = (message.sequence_id, message.generation)
        self._probing = self._tasks.create_task(
            self._probe(message), name=f"probe {self._peer.name}"
        )

    async def _probe(self, probe: Probe) -> None:
        key = (probe.sequence_id, probe.generation)
        with contextlib.suppress(ConnectionLost, DeadlineExceeded):
            if self._attaching is not None:
                # ATTACHED may be read, and a probe come back, before sending it has returned.
                await asyncio.wait([self._attaching])
            try:
                writer = self._probe_writer(probe)
                await answer_probe(self._peer, writer, self._geometry, probe)
            except KvProtoError as exc:
                if isinstance(exc, ConnectionLost | DeadlineExceeded):
                    raise
                if isinstance(exc, CarrierLost):
                    await self._flush(self._placing[probe.carrier])
                await self._refuse(probe, exc.code, str(exc))
        for placing in self._placing.values():
            placing.end(*key)

    async def _confirm_abort(self, probing: asyncio.Task[None], key: tuple[str, int]) -> None:
        with contextlib.suppress(ConnectionLost, DeadlineExceeded):
            await asyncio.wait([probing])
            for writer in self._placing.values():
                writer.end(*key)
                await self._flush(writer)
            await self._peer.send(AbortAck(*key))

    async def _flush(self, writer: PlacingWriter) -> None:
        """What was under way has ended once this returns, or its carrier has."""
        with contextlib.suppress(CarrierLost):
            await writer.flush()

    def _probe_writer(self, probe: Probe) -> KvWriter:
        if probe.carrier in ("", "tcp"):
            return self._peer.writer(self._geometry)
        writer = self._placing.get(probe.carrier)
        if writer is None:
            raise LeaseError(
                f"carrier {probe.carrier!r} is not open between us", sequence_id=probe.sequence_id
            )
        writer.begin(
            probe.sequence_id,
            probe.generation,
            probe.block_table,
            probe.num_tokens,
            keys=probe.keys,
        )
        return writer

    async def _refuse(self, message: Prefill | Probe, code: int, text: str) -> None:
        key = (message.sequence_id, message.generation)
        await self._peer.send(Abort(*key, code=code, message=text))
        await self._peer.send(AbortAck(*key))
