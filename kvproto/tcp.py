"""The TCP carrier: ``connect``, ``serve``, ``Peer``, and ``TcpWriter`` for KV bytes.

Works on asyncio's own event loop and on uvloop; on uvloop, bodies go from their memory to the
socket without a copy. Source: docs/wire.md; the protocol itself is in ``connection``.
"""

import asyncio
import os
import ssl
from collections.abc import Sequence
from typing import Final

from kvproto.buffer import byte_view, total_nbytes
from kvproto.carrier import Landing
from kvproto.digest import BodyDigests, RegionDigests
from kvproto.errors import ConnectionLost, DeadlineExceeded, LocalProtocolError
from kvproto.geometry import KvGeometry
from kvproto.handshake import Identity
from kvproto.messages import Write
from kvproto.tcp_driver import TcpDriver
from kvproto.tcp_peer import Peer
from kvproto.tcp_server import Server, serve
from kvproto.tls_stream import check_context

# Below this a digest takes less time than another thread needs to wake up.
THREAD_MIN_NBYTES: Final = 1024 * 1024

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
        thread_min_nbytes: bodies of at least this size are digested in a thread while they are
            sent. None: THREAD_MIN_NBYTES, or never where this process has a single core.
    """

    def __init__(
        self, peer: Peer, geometry: KvGeometry, *, thread_min_nbytes: int | None = None
    ) -> None:
        self._peer = peer
        self._geometry = geometry
        if thread_min_nbytes is None and _num_cores() > 1:
            thread_min_nbytes = THREAD_MIN_NBYTES
        self._thread_min_nbytes = thread_min_nbytes

    async def write(
        self,
        sequence_id: str,
        generation: int,
        layer: int,
        first_token: int,
        num_tokens: int,
        buffers: Sequence[memoryview],
        digests: RegionDigests | None = None,
    ) -> None:
        """See ``KvWriter.write``; one frame. Also raises LocalProtocolError: sizes disagree.

        The payload check leaves out the body, which the digests of COMMIT cover.
        """
        nbytes = total_nbytes(buffers)
        sizes = [
            self._geometry.region_nbytes(layer, num_tokens, is_last=is_last)
            for is_last in (False, True)
        ]
        region_nbytes = next((each for each in sizes if sum(each) == nbytes), None)
        if region_nbytes is None:
            raise LocalProtocolError(
                f"cannot write {num_tokens} tokens of layer {layer}: the buffers have {nbytes} "
                f"bytes, its regions have {sum(sizes[0])}"
            )
        views = [byte_view(buffer) for buffer in buffers]
        body: BodyDigests | None = None
        digesting: asyncio.Future[None] | None = None
        if digests is not None:
            body = digests.begin(layer, region_nbytes)
            if self._thread_min_nbytes is None or nbytes < self._thread_min_nbytes:
                _digest(body, views)
            else:
                loop = asyncio.get_running_loop()
                digesting = loop.run_in_executor(None, _digest, body, views)
        message = Write(
            sequence_id=sequence_id,
            generation=generation,
            layer=self._geometry.layers[layer].name,
            first_token=first_token,
            num_tokens=num_tokens,
        )
        shape_word = self._geometry.shape_word(layer, num_tokens)
        await self._peer.send(message, views, shape_word=shape_word, is_body_checked=False)
        if digesting is not None:
            await digesting
        if digests is not None and body is not None:
            digests.accept(layer, body)

    async def flush(self) -> None:
        """See ``KvWriter.flush``."""
        await self._peer.flushed()


def _digest(body: BodyDigests, views: Sequence[memoryview]) -> None:
    """Runs in either thread."""
    for view in views:
        body.update(view)


def _num_cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
