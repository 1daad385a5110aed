"""A reliable connection (RC queue pair), from RESET to RTS and to its end.

    RESET --made--> INIT --connect--> RTR --> RTS --error or fail--> ERR --close--> gone

One-sided writes go out in order; a completion of one is the completion of all before it, so only
some ask for one. "Completed" means that the other side's device has acknowledged it.
Source: InfiniBand Architecture Specification 1.4, section 10.3.1 (states), 9.7 (reliable service).
"""

import asyncio
import ipaddress
import logging
import secrets
from collections.abc import Sequence
from typing import Any, Final

from kvproto.errors import CarrierLost, CarrierUnavailable
from kvproto.messages import QueuePairFacts
from kvproto.rdma.completion import CompletionQueue
from kvproto.rdma.constants import (
    INIT_ATTR_PD,
    INIT_ATTR_SEND_OPS_FLAGS,
    MTU_CODE,
    QP_STATE,
    QPT_RC,
    SEND_OPS_BIND_MW,
    SEND_OPS_RDMA_WRITE,
    SEND_SIGNALED,
    WR_BIND_MW,
    Access,
    QpState,
    WcStatus,
)
from kvproto.rdma.device import Device
from kvproto.rdma.ports import Gid
from kvproto.rdma.posting import ChainPoster, ExtendedPoster, RemoteWrite
from kvproto.rdma.verbs import in_use_for, needed_for

logger = logging.getLogger("kvproto.rdma")

_HOP_LIMIT: Final = 64
# A peer that is not ready to receive is asked again after 0.64 ms; we never send, so never.
_MIN_RNR_TIMER: Final = 12
_MAX_PSN: Final = (1 << 24) - 1
# What a completion with an error tells, and what to look at.
_MEANING: Final = {
    WcStatus.LOC_PROT_ERR: "this side's memory is not registered for it",
    WcStatus.LOC_ACCESS_ERR: "this side's memory is not registered for it",
    WcStatus.LOC_QP_OP_ERR: "this side's request is not valid on this connection",
    WcStatus.WR_FLUSH_ERR: "the connection had failed before",
    WcStatus.MW_BIND_ERR: "the memory window cannot be opened",
    WcStatus.REM_ACCESS_ERR: (
        "the other side's memory is not open to this key and address: the lease was taken back, or "
        "the block is not in the pool"
    ),
    WcStatus.REM_INV_REQ_ERR: "the other side does not take such a request",
    WcStatus.REM_OP_ERR: "the other side's device could not do it",
    WcStatus.RETRY_EXC_ERR: (
        "the other side does not answer: its process or host is gone, or the network drops the "
        "packets (link, MTU, PFC)"
    ),
    WcStatus.RNR_RETRY_EXC_ERR: "the other side has no receive request posted",
}


