"""The TCP carrier: ``connect``, ``serve``, ``Peer``, and ``TcpWriter`` for KV bytes.

Works on asyncio's own event loop and on uvloop; on uvloop, bodies go from their memory to the
socket without a copy. Source: docs/wire.md; the protocol itself is in ``connection``.
"""

import asyncio
import ssl
from collections.abc import Sequence

from kvproto.buffer import total_nbytes
from kvproto.carrier import Landing
from kvproto.errors import ConnectionLost, DeadlineExceeded, LocalProtocolError
from kvproto.geometry import KvGeometry
from kvproto.handshake import Identity
from kvproto.messages import Write
from kvproto.tcp_driver import TcpDriver
from kvproto.tcp_peer import Peer
from kvproto.tcp_server import Server, serve
from kvproto.tls_stream import check_context

__all__ = ["Peer", "Server", "TcpWriter", "connect", "serve"]


async def connect(
    host: str,
    port: int,
    *,
    identity: Identity,
    landing: Landing | None = None,
    timeout_s: float,
    keepalive_s: float = 5.0,
    tls: ssl.SSLContext | None = None,
) -> Peer:
    """Connect and do the handshake, both within ``timeout_s``.

    ``tls``: context for the dialling side, which must demand a certificate of the peer; None for
    a plain connection. The handshake of kvproto, secret included, is the same above TLS.

    Raises LocalProtocolError (a context that demands no certificate), ConnectionLost (nobody
    listens, or the peer went away), DeadlineExceeded, HandshakeRefused (field ``tls``: the peer
    does not use TLS), AuthenticationFailed (secret or certificate), PeerError (overloaded),
    RemoteProtocolError.
    """
    if tls is not None:
        check_context(tls)
    loop = asyncio.get_running_loop()
    driver = TcpDriver(
        identity, is_server=False, landing=landing, keepalive_s=keepalive_s, tls=tls, host=host
    )
    try:
        async with asyncio.timeout(timeout_s):
            await loop.create_connection(lambda: driver, host, port)
            await driver.handshaken.wait()
        if driver.remote is not None:
            return Peer(driver, driver.remote)
    except OSError as exc:
        if isinstance(exc, TimeoutError):
            driver.abort(ConnectionLost("aborted: the handshake took too long"))
            raise DeadlineExceeded(
                f"no handshake with {host}:{port} within {timeout_s:g} s; is it a kvproto "
                "service, and is it running?"
            ) from None
        raise ConnectionLost(
            f"cannot connect to {host}:{port}: {exc.strerror or exc}; is the service running?"
        ) from exc
    except asyncio.CancelledError:
        driver.abort(ConnectionLost("aborted: connect was cancelled"))
        raise
    error = driver.error
    assert error is not None, "a handshake ends with a remote or an error"
    # At most FAULT_LINGER_S, in which the peer reads why it was refused.
    await driver.lost.wait()
    raise error


class TcpWriter:
    """Sends KV as WRITE frames; one for each peer and model. Implements ``KvWriter``.

    Args:
        peer: the decode worker (or client) that granted the lease.
        geometry: the agreed geometry.
    """

    def __init__(self, peer: Peer, geometry: KvGeometry) -> None:
        self._peer = peer
        self._geometry = geometry

    async def write(
        self,
        sequence_id: str,
        generation: int,
        layer: int,
        first_token: int,
        num_tokens: int,
        buffers: Sequence[memoryview],
    ) -> None:
        """See ``KvWriter.write``; one frame. Also raises LocalProtocolError: sizes disagree."""
        expected_nbytes = self._geometry.write_nbytes(num_tokens)
        if total_nbytes(buffers) != expected_nbytes:
            raise LocalProtocolError(
                f"cannot write {num_tokens} tokens of layer {layer}: the buffers have "
                f"{total_nbytes(buffers)} bytes, K and V have {expected_nbytes}"
            )
        message = Write(
            sequence_id=sequence_id,
            generation=generation,
            layer=self._geometry.layer_names[layer],
            first_token=first_token,
            num_tokens=num_tokens,
        )
        shape_word = self._geometry.shape_word(num_tokens, layers=1)
        await self._peer.send(message, buffers, shape_word=shape_word)

    async def flush(self) -> None:
        """See ``KvWriter.flush``."""
        await self._peer.flushed()
