"""Listening on TCP: one handler per peer, in a task group that the server owns."""

import asyncio
import errno
import ipaddress
import logging
import ssl
from collections.abc import Awaitable, Callable
from typing import Final

from kvproto.carrier import Landing
from kvproto.errors import (
    ConnectionLost,
    DeadlineExceeded,
    KvProtoError,
    LocalProtocolError,
    Overloaded,
)
from kvproto.handshake import Identity
from kvproto.tcp_door import Door, DoorLimits
from kvproto.tcp_driver import CLOSE_LINGER_S, TcpDriver
from kvproto.tcp_peer import Peer
from kvproto.tls_stream import check_context

logger = logging.getLogger("kvproto.tcp")

Handler = Callable[[Peer], Awaitable[None]]
# Those that are told "overloaded" linger for a moment; beyond this many they are cut off.
MAX_REFUSED_PEERS: Final = 64


class Server:
    """A listening socket and its peers. Made by ``serve``.

    Attributes:
        port: the port it listens on, also if 0 was asked for.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        handler: Handler,
        landing: Landing | None,
        limits: DoorLimits,
        handshake_timeout_s: float,
        keepalive_s: float,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._identity = identity
        self._handler = handler
        self._landing = landing
        self._tls = tls
        self._door: Door[TcpDriver] = Door(limits)
        self._handshake_timeout_s = handshake_timeout_s
        self._keepalive_s = keepalive_s
        self._drivers: set[TcpDriver] = set()
        self._refused: set[TcpDriver] = set()
        self._is_closing = asyncio.Event()
        self._is_supervised = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self._supervisor: asyncio.Task[None] | None = None
        self._listener: asyncio.Server | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen. LocalProtocolError with one clear sentence if the address cannot be used."""
        loop = asyncio.get_running_loop()
        try:
            listener = await loop.create_server(self._new_driver, host, port, start_serving=False)
        except OSError as exc:
            raise LocalProtocolError(_listen_failure(host, port, exc)) from exc
        self._listener = listener
        self.port = listener.sockets[0].getsockname()[1]
        self._supervisor = asyncio.create_task(self._supervise(), name=f"kvproto:{self.port}")
        # A connection needs the task group, so the group comes first.
        await self._is_supervised.wait()
        await listener.start_serving()

    @property
    def num_peers(self) -> int:
        """Peers being served or in their handshake."""
        return len(self._drivers)

    async def close(self) -> None:
        """Stop listening, flush and close every peer, end the handlers. Idempotent.

        A handler sees ConnectionLost at its next use of the peer; one that has not ended after
        ``CLOSE_LINGER_S`` is cancelled.
        """
        self._stop_listening()
        for driver in list(self._drivers):
            driver.close()
        if self._supervisor is not None:
            await asyncio.wait([self._supervisor], timeout=CLOSE_LINGER_S)
        self.abort()
        await self.wait_closed()

    def abort(self) -> None:
        """Stop listening, abort every peer, cancel the handlers. Idempotent."""
        self._stop_listening()
        for driver in [*self._drivers, *self._refused]:
            driver.abort(ConnectionLost("aborted: the server stops"))
        if self._supervisor is not None:
            self._supervisor.cancel()

    async def wait_closed(self) -> None:
        """Return when every handler has ended, after ``abort`` or ``close``."""
        if self._supervisor is not None:
            await asyncio.wait([self._supervisor])

    def stats(self) -> dict[str, int]:
        """How many peers and handshakes there are, and how many may be."""
        return self._door.stats()

    def _stop_listening(self) -> None:
        self._is_closing.set()
        if self._listener is not None:
            self._listener.close()

    async def _supervise(self) -> None:
        async with self._tasks:
            self._is_supervised.set()
            await self._is_closing.wait()

    def _new_driver(self) -> "_ServedDriver":
        return _ServedDriver(
            self._identity,
            landing=self._landing,
            keepalive_s=self._keepalive_s,
            tls=self._tls,
            accept=self._accept,
        )

    def _accept(self, driver: TcpDriver) -> None:
        """A connection was made: begin to serve it, or tell it that there is no room."""
        if self._is_closing.is_set():
            driver.abort(ConnectionLost("aborted: the server stops"))
            return
        try:
            leaving = self._door.arrive(driver, driver.host)
        except Overloaded as exc:
            self._turn_away(driver, exc)
            return
        self._drivers.add(driver)
        self._tasks.create_task(self._serve(driver), name=f"kvproto:{driver.address}")
        if leaving is not None:
            self._turn_away(
                leaving,
                Overloaded("too many handshakes at once, and this one takes long; try again"),
            )

    def _turn_away(self, driver: TcpDriver, error: KvProtoError) -> None:
        """Say why; those who are being told so are bounded, too."""
        if len(self._refused) < MAX_REFUSED_PEERS:
            self._refused.add(driver)
            driver.refuse(error)
            self._tasks.create_task(self._forget(driver), name=f"kvproto:{driver.address}")
        else:
            driver.abort(error)

    async def _forget(self, driver: TcpDriver) -> None:
        await driver.lost.wait()
        self._refused.discard(driver)

    async def _serve(self, driver: TcpDriver) -> None:
        try:
            peer = await self._handshake(driver)
            await self._handler(peer)
            await peer.close()
        except (ConnectionLost, DeadlineExceeded, Overloaded) as exc:
            logger.info("%s: %s", driver.address, exc)
        except Exception:
            logger.exception("%s: the handler failed", driver.address)
        finally:
            if driver.error is None:
                driver.abort(ConnectionLost("aborted: the handler ended"))
            await driver.lost.wait()
            self._door.leave(driver)
            self._drivers.discard(driver)

    async def _handshake(self, driver: TcpDriver) -> Peer:
        try:
            async with asyncio.timeout(self._handshake_timeout_s):
                await driver.handshaken.wait()
        except TimeoutError:
            error = DeadlineExceeded(
                f"no handshake within {self._handshake_timeout_s:g} s; the peer is silent"
            )
            driver.refuse(error)
            raise error from None
        if driver.remote is None:
            driver.check_alive()
        assert driver.remote is not None, "a handshake ends with a remote or an error"
        try:
            self._door.admit(driver, driver.remote.role, driver.remote.instance_id)
        except Overloaded as exc:
            driver.refuse(exc)
            raise
        return Peer(driver, driver.remote)