class QueuePair:
    """One end of a connection. A child of the device; several tasks may wait on it at once.

    Args:
        device: whose.
        completions: where its completions arrive.
        is_target: the other side may write into our memory, if it has a key.

    CarrierUnavailable if the device refuses.
    """

    def __init__(
        self,
        device: Device,
        completions: CompletionQueue,
        *,
        is_target: bool,
        is_extended: bool = True,
    ) -> None:
        self._device = device
        self._completions = completions
        self._access = Access.REMOTE_WRITE if is_target else Access(0)
        self._max_wr = device.max_send_wr
        self.psn = secrets.randbelow(_MAX_PSN + 1)
        self._num_posted = self._num_completed = 0
        self._error: CarrierLost | None = None
        self._is_closed = False
        self._progressed = asyncio.Event()
        with needed_for(device.verbs, "make an RDMA queue pair"):
            self._make(is_extended=is_extended)
            self._qp.to_init(self._attributes())
        self.qp_num: int = self._qp.qp_num
        completions.deliver(self.qp_num, self._on_completion)
        device.listen(self._on_event)
        device.adopt(self)

    def _make(self, *, is_extended: bool) -> None:
        device, verbs = self._device, self._device.verbs
        cap = verbs.qp_cap(
            max_send_wr=self._max_wr, max_recv_wr=1, max_send_sge=device.max_sge, max_recv_sge=1
        )
        cq = self._completions.cq
        self._poster: ExtendedPoster | ChainPoster
        if is_extended:
            attributes = verbs.qp_init_attr_ex(
                qp_type=QPT_RC,
                scq=cq,
                rcq=cq,
                cap=cap,
                sq_sig_all=0,
                pd=device.pd,
                comp_mask=INIT_ATTR_PD | INIT_ATTR_SEND_OPS_FLAGS,
                send_ops_flags=SEND_OPS_RDMA_WRITE
                | (SEND_OPS_BIND_MW if device.has_windows else 0),
            )
            try:
                self._qp: Any = verbs.qp_ex(device.context, attributes)
            except verbs.error:
                pass  # this device has the plain interface alone, or says below what is wrong
            else:
                self._poster = ExtendedPoster(verbs, self._qp, device.max_sge)
                return
        plain = verbs.qp_init_attr(qp_type=QPT_RC, scq=cq, rcq=cq, cap=cap, sq_sig_all=0)
        self._qp = verbs.qp(device.pd, plain)
        self._poster = ChainPoster(verbs, self._qp)

    def _attributes(self) -> Any:
        attributes = self._device.verbs.qp_attr(port_num=self._device.chosen.port.number)
        attributes.qp_access_flags = int(self._access)
        return attributes

    def facts(self, gid: Gid) -> QueuePairFacts:
        """What the other side needs in order to connect to this one."""
        return QueuePairFacts(
            gid=str(gid.address),
            qp_num=self.qp_num,
            psn=self.psn,
            mtu_nbytes=self._device.mtu_nbytes,
        )

    def connect(self, remote: QueuePairFacts, gid: Gid) -> None:
        """To RTR and RTS: both sides must do it before the first write.

        CarrierUnavailable: what the peer says makes no sense; what the device says.
        """
        device, verbs = self._device, self._device.verbs
        settings = device.settings
        address = gid_address(remote.gid)
        mtu_nbytes = min(device.mtu_nbytes, remote.mtu_nbytes)
        if mtu_nbytes not in MTU_CODE:
            raise CarrierUnavailable(
                f"the path MTU is {mtu_nbytes}, RDMA knows {', '.join(map(str, MTU_CODE))}: set "
                "rdma_mtu_nbytes on both sides to one of these"
            )
        with needed_for(verbs, f"use the address {address}"):
            route = verbs.global_route(
                dgid=verbs.gid(address.exploded),
                sgid_index=gid.index,
                hop_limit=_HOP_LIMIT,
                traffic_class=settings.traffic_class,
            )
            handle = verbs.ah_attr(
                gr=route,
                is_global=1,
                port_num=device.chosen.port.number,
                sl=settings.service_level,
            )
        attributes = self._attributes()
        attributes.ah_attr = handle
        attributes.path_mtu = MTU_CODE[mtu_nbytes]
        attributes.dest_qp_num = remote.qp_num
        attributes.rq_psn, attributes.sq_psn = remote.psn, self.psn
        # Neither side reads from the other.
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 0
        attributes.min_rnr_timer = _MIN_RNR_TIMER
        attributes.timeout = settings.ack_timeout_exponent
        attributes.retry_cnt = settings.retry_count
        attributes.rnr_retry = settings.rnr_retry_count
        with needed_for(verbs, f"connect to {remote.gid} over {device.chosen.port.name}"):
            self._qp.to_rts(attributes)

    # -- writing -------------------------------------------------------------------------------

    async def post(self, writes: Sequence[RemoteWrite], key: int) -> int:
        """Post writes in order, as many at a time as there is room for; a ticket for ``wait``.

        CarrierLost. If cancelled, what was posted stays posted.
        """
        start = 0
        while start < len(writes):
            # Many for a doorbell, rather than one for each completion.
            wanted = min(len(writes) - start, max(1, self._max_wr // 2))
            while (room := self._max_wr - self.num_under_way) < wanted:
                await self._progress()
            batch = writes[start : start + room]
            self._check()
            with self._posting():
                self._poster.post(
                    batch, key, self._num_posted + 1, self._device.settings.signal_every
                )
            self._num_posted += len(batch)
            start += len(batch)
        return self._num_posted

    async def wait(self, ticket: int) -> None:
        """Until everything up to ``ticket`` has completed. CarrierLost."""
        while self._num_completed < ticket:
            await self._progress()

    def has_completed(self, ticket: int) -> bool:
        """``wait`` would return at once."""
        return self._num_completed >= ticket

    @property
    def last_ticket(self) -> int:
        """For ``wait``: everything that was posted so far."""
        return self._num_posted

    @property
    def num_under_way(self) -> int:
        """Work requests that were posted and have not completed."""
        return self._num_posted - self._num_completed

    async def bind(self, window: Any, info: Any) -> int:
        """Bind a memory window of type 2; the key that opens it. CarrierLost."""
        while self.num_under_way >= self._max_wr:
            await self._progress()
        self._check()
        request = self._device.verbs.send_wr(
            wr_id=self._num_posted + 1, opcode=WR_BIND_MW, send_flags=SEND_SIGNALED
        )
        try:
            request.set_bind_wr(window, info)
            key: int = request.rkey
            with self._posting():
                self._qp.post_send(request)
        finally:
            request.close()
        self._num_posted += 1
        await self.wait(self._num_posted)
        return key

    # -- ending --------------------------------------------------------------------------------

    @property
    def error(self) -> CarrierLost | None:
        """Why it can no longer be used, if so."""
        return self._error

    def fail(self, reason: str) -> None:
        """Whoever waits gets CarrierLost. The first reason stays."""
        if self._error is None:
            self._error = CarrierLost(f"RDMA over {self._device.chosen.port.name}: {reason}")
            self._progressed.set()

    def close(self) -> None:
        """From now on nothing is read or written on this side over this connection. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self.fail("the connection was closed by this side")
        self._device.disown(self)
        self._device.unlisten(self._on_event)
        self._completions.forget(self.qp_num)
        self._poster.close()
        try:
            self._qp.close()
        except self._device.verbs.error as exc:
            # The kernel takes it back with the device, at the latest with this process.
            logger.warning("an RDMA queue pair cannot be closed: %s", exc)

    # -- inside --------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._error is not None:
            raise CarrierLost(str(self._error)) from self._error

    def _posting(self) -> Any:
        return in_use_for(self._device.verbs, f"post to RDMA port {self._device.chosen.port.name}")

    async def _progress(self) -> None:
        """Until something has completed or failed. CarrierLost."""
        self._check()
        self._progressed.clear()
        timeout_s = self._device.settings.completion_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._progressed.wait()
        except TimeoutError:
            self.fail(f"nothing has completed for {timeout_s:g} s")
        self._check()

    def _on_completion(self, wr_id: int, status: int) -> None:
        if status == WcStatus.SUCCESS:
            self._num_completed = max(self._num_completed, wr_id)
            self._progressed.set()
            return
        try:
            known = WcStatus(status)
        except ValueError:
            self.fail(f"a request ended with status {status}")
            return
        meaning = _MEANING.get(known)
        if self._device.is_link_down:
            meaning = "the link of the port is down"
        self.fail(f"{known.name} (status {status})" + (f": {meaning}" if meaning else ""))

    def _on_event(self, reason: str) -> None:
        """The device may be lost, or this connection, or another one."""
        try:
            attributes, _ = self._qp.query(QP_STATE)
        except self._device.verbs.error:
            self.fail(reason)
            return
        if attributes.qp_state in (QpState.ERR, QpState.SQE):
            # The completion that says more may be there already.
            self._completions.poll()
            self.fail(reason)


def gid_address(text: str) -> ipaddress.IPv6Address:
    """The address in what a peer says; CarrierUnavailable if it is none."""
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError as exc:
        raise CarrierUnavailable(f"the peer's GID {text!r} is no address") from exc
    if address.scope_id is not None:
        # The name of an interface of the peer's means nothing here.
        raise CarrierUnavailable(f"the peer's GID {text!r} has a scope")
    return address
