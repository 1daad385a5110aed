"""An open RDMA device: its context, one protection domain, and what it says unasked.

What is made on a device is a *child* of it: queue pairs, completion queues, registered memory.
``Device.close`` closes them first, the youngest first, since verbs refuses to take a thing away
from under another.
"""

import asyncio
import ipaddress
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol

from kvproto.errors import CarrierUnavailable
from kvproto.rdma.constants import DEVICE_MEM_WINDOW_TYPE_2B, MTU_NBYTES, EventType
from kvproto.rdma.ports import ChosenPort, choose_port, own_numa_node, read_ports
from kvproto.rdma.settings import RdmaSettings
from kvproto.rdma.verbs import Verbs, load, needed_for

logger = logging.getLogger("kvproto.rdma")

# The value of the setting that turns RDMA off.
NO_DEVICE: Final = "none"

# After these the device answers nobody any more.
_FATAL: Final = frozenset({EventType.DEVICE_FATAL})
# After these a queue pair may be broken; the event does not say which.
_DOUBTFUL: Final = frozenset(
    {
        EventType.CQ_ERR,
        EventType.QP_FATAL,
        EventType.QP_REQ_ERR,
        EventType.QP_ACCESS_ERR,
        EventType.WQ_FATAL,
    }
)


class Child(Protocol):
    """What hangs on a device."""

    def close(self) -> None:
        """Give it back. Idempotent."""


class Device:
    """Made by ``open`` in a running event loop; ``close`` gives everything back.

    Attributes:
        verbs: the library.
        context, pd: the opened device and its protection domain, of ``verbs``.
        chosen: the port and address in use.
        mtu_nbytes: of the port, at most what the settings allow.
        max_send_wr, max_sge, max_message_nbytes: limits of one queue pair and of one work request.
        has_windows: keys can be given for one lease alone (memory windows of type 2B).
        is_link_down: the port has said so, and not yet that it is up again.
    """

    def __init__(
        self, verbs: Verbs, context: Any, events_fd: int, chosen: ChosenPort, settings: RdmaSettings
    ) -> None:
        self.verbs = verbs
        self.context = context
        self.chosen = chosen
        self.settings = settings
        self._children: list[Child] = []
        self._listeners: set[Callable[[str], None]] = set()
        self._events_fd = events_fd
        name = chosen.port.name
        with needed_for(verbs, f"use the RDMA port {name}"):
            limits = context.query_device()
            port = context.query_port(chosen.port.number)
            self.pd = verbs.pd(context)
        port_mtu_nbytes = MTU_NBYTES[port.active_mtu]
        self.mtu_nbytes: int = min(port_mtu_nbytes, settings.mtu_nbytes or port_mtu_nbytes)
        self.max_send_wr: int = min(settings.max_send_wr, limits.max_qp_wr)
        self.max_sge: int = min(16, limits.max_sge)
        self.max_message_nbytes: int = port.max_msg_sz
        self.has_windows = bool(limits.device_cap_flags & DEVICE_MEM_WINDOW_TYPE_2B)
        self.is_link_down = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(events_fd, self._on_event)

    @classmethod
    def open(cls, verbs: Verbs, chosen: ChosenPort, settings: RdmaSettings) -> "Device":
        """Open the device of ``chosen``. CarrierUnavailable with what to do."""
        name = chosen.port.device
        with needed_for(verbs, f"open the RDMA device {name}"):
            context, events_fd = verbs.open_context(name)
        try:
            return cls(verbs, context, events_fd, chosen, settings)
        except BaseException:
            context.close()
            raise

    def adopt(self, child: Child) -> None:
        """``close`` will close it."""
        self._children.append(child)

    def disown(self, child: Child) -> None:
        """It has been closed."""
        with suppress(ValueError):
            self._children.remove(child)

    def listen(self, listener: Callable[[str], None]) -> None:
        """Call it with a sentence when the device is lost or a queue pair may be."""
        self._listeners.add(listener)

    def unlisten(self, listener: Callable[[str], None]) -> None:
        """Undo ``listen``. Idempotent."""
        self._listeners.discard(listener)

    def close(self) -> None:
        """Close the children, then the device. Idempotent."""
        if self._events_fd < 0:
            return
        while self._children:
            self._children.pop().close()
        self._loop.remove_reader(self._events_fd)
        self._events_fd = -1
        self.pd.close()
        self.context.close()

    def stats(self) -> dict[str, str | int]:
        """For the health answer."""
        return {
            "device": self.chosen.port.name,
            "gid_index": self.chosen.gid.index,
            "gid": str(self.chosen.gid.address),
            "mtu_nbytes": self.mtu_nbytes,
            "num_children": len(self._children),
        }

    def _on_event(self) -> None:
        try:
            event = self.context.get_async_event()
        except self.verbs.error:
            return  # somebody else's wake-up: there is none
        # At once: closing what an event is about waits for this.
        event.ack()
        name = self.chosen.port.name
        try:
            kind = EventType(event.event_type)
        except ValueError:
            logger.info("RDMA port %s reports event %s", name, event.event_type)
            return
        if kind in _FATAL:
            text = f"the RDMA device {name} is lost"
        elif kind in _DOUBTFUL:
            text = f"the RDMA device {name} reports {kind.name}"
        elif kind == EventType.PORT_ERR:
            # Connections survive a short interruption; a long one ends by their retry counters.
            self.is_link_down = True
            logger.warning("the link of RDMA port %s is down", name)
            return
        else:
            if kind == EventType.PORT_ACTIVE:
                self.is_link_down = False
            logger.info("RDMA port %s reports %s", name, kind.name)
            return
        logger.warning("%s", text)
        for listener in list(self._listeners):
            listener(text)


def open_device(settings: RdmaSettings, listen_host: str = "") -> Device:
    """Choose a port by the settings and open it.

    ``listen_host``: where this process listens; the port that has this address is preferred.
    CarrierUnavailable, in this order: RDMA is turned off; as ``choose_port``; the address is not
    one of RoCE v2; pyverbs is missing; the device refuses.
    """
    if settings.device == NO_DEVICE:
        raise CarrierUnavailable("rdma_device is none")
    chosen = choose_port(
        read_ports(),
        device=settings.device,
        gid_index=settings.gid_index,
        near=_mapped_address(listen_host),
        numa_node=own_numa_node(),
    )
    check_is_roce(chosen)
    return Device.open(load(), chosen, settings)


def _mapped_address(host: str) -> ipaddress.IPv6Address | None:
    """How RoCE writes an address; None for a name, or for every address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if address.is_unspecified or address.is_loopback:
        return None
    if isinstance(address, ipaddress.IPv4Address):
        return ipaddress.IPv6Address(f"::ffff:{address}")
    return address


def check_is_roce(chosen: ChosenPort) -> None:
    """CarrierUnavailable unless the chosen address is one of RoCE v2."""
    if chosen.gid not in chosen.port.roce_v2_gids:
        raise CarrierUnavailable(
            f"GID index {chosen.gid.index} of {chosen.port.name} is "
            f"{chosen.gid.kind or 'unknown'}, not RoCE v2: leave rdma_gid_index at -1, or name one "
            "that is"
        )
