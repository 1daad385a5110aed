"""A worker's standing offer at the router: register, renew, and come back after any failure.

The router keeps a worker only for ``lease_s`` after its last RENEW, so a worker that hangs or is
cut off disappears by itself, and a router that restarts learns of every worker again within the
back-off. Failures are reported, never raised.
"""

import asyncio
import random
import ssl
from collections.abc import Callable
from typing import Final

from kvproto.errors import ConnectionLost, KvProtoError, PeerError, UnexpectedMessage
from kvproto.handshake import Identity
from kvproto.messages import Error, Register, Registered, Renew
from kvproto.tcp import connect
from kvproto.tcp_peer import Peer

CONNECT_TIMEOUT_S: Final = 5.0
MIN_BACKOFF_S: Final = 0.2
MAX_BACKOFF_S: Final = 2.0
# Two RENEWs may be lost or late before the lease runs out.
RENEWALS_PER_LEASE: Final = 3


async def announce(
    router_host: str,
    router_port: int,
    *,
    identity: Identity,
    registration: Register,
    load: Callable[[], Renew],
    stop: asyncio.Event,
    on_state: Callable[[bool, str], None],
    tls: ssl.SSLContext | None = None,
) -> None:
    """Keep this worker registered at the router until ``stop`` is set.

    ``load`` gives the RENEW to send, at once after registration and then every ``lease_s / 3``.
    ``on_state(is_registered, sentence)`` is called at each change and for each failed attempt.
    Between attempts it waits 0.2 s, doubling to 2 s, with jitter, so that workers do not come
    back all at once. ``tls`` as for ``kvproto.tcp.connect``.
    """
    backoff_s = MIN_BACKOFF_S
    address = f"{router_host}:{router_port}"
    while not stop.is_set():
        try:
            peer = await connect(
                router_host,
                router_port,
                identity=identity,
                timeout_s=CONNECT_TIMEOUT_S,
                tls=tls,
            )
            try:
                lease_s = await _register(peer, registration)
                backoff_s = MIN_BACKOFF_S
                on_state(True, f"registered at the router {address}")
                reason = await _stay(peer, load, lease_s / RENEWALS_PER_LEASE, stop)
            finally:
                peer.abort("this registration is over")
        except KvProtoError as exc:
            reason = str(exc)
        if stop.is_set():
            break
        on_state(False, f"not registered at the router {address}: {reason}")
        # Jitter against a herd of workers, nothing that must be unpredictable.
        await _wait(stop, backoff_s * random.uniform(0.5, 1.0))
        backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
    on_state(False, f"no longer registered at the router {address}: this worker stops")


async def _register(peer: Peer, registration: Register) -> float:
    """Lease in seconds. Raises what ``Peer`` does, PeerError, UnexpectedMessage, ConnectionLost."""
    await peer.send(registration)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            answer = await peer.receive()
    except TimeoutError:
        raise ConnectionLost(f"no answer to REGISTER within {CONNECT_TIMEOUT_S:g} s") from None
    if isinstance(answer, Registered):
        return answer.lease_s
    if isinstance(answer, Error):
        raise PeerError(answer.code, answer.message, answer.field, answer.sequence_id)
    raise UnexpectedMessage(f"{answer.kind.name} in answer to REGISTER")


async def _stay(
    peer: Peer, load: Callable[[], Renew], interval_s: float, stop: asyncio.Event
) -> str:
    """Renew until ``stop`` (then close cleanly) or until the connection ends; the reason."""
    async with asyncio.TaskGroup() as tasks:
        watcher = tasks.create_task(_watch(peer))
        while not (watcher.done() or stop.is_set()):
            try:
                await peer.send(load())
            except KvProtoError:
                break  # the watcher knows the reason
            await _wait_any(stop, watcher, interval_s)
        await peer.close()
    return watcher.result()


async def _watch(peer: Peer) -> str:
    """Read until the connection ends; what ended it."""
    reason = "the router closed the connection"
    try:
        async for message in peer:
            if isinstance(message, Error):
                reason = message.message
    except ConnectionLost as exc:
        reason = exc.reason
    return reason


async def _wait_any(stop: asyncio.Event, watcher: asyncio.Task[str], timeout_s: float) -> None:
    """Until ``stop`` is set, ``watcher`` is done, or the time is over."""
    async with asyncio.TaskGroup() as tasks:
        stopped = tasks.create_task(stop.wait())
        await asyncio.wait(
            {stopped, watcher}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        stopped.cancel()


async def _wait(stop: asyncio.Event, timeout_s: float) -> None:
    """Until ``stop`` is set or the time is over."""
    try:
        async with asyncio.timeout(timeout_s):
            await stop.wait()
    except TimeoutError:
        pass
