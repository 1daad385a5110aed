"""The path of KV from one prefill worker: which carrier, proven and measured before it is used.

Carriers are tried best first; one that cannot be used says why and the next is tried, TCP last.
What was chosen and how fast it is stands in the log, in /metrics and in the health answer.
"""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import structlog

from decode_svc.letter_box import LetterBoxes
from decode_svc.metrics import DecodeMetrics
from decode_svc.quarantine import Quarantine
from kvproto.blocks import BlockPool
from kvproto.errors import CarrierUnavailable, HandshakeRefused, PoolExhausted
from kvproto.geometry import PoolLayout
from kvproto.lease import LeaseTable
from kvproto.mapped_host import Attachment, MappedHost
from kvproto.messages import Attached
from kvproto.probe import NextLetter, PathReport, ProbeFailed, measure
from kvproto.region import CARRIER as MAPPED
from kvproto.tcp_link import Link

TCP = "tcp"


@dataclass(frozen=True, slots=True)
class Path:
    """How KV comes from one prefill worker.

    ``attachment`` is set for mapped memory. ``report`` is None where no block was free to measure
    with.
    """

    carrier: str
    attachment: Attachment | None = None
    report: PathReport | None = None

    @property
    def bandwidth(self) -> float:
        """Measured bytes/s; 0.0 if unknown."""
        return 0.0 if self.report is None else self.report.bandwidth

    def stats(self) -> dict[str, object]:
        """For the health answer."""
        report = self.report
        return {
            "carrier": self.carrier,
            "bandwidth_bytes_per_s": None if report is None else round(report.bandwidth),
            "fixed_s": None if report is None else report.fixed_s,
        }


class PathChooser:
    """Chooses a path once for each connection.

    Args:
        host: offers our memory to workers on this host; None where that is off or impossible.
        is_mapped_only: refuse a worker that cannot attach.
        new_generation: makes the generations of probes.
        min_bandwidth: bytes/s; a slower path is refused. 0 accepts any.
        timeout_s: for each step of attaching and probing.
    """

    def __init__(
        self,
        leases: LeaseTable,
        blocks: BlockPool,
        layout: PoolLayout,
        boxes: LetterBoxes,
        quarantine: Quarantine,
        metrics: DecodeMetrics,
        *,
        host: MappedHost | None,
        is_mapped_only: bool,
        new_generation: Callable[[], int],
        min_bandwidth: float,
        timeout_s: float,
    ) -> None:
        self._leases = leases
        self._blocks = blocks
        self._layout = layout
        self._boxes = boxes
        self._quarantine = quarantine
        self._metrics = metrics
        self._host = host
        self._is_mapped_only = is_mapped_only
        self._new_generation = new_generation
        self._min_bandwidth = min_bandwidth
        self._timeout_s = timeout_s
        self._log = structlog.get_logger("decode.path")

    async def choose(self, peer: Link, *, is_tcp_only: bool = False) -> Path:
        """The best path that works. Its ATTACHED and letters must be routed meanwhile.

        Raises CarrierUnavailable if ``is_mapped_only`` and it is not, ProbeFailed if not even TCP
        works, and what ``Link.send`` raises.
        """
        attachment = None if is_tcp_only else await self._attach(peer)
        if attachment is not None:
            try:
                return await self._measured(peer, MAPPED, attachment)
            except ProbeFailed as exc:
                if exc.generation:
                    self._quarantine.keep(exc.generation, attachment)
                self._log.warning("mapped memory is not used", peer=peer.name, reason=str(exc))
        if self._is_mapped_only:
            raise CarrierUnavailable(
                f"{peer.name} does not reach this worker's memory and kv_carrier is mapped; run it "
                "on this host as the same user with the same mapped_dir, or set kv_carrier to auto"
            )
        return await self._measured(peer, TCP, None)

    def attached(self, peer: Link, message: Attached) -> None:
        """ATTACHED came from ``peer``."""
        if self._host is not None:
            self._host.attached(peer.control, message)

    async def _attach(self, peer: Link) -> Attachment | None:
        if self._host is None or MAPPED not in peer.remote.carriers:
            return None
        try:
            return await self._host.attach(peer.control, timeout_s=self._timeout_s)
        except CarrierUnavailable as exc:
            self._log.info("mapped memory is not used", peer=peer.name, reason=str(exc))
            return None

    async def _measured(self, peer: Link, carrier: str, attachment: Attachment | None) -> Path:
        @contextlib.asynccontextmanager
        async def open_letters(sequence_id: str, generation: int) -> AsyncIterator[NextLetter]:
            box = self._boxes.open(peer, sequence_id, generation)
            try:
                yield box.get
            finally:
                self._boxes.close(peer, sequence_id, generation)

        try:
            report = await measure(
                peer,
                self._leases,
                self._blocks,
                self._layout,
                carrier=carrier,
                is_placed=attachment is not None,
                sequence_id=f"probe-{peer.remote.instance_id}"[:64],
                new_generation=self._new_generation,
                open_letters=open_letters,
                timeout_s=self._timeout_s,
            )
        except PoolExhausted as exc:
            self._log.info("path not measured", peer=peer.name, carrier=carrier, reason=str(exc))
            return Path(carrier, attachment)
        except ProbeFailed as exc:
            if attachment is None and exc.generation:
                await self._cut(peer, exc.generation)
            raise
        return Path(carrier, attachment, report)

    def forget(self, peer: Link, path: Path) -> None:
        """The connection has ended: its figure is of no use any more."""
        if path.report is not None:
            self._metrics.path_bandwidth.remove(peer.remote.instance_id, path.carrier)

    async def _cut(self, peer: Link, generation: int) -> None:
        """On TCP the end of the connection is proof."""
        peer.abort("the path is not proven")
        await peer.wait_closed()
        self._leases.release(generation)

    def accept(self, peer: Link, path: Path) -> None:
        """Log and count the path that was chosen.

        Raises HandshakeRefused("bandwidth") if it is slower than ``min_bandwidth``.
        """
        report = path.report
        if report is None:
            self._log.info("path chosen", peer=peer.name, carrier=path.carrier)
            return
        bandwidth = report.bandwidth
        self._metrics.path_bandwidth.labels(
            writer=peer.remote.instance_id, carrier=path.carrier
        ).set(bandwidth)
        self._log.info(
            "path chosen",
            peer=peer.name,
            carrier=path.carrier,
            num_lanes=len(peer.lanes),
            megabytes_per_s=round(bandwidth / 1e6),
            fixed_ms=round(report.fixed_s * 1e3, 2),
        )
        # 0 means that the probe was too short to tell: a fast path, not a slow one.
        if 0 < bandwidth < self._min_bandwidth:
            raise HandshakeRefused(
                "bandwidth",
                f"at least {self._min_bandwidth:.0f} bytes/s (min_handoff_bandwidth)",
                f"{bandwidth:.0f} bytes/s over {path.carrier}",
                f"the path from {peer.name} over {path.carrier} carries "
                f"{bandwidth / 1e6:.0f} MB/s, min_handoff_bandwidth is "
                f"{self._min_bandwidth / 1e6:.0f} MB/s; find what slows it down (MTU, a "
                "fallback to TCP, a shared link) or lower the setting",
            )
