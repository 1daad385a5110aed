"""Probes that a peer answers without a program of ours on it: ICMP echo, or UDP to a closed port.

All probes carry the don't-fragment bit and pay no heed to the path MTU that the kernel remembers
(IP_PMTUDISC_PROBE), so what is measured is the network of now. Source: ip(7), icmp(7), ipv6(7),
RFC 792, RFC 4443.
"""

import contextlib
import errno
import fcntl
import ipaddress
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Self

IPV4_HEADER_NBYTES: Final = 20
IPV6_HEADER_NBYTES: Final = 40
ICMP_HEADER_NBYTES: Final = 8
UDP_HEADER_NBYTES: Final = 8
MAX_IP_PACKET_NBYTES: Final = 65535

# Nobody listens there: traceroute's first port.
CLOSED_UDP_PORT: Final = 33434

# linux/in.h and linux/in6.h; the socket module of Python 3.11 does not name them all.
_IP_MTU_DISCOVER, _IP_RECVERR, _IP_MTU = 10, 11, 14
_IPV6_MTU_DISCOVER, _IPV6_MTU, _IPV6_RECVERR = 23, 24, 25
_PMTUDISC_PROBE: Final = 3
_SIOCGIFADDR, _SIOCGIFMTU = 0x8915, 0x8921

# struct sock_extended_err of linux/errqueue.h.
_EXTENDED_ERROR: Final = struct.Struct("=IBBBxII")
_ECHO: Final = struct.Struct("!BBHHH")


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back; exactly one of the fields is set.

    Attributes:
        sequence: the peer answered this probe (0 where probes cannot be told apart).
        told_mtu: a router or the own kernel says that a packet must not be larger; 0: too large,
            but not said how large it may be.
        error: any other message: "no route to host", …
    """

    sequence: int | None = None
    told_mtu: int | None = None
    error: str = ""


class ProbeSocket:
    """Sends packets of a given size to one peer and waits for what comes back.

    OSError if the peer's name is not known, there is no route or no socket may be opened.

    Args:
        peer: a name or an address.
        allows_icmp: False: UDP also where ICMP is allowed.

    Attributes:
        method: "ICMP echo" or "UDP to a closed port".
        address: of the peer.
        local_mtu: MTU of the interface towards it.
    """

    def __init__(self, peer: str, *, allows_icmp: bool = True) -> None:
        family, _, _, _, address = socket.getaddrinfo(
            peer, CLOSED_UDP_PORT, type=socket.SOCK_DGRAM
        )[0]
        self._is_ipv6 = family == socket.AF_INET6
        self.address = str(address[0])
        self._has_ip_header = False
        self._is_raw = False
        self._socket = self._open(family) if allows_icmp else None
        self._is_icmp = self._socket is not None
        if self._socket is None:
            self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self.method = "ICMP echo" if self._is_icmp else "UDP to a closed port"
        self._identity = os.getpid() & 0xFFFF
        try:
            self._prepare(address)
        except OSError:
            self._socket.close()
            raise

    def _open(self, family: int) -> socket.socket | None:
        """An ICMP socket; None if neither group nor rights allow one."""
        protocol = socket.IPPROTO_ICMPV6 if self._is_ipv6 else socket.IPPROTO_ICMP
        for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW):
            with contextlib.suppress(OSError):
                opened = socket.socket(family, kind, protocol)
                self._has_ip_header = kind == socket.SOCK_RAW and not self._is_ipv6
                self._is_raw = kind == socket.SOCK_RAW
                return opened
        return None

    def _prepare(self, address: tuple[Any, ...]) -> None:
        if self._is_ipv6:
            level, discover, report, mtu = (
                *(socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _IPV6_RECVERR, _IPV6_MTU),
            )
        else:
            level, discover, report, mtu = (
                *(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_RECVERR, _IP_MTU),
            )
        self._opened.setsockopt(level, discover, _PMTUDISC_PROBE)
        self._opened.setsockopt(level, report, 1)
        # The kernel's own buffers must hold the largest packet.
        self._opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_IP_PACKET_NBYTES)
        self._opened.connect(address)
        self._opened.setblocking(False)
        own = str(self._opened.getsockname()[0])
        self.local_mtu = min(
            interface_mtu(own) or self._opened.getsockopt(level, mtu), MAX_IP_PACKET_NBYTES
        )

    @property
    def _opened(self) -> socket.socket:
        assert self._socket is not None
        return self._socket

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._opened.close()

    @property
    def headers_nbytes(self) -> int:
        """IP and ICMP or UDP headers: the smallest packet."""
        ip = IPV6_HEADER_NBYTES if self._is_ipv6 else IPV4_HEADER_NBYTES
        return ip + (ICMP_HEADER_NBYTES if self._is_icmp else UDP_HEADER_NBYTES)

    def send(self, packet_nbytes: int, sequence: int) -> Answer | None:
        """Send one probe whose whole IP packet has that size.

        An answer if the own kernel refuses it: too large for the interface, no route. None
        otherwise.
        """
        payload = bytes(max(0, packet_nbytes - self.headers_nbytes))
        try:
            self._opened.send(self._echo(sequence, payload) if self._is_icmp else payload)
        except BlockingIOError:
            return None  # as if lost on the way; a retry follows
        except OSError as exc:
            # The kernel also reports what an earlier probe met: drain it, it is the same answer.
            return self._error_in_queue() or _answer_of(exc)
        return None

    def _echo(self, sequence: int, payload: bytes) -> bytes:
        kind = 128 if self._is_ipv6 else 8
        head = _ECHO.pack(kind, 0, 0, self._identity, sequence & 0xFFFF)
        if not self._has_ip_header:
            return head + payload  # the kernel fills in the checksum
        checksum = _internet_checksum(head + payload)
        return _ECHO.pack(kind, 0, checksum, self._identity, sequence & 0xFFFF) + payload

    def receive(
        self, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> Answer | None:
        """The next answer, or None after ``timeout_s``."""
        deadline = clock() + timeout_s
        while (left_s := deadline - clock()) > 0:
            poller = select.poll()
            poller.register(self._opened, select.POLLIN | select.POLLERR)
            if not poller.poll(1 + left_s * 1000):
                return None
            if answer := self._error_in_queue():
                return answer
            try:
                packet = self._opened.recv(MAX_IP_PACKET_NBYTES)
            except BlockingIOError:
                continue
            except OSError as exc:
                return _answer_of(exc)
            if not self._is_icmp:
                return Answer(sequence=0)  # something listens there and answers
            sequence = self._sequence_of(packet)
            if sequence is not None:
                return Answer(sequence=sequence)
        return None

    def _sequence_of(self, packet: bytes) -> int | None:
        """Of an echo reply to us; a raw socket sees everybody's ICMP."""
        if self._has_ip_header:
            packet = packet[4 * (packet[0] & 0x0F) :] if packet else b""
        if len(packet) < _ECHO.size:
            return None
        kind, _, _, identity, sequence = _ECHO.unpack_from(packet)
        is_ours = not self._is_raw or identity == self._identity
        return sequence if is_ours and kind == (129 if self._is_ipv6 else 0) else None

    def _error_in_queue(self) -> Answer | None:
        try:
            _, ancillary, _, _ = self._opened.recvmsg(512, 512, socket.MSG_ERRQUEUE)
        except OSError:
            return None
        for _, _, content in ancillary:
            if len(content) >= _EXTENDED_ERROR.size:
                number, _, _, _, info, _ = _EXTENDED_ERROR.unpack_from(content)
                if number == errno.EMSGSIZE:
                    return Answer(told_mtu=info)
                if number == errno.ECONNREFUSED:
                    # "Port unreachable": the packet was there. From ICMP it is a plain error.
                    return Answer(sequence=0)
                return Answer(error=os.strerror(number))
        return None


