"""One connection of a decode worker or client: what it asks for, and how its KV goes back."""

import asyncio
import contextlib
from pathlib import Path

import structlog

from kvproto.carrier import KvWriter
from kvproto.errors import ConnectionLost, DeadlineExceeded, ErrorCode, KvProtoError, LeaseError
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
from kvproto.region import CARRIER as MAPPED
from kvproto.tcp_link import Link
from prefill_svc.errors import PromptRefused
from prefill_svc.metrics import PrefillMetrics
from prefill_svc.prefiller import Prefiller
from prefill_svc.transfer import Transfer


class Session:
    """Reads one connection until it ends.

    Args:
        peer: the decode worker or client.
        tasks: owns what takes longer than a message: attaching and probes.
        mapped_dir: where the sockets of mapped memory are; None for the default.
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
    ) -> None:
        self._peer = peer
        self._prefiller = prefiller
        self._metrics = metrics
        self._tasks = tasks
        self._geometry = geometry
        self._description = description
        self._mapped_dir = mapped_dir
        self._mapped: MappedWriter | None = None
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
        if self._mapped is not None:
            await self._mapped.close()

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
            transfer = Transfer(message, self._geometry, self._peer, self._mapped)
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
        if self._attaching is not None:
            text = "one OFFER for each connection"
            await self._peer.send(Error(code=ErrorCode.UNEXPECTED_MESSAGE, message=text))
            return
        self._attaching = self._tasks.create_task(
            self._attach(message), name=f"attach {self._peer.name}"
        )

    async def _attach(self, offer: Offer) -> None:
        with contextlib.suppress(ConnectionLost, DeadlineExceeded):
            attachment = await answer_offer(
                self._peer.control, offer, self._geometry, directory=self._mapped_dir
            )
            if attachment is not None:
                self._mapped = MappedWriter(self._peer.control, attachment)
                self._log.info("attached to mapped memory", peer=self._peer.name)

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
                await self._refuse(probe, exc.code, str(exc))
        if self._mapped is not None:
            self._mapped.end(*key)

    async def _confirm_abort(self, probing: asyncio.Task[None], key: tuple[str, int]) -> None:
        with contextlib.suppress(ConnectionLost, DeadlineExceeded):
            await asyncio.wait([probing])
            if self._mapped is not None:
                # A copy that was under way has ended once this returns.
                self._mapped.end(*key)
                await self._mapped.flush()
            await self._peer.send(AbortAck(*key))

    def _probe_writer(self, probe: Probe) -> KvWriter:
        if probe.carrier in ("", "tcp"):
            return self._peer.writer(self._geometry)
        if probe.carrier != MAPPED or self._mapped is None:
            raise LeaseError(
                f"carrier {probe.carrier!r} is not open between us", sequence_id=probe.sequence_id
            )
        self._mapped.begin(probe.sequence_id, probe.generation, probe.block_table, probe.num_tokens)
        return self._mapped

    async def _refuse(self, message: Prefill | Probe, code: int, text: str) -> None:
        key = (message.sequence_id, message.generation)
        await self._peer.send(Abort(*key, code=code, message=text))
        await self._peer.send(AbortAck(*key))
