"""The path of KV from one prefill worker: which carrier, proven and measured before it is used.

Carriers are tried best first; one that cannot be used says why and the next is tried, TCP last.
RDMA is compared with TCP: devices that are made of software lose. What was chosen, how fast it is
and why nothing better stands in the log, in /metrics and in the health answer.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import structlog

from decode_svc.letter_box import LetterBoxes
from decode_svc.metrics import DecodeMetrics
from decode_svc.quarantine import Quarantine
from kvproto.blocks import BlockPool
from kvproto.carrier import Attachment, CarrierHost
from kvproto.errors import CarrierUnavailable, HandshakeRefused, PoolExhausted
from kvproto.geometry import PoolLayout
from kvproto.lease import LeaseTable
from kvproto.messages import Attached
from kvproto.probe import NextLetter, PathReport, ProbeFailed, measure
from kvproto.rdma.host import CARRIER as RDMA
from kvproto.tcp_link import Link

TCP = "tcp"
# RDMA frees the CPU, so TCP must be clearly faster to be preferred.
_TCP_MIN_GAIN = 1.2


@dataclass(frozen=True, slots=True)
class Path:
    """How KV comes from one prefill worker.

    ``attachment`` is set for a carrier that writes into our memory. ``report`` is None where no
    block was free to measure with. ``passed_over`` says of better carriers why they are not used.
    """

    carrier: str
    attachment: Attachment | None = None
    report: PathReport | None = None
    passed_over: Mapping[str, str] = field(default_factory=dict)

    def let_go(self) -> None:
        """Not used any more: end the writer's hold on our memory, if that can be."""
        if self.attachment is not None:
            self.attachment.cut()

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
            "passed_over": dict(self.passed_over),
        }


class PathChooser:
    """Chooses a path once for each connection.

    Args:
        hosts: what offers our memory to workers, best first.
        only: refuse a worker that cannot use this carrier; "" takes any.
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
        hosts: Sequence[CarrierHost],
        only: str,
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
        self._hosts = tuple(hosts)
        self._only = only
        self._new_generation = new_generation
        self._min_bandwidth = min_bandwidth
        self._timeout_s = timeout_s
        self._log = structlog.get_logger("decode.path")

    async def choose(self, peer: Link, *, is_tcp_only: bool = False) -> Path:
        """The best path that works. Its ATTACHED and letters must be routed meanwhile.

        Raises CarrierUnavailable if there is an ``only`` and it is not that, ProbeFailed if not
        even TCP works, and what ``Link.send`` raises.
        """
        passed_over: dict[str, str] = {}
        tcp: Path | None = None
        for host in () if is_tcp_only else self._hosts:
            if host.carrier not in peer.remote.carriers:
                continue
            try:
                path = await self._proven(peer, host)
            except (CarrierUnavailable, ProbeFailed) as exc:
                self._pass_over(peer, host.carrier, str(exc), passed_over)
                continue
            if host.carrier != RDMA or self._only:
                return replace(path, passed_over=passed_over)
            if path.report is None:
                # Two active ports may still not reach each other.
                path.let_go()
                self._pass_over(peer, RDMA, "no block was free to prove it with", passed_over)
                continue
            try:
                tcp = await self._measured(peer, TCP, None)
            except BaseException:
                path.let_go()
                raise
            # 0 means that the probe was too short to tell.
            if not path.bandwidth or tcp.bandwidth <= _TCP_MIN_GAIN * path.bandwidth:
                self._log.info(
                    "RDMA compared with TCP",
                    peer=peer.name,
                    rdma_megabytes_per_s=round(path.bandwidth / 1e6),
                    tcp_megabytes_per_s=round(tcp.bandwidth / 1e6),
                )
                return replace(path, passed_over=passed_over)
            path.let_go()
            reason = (
                f"it carries {path.bandwidth / 1e6:.0f} MB/s, TCP {tcp.bandwidth / 1e6:.0f} MB/s; "
                "kv_carrier rdma would use it all the same"
            )
            self._pass_over(peer, RDMA, reason, passed_over)
        if self._only:
            raise CarrierUnavailable(
                f"{peer.name} does not reach this worker's memory by {self._only} and kv_carrier "
                f"is {self._only} ({passed_over.get(self._only, 'it does not offer that')}); "
                "correct that, or set kv_carrier to auto"
            )
        path = tcp or await self._measured(peer, TCP, None)
        return replace(path, passed_over=passed_over)

    def attached(self, peer: Link, message: Attached) -> None:
        """ATTACHED came from ``peer``."""
        for host in self._hosts:
            host.attached(peer.control, message)

    def _pass_over(
        self, peer: Link, carrier: str, reason: str, passed_over: dict[str, str]
    ) -> None:
        passed_over[carrier] = reason
        self._metrics.path_fallbacks.labels(carrier=carrier).inc()
        # That two hosts share no memory is nothing to worry about.
        log = self._log.warning if carrier == RDMA else self._log.info
        log("carrier is not used", peer=peer.name, carrier=carrier, reason=reason)

    async def _proven(self, peer: Link, host: CarrierHost) -> Path:
        """The path by one carrier. CarrierUnavailable, ProbeFailed: nothing is left of it."""
        attachment = await host.attach(peer.control, timeout_s=self._timeout_s)
        try:
            return await self._measured(peer, host.carrier, attachment)
        except ProbeFailed as exc:
            attachment.cut()
            if exc.generation:
                self._quarantine.keep(exc.generation, attachment)
            raise
        except BaseException:
            attachment.cut()
            raise

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
                attachment=attachment,
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
        """The connection has ended: its figure is of no use any more, nor is its hold."""
        path.let_go()
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