def _answer_of(exc: OSError) -> Answer:
    if exc.errno == errno.EMSGSIZE:
        return Answer(told_mtu=0)
    if exc.errno == errno.ECONNREFUSED:
        return Answer(sequence=0)
    return Answer(error=exc.strerror or str(exc))


def _internet_checksum(message: bytes) -> int:
    """RFC 1071."""
    padded = message + b"\0" * (len(message) % 2)
    total: int = sum(struct.unpack(f"!{len(padded) // 2}H", padded))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def interface_mtu(address: str) -> int | None:
    """MTU of the interface that has ``address``; None if none has it."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("16s24x", name.encode()[:15])
            with contextlib.suppress(OSError):
                if wanted.version == 6:
                    own = name if name in _ipv6_interfaces(wanted) else None
                else:
                    reply = fcntl.ioctl(asked, _SIOCGIFADDR, request)
                    own = name if ipaddress.ip_address(reply[20:24]) == wanted else None
                if own is not None:
                    reply = fcntl.ioctl(asked, _SIOCGIFMTU, request)
                    return int.from_bytes(reply[16:20], sys.byteorder)
    return None


def _ipv6_interfaces(address: ipaddress.IPv6Address) -> set[str]:
    """Names of the interfaces with ``address``: /proc/net/if_inet6."""
    with open("/proc/net/if_inet6", encoding="ascii") as file:
        lines = [line.split() for line in file]
    return {words[5] for words in lines if len(words) == 6 and words[0] == address.packed.hex()}