class _ServedDriver(TcpDriver):
    """A driver that reports to its server when the connection is made."""

    def __init__(
        self,
        identity: Identity,
        *,
        landing: Landing | None,
        keepalive_s: float,
        tls: ssl.SSLContext | None,
        accept: Callable[[TcpDriver], None],
    ) -> None:
        super().__init__(
            identity, is_server=True, landing=landing, keepalive_s=keepalive_s, tls=tls
        )
        self._accept = accept

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake, then let the server decide."""
        super().connection_made(transport)
        self._accept(self)


async def serve(
    host: str,
    port: int,
    *,
    identity: Identity,
    handler: Handler,
    landing: Landing | None = None,
    max_peers: int = 256,
    max_peers_per_instance: int = 32,
    max_handshakes: int = 128,
    max_handshakes_per_address: int = 64,
    handshake_timeout_s: float = 5.0,
    keepalive_s: float = 5.0,
    tls: ssl.SSLContext | None = None,
) -> Server:
    """Listen on ``host:port`` (port 0: any) and run ``handler`` for each peer.

    The handler starts after the handshake; when it returns the peer is closed, when it raises the
    error is logged and that peer alone is aborted.

    Peers beyond ``max_peers``, and connections of one role and instance id beyond
    ``max_peers_per_instance``, get ERROR(overloaded). Connections whose handshake is not done are
    counted apart, altogether and for each remote address; beyond those limits the one that has
    taken longest ends, so that silent strangers keep nobody out (see ``Door``).

    ``tls``: context for the accepting side, which must demand a certificate of the peer; None for
    plain connections. A certificate does not replace the secret: beyond the loopback interface
    both are needed, or the secret alone. So one rule holds however a port is set up, a stolen
    certificate alone opens nothing, and the roles and instance ids of HELLO are always proven.

    Raises LocalProtocolError: a context that demands no certificate, a non-loopback host without
    a secret, or an address that cannot be listened on.
    """
    if tls is not None:
        check_context(tls)
    if identity.secret is None and not is_loopback(host):
        raise LocalProtocolError(
            f"refusing to listen on {host} without a secret: anybody on the network could read "
            "prompts and write KV; configure a secret or listen on 127.0.0.1"
        )
    limits = DoorLimits(
        max_peers=max_peers,
        max_peers_per_instance=max_peers_per_instance,
        max_handshakes=max_handshakes,
        max_handshakes_per_address=max_handshakes_per_address,
    )
    server = Server(
        identity=identity,
        handler=handler,
        landing=landing,
        limits=limits,
        handshake_timeout_s=handshake_timeout_s,
        keepalive_s=keepalive_s,
        tls=tls,
    )
    await server.start(host, port)
    return server


def is_loopback(host: str) -> bool:
    """Only this host can reach ``host``; a name other than localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen_failure(host: str, port: int, exc: OSError) -> str:
    if exc.errno == errno.EADDRINUSE:
        return (
            f"cannot listen on {host}:{port}: another process uses this port; "
            "stop it or choose another port"
        )
    return f"cannot listen on {host}:{port}: {exc.strerror or exc}; choose another address"
