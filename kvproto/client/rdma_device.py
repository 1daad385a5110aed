"""Which carrier a client is asked for, and the RDMA device that reaches a worker."""

import asyncio
from typing import Final

from kvproto.errors import CarrierUnavailable, LocalProtocolError
from kvproto.rdma.device import Device, open_device
from kvproto.rdma.host import CARRIER as RDMA
from kvproto.rdma.settings import RdmaSettings
from kvproto.tcp import Peer

TCP: Final = "tcp"
AUTO: Final = "auto"
CARRIERS: Final = (TCP, RDMA, AUTO)


def check_carrier(carrier: str) -> None:
    """LocalProtocolError unless a client has such a carrier."""
    if carrier not in CARRIERS:
        raise LocalProtocolError(
            f"a client has no carrier {carrier!r}; use one of {', '.join(CARRIERS)}"
        )


async def open_toward(settings: RdmaSettings, host: str, port: int) -> Device:
    """Open the port with the address from which a worker is reached, else as ``choose_port``.

    CarrierUnavailable as ``open_device``.
    """
    return open_device(settings, await _local_host(host, port))


def check_offers(peer: Peer) -> None:
    """CarrierUnavailable unless the worker says in HELLO that it can use RDMA."""
    if RDMA not in peer.remote.carriers:
        raise CarrierUnavailable(
            f"{peer.name} has no RDMA (it has {', '.join(peer.remote.carriers)}); its log says "
            "why, at its start; or use carrier tcp"
        )


async def _local_host(host: str, port: int) -> str:
    """This host's address towards another; "" if there is no way. Nothing is sent."""
    loop = asyncio.get_running_loop()
    try:
        transport, _ = await loop.create_datagram_endpoint(
            asyncio.DatagramProtocol, remote_addr=(host, port)
        )
    except OSError:
        return ""
    try:
        return str(transport.get_extra_info("sockname")[0])
    finally:
        transport.close()
