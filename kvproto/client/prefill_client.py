"""Asking a prefill worker for the KV of a prompt, without a decode worker.

    async with PrefillClient("127.0.0.1", 9100) as client:
        cache = await client.prefill(tokens)

The client does what a decode worker does: it grants a lease, in memory or in a mapped file, asks,
checks counts and digests, and acknowledges. A transfer that is given up, whatever the reason, is
aborted, and the call returns only when the worker can no longer write to the memory: with its
ABORT_ACK, or by cutting the connection.

By RDMA the worker writes into a pool of the client's, from which the rows are copied as they are
announced. Source: docs/wire.md sections 6 and 7.
"""

import asyncio
import logging
import secrets
import ssl
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypeVar

from numpy.typing import NDArray

from kvproto.client.landing import CacheLanding
from kvproto.client.link import CONNECT_TIMEOUT_S, Inbox, Link, peer_error
from kvproto.client.rdma_device import AUTO, TCP, check_carrier, check_offers, open_toward
from kvproto.client.rdma_receiver import RdmaReceiver
from kvproto.errors import (
    CarrierLost,
    CarrierUnavailable,
    ConnectionLost,
    DeadlineExceeded,
    ErrorCode,
    KvProtoError,
    LocalProtocolError,
    PeerError,
)
from kvproto.geometry import KvGeometry
from kvproto.kv_cache import CacheLayout, KvCache
from kvproto.kv_file import KvFileWriter
from kvproto.messages import (
    Abort,
    AbortAck,
    Attached,
    Commit,
    CommitAck,
    Description,
    Error,
    Message,
    Offer,
    Placed,
    Prefill,
    Write,
)
from kvproto.rdma.device import Device
from kvproto.rdma.host import CARRIER as RDMA
from kvproto.rdma.settings import RdmaSettings

logger = logging.getLogger("kvproto.client")

TIMEOUT_S: Final = 300.0
STALL_TIMEOUT_S: Final = 30.0
ABORT_TIMEOUT_S: Final = 5.0
MAX_KV_NBYTES: Final = 64 << 30
POOL_NBYTES: Final = 256 << 20

T = TypeVar("T")
# (landed, total): bytes of the rows.
Progress = Callable[[int, int], None]


class LandedRows(NamedTuple):
    """Rows of one layer that have landed. Not proven until the stream has ended.

    ``regions``: by name, ``[tokens, heads, head_dim]`` as ``KvCache.region`` gives them; a region
    per sequence is there with the last token.
    """

    layer: str
    first_token: int
    num_tokens: int
    regions: dict[str, NDArray[Any]]


class PrefillClient:
    """A raw client of one prefill worker; an async context manager.

    Several calls may run at once. When the connection is lost all of them fail, and a new client
    is needed.

    Args:
        host, port: where the worker listens.
        secret: the shared secret, if the worker has one.
        tls: context for TLS towards the worker.
        dtype: element type in which the rows are wanted, see ``convert.CONVERTIBLE``; "" is the
            worker's own.
        tokenize: makes token ids of a prompt given as text.
        timeout_s: for a whole call.
        stall_timeout_s: longest time in which neither a byte nor a sign of life comes.
        abort_timeout_s: how long the worker may take to confirm an abort before it is cut off.
        connect_timeout_s: for connecting and for DESCRIBE.
        max_kv_nbytes: a prompt whose KV is larger is refused here, before memory is taken.
        carrier: "tcp"; "rdma" and nothing else, which needs rows in the worker's own dtype;
            "auto": RDMA if it can be had, else TCP.
        rdma: which device, and how; see ``RdmaSettings``.
        pool_nbytes: memory registered for RDMA. Calls that find no room in it wait.

    LocalProtocolError: no such carrier. Entering raises what ``tcp.connect`` raises, and with
    "rdma" CarrierUnavailable, LocalProtocolError (dtype, ``pool_nbytes``) and what ``describe``
    raises. Every call raises: LocalProtocolError (no tokens, too large, no ``tokenize``, unknown
    dtype), PeerError (what the worker says), DeadlineExceeded, LeaseError and DigestMismatch (what
    landed is not what was sent), CarrierLost (or PeerError with that code: RDMA failed; with "auto"
    later calls use TCP, else they fail), ConnectionLost.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        secret: bytes | None = None,
        tls: ssl.SSLContext | None = None,
        dtype: str = "",
        tokenize: Callable[[str], Sequence[int]] | None = None,
        timeout_s: float = TIMEOUT_S,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        abort_timeout_s: float = ABORT_TIMEOUT_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        max_kv_nbytes: int = MAX_KV_NBYTES,
        carrier: str = TCP,
        rdma: RdmaSettings | None = None,
        pool_nbytes: int = POOL_NBYTES,
    ) -> None:
        check_carrier(carrier)
        self._landing = CacheLanding()
        self._link = Link(
            host,
            port,
            secret=secret,
            tls=tls,
            landing=self._landing,
            on_carrier=self._on_carrier,
            timeout_s=connect_timeout_s,
        )
        self._address = (host, port)
        self._dtype = dtype
        self._tokenize = tokenize
        self._timeout_s = timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._abort_timeout_s = abort_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._max_kv_nbytes = max_kv_nbytes
        self._wanted = carrier
        self._rdma_settings = rdma or RdmaSettings()
        self._pool_nbytes = pool_nbytes
        self._generation = 0
        self._receiver: RdmaReceiver | None = None
        # Why RDMA can no longer be used, if so.
        self._lost = ""

    @property
    def carrier(self) -> str:
        """What the next call uses: "tcp" or "rdma"."""
        return TCP if self._receiver is None or self._lost else RDMA

    async def __aenter__(self) -> Self:
        device = None if self._wanted == TCP else await self._open_device()
        if device is not None:
            self._link.say_carriers(RDMA, TCP)
        try:
            await self._link.__aenter__()
            if device is not None:
                await self._attach(device)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        finally:
            if device is not None and self._receiver is None:
                device.close()
        return self

    async def __aexit__(
        self,
        type_: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self._link.__aexit__(type_, value, traceback)
        finally:
            if self._receiver is not None:
                self._receiver.close()

    async def describe(self) -> Description:
        """The worker's model and layout; asked for once."""
        return await self._link.describe()

    async def prefill(
        self,
        prompt: Sequence[int] | str,
        *,
        next_tokens: Sequence[int] = (),
        on_progress: Progress | None = None,
    ) -> KvCache:
        """The KV of ALL tokens of ``prompt``, in new memory.

        Leave off the last token of a prompt that is to be continued and give it as
        ``next_tokens``, which is only noted: decode computes that token itself.
        """
        tokens = self._tokens(prompt)
        geometry = await self._checked_geometry(tokens)
        cache = KvCache(
            geometry, tokens, model=await self._model(), facts=self._facts, next_tokens=next_tokens
        )
        await self._fill(cache, on_progress)
        return cache

    async def prefill_to_file(
        self,
        path: Path | str,
        prompt: Sequence[int] | str,
        *,
        next_tokens: Sequence[int] = (),
        on_progress: Progress | None = None,
    ) -> None:
        """As ``prefill``, but the rows land in a mapped file, which appears when it is complete.

        Also raises KvFileError. Whatever is raised, no file is left. If the call is cancelled
        while the disk takes the last bytes, the complete file may be there.
        """
        tokens = self._tokens(prompt)
        geometry = await self._checked_geometry(tokens)
        model, facts = await self._model(), self._facts
        writer = await _finished(
            asyncio.to_thread(
                lambda: KvFileWriter(
                    path, geometry, tokens, model=model, facts=facts, next_tokens=next_tokens
                )
            ),
            on_cancelled=KvFileWriter.discard,
        )
        with writer:
            digests = await self._fill(writer.cache, on_progress)
            await _finished(asyncio.to_thread(writer.commit, digests))

    async def stream(self, prompt: Sequence[int] | str) -> AsyncGenerator[LandedRows]:
        """The rows of ALL tokens of ``prompt`` as they land, layer by layer of each chunk.

        Rows are proven only when the stream has ended without an error; whoever uses them before
        must be able to take that back. Leaving the loop aborts the transfer; use
        ``contextlib.aclosing`` to have that done at once.
        """
        tokens = self._tokens(prompt)
        cache = KvCache(await self._checked_geometry(tokens), tokens)
        async with aclosing(self._writes(cache, [])) as writes:
            async for write in writes:
                yield _landed_rows(cache, write)

    # -- RDMA ----------------------------------------------------------------------------------

    async def _open_device(self) -> Device | None:
        """The device; None if there is none and "auto" was asked for."""
        try:
            return await open_toward(self._rdma_settings, *self._address)
        except CarrierUnavailable as exc:
            self._pass_over(exc)
            return None

    async def _attach(self, device: Device) -> None:
        """Let the worker write into a pool, or with "auto" leave it at TCP."""
        peer = self._link.peer
        try:
            check_offers(peer)
            geometry = await self._link.geometry()
            self._check_dtype(geometry.dtype)
            self._receiver = RdmaReceiver(device, geometry, self._pool_nbytes)
            await self._receiver.attach(peer, timeout_s=self._connect_timeout_s)
        except (CarrierUnavailable, LocalProtocolError) as exc:
            self._pass_over(exc)
            if self._receiver is not None:
                self._receiver.close()
                self._receiver = None

    def _check_dtype(self, held_dtype: str) -> None:
        if self._dtype not in ("", held_dtype):
            raise LocalProtocolError(
                f"by RDMA rows come as the worker holds them, in {held_dtype}, and not in "
                f"{self._dtype}; leave dtype off, or use carrier tcp, which converts"
            )

    def _pass_over(self, error: CarrierUnavailable | LocalProtocolError) -> None:
        """RDMA cannot be used, which is the end of it unless "auto" was asked for."""
        if self._wanted != AUTO:
            raise error
        host, port = self._address
        logger.warning("RDMA is not used towards %s:%s: %s", host, port, error)

    def _on_carrier(self, message: Offer | Attached) -> None:
        if self._receiver is not None and isinstance(message, Attached):
            self._receiver.attached(self._link.peer, message)

    def _on_failure(self, receiver: RdmaReceiver | None, error: KvProtoError) -> None:
        """A transfer over ``receiver`` has failed; if RDMA did, this connection's is over."""
        if receiver is None or error.code != ErrorCode.CARRIER_LOST or self._lost:
            return
        receiver.cut()
        self._lost = str(error)
        logger.warning("RDMA to %s is lost: %s", self._link.peer.name, error)

    # -- inside --------------------------------------------------------------------------------

    @property
    def _facts(self) -> dict[str, str | int]:
        return dict(self._link.peer.remote.facts)

    async def _model(self) -> str:
        return (await self.describe()).model

    def _tokens(self, prompt: Sequence[int] | str) -> list[int]:
        if isinstance(prompt, str):
            if self._tokenize is None:
                raise LocalProtocolError(
                    "the prompt is text and the client has no `tokenize`; give it one, or token ids"
                )
            prompt = self._tokenize(prompt)
        if not prompt:
            raise LocalProtocolError("there are no tokens to prefill")
        return list(prompt)

    async def _checked_geometry(self, tokens: Sequence[int]) -> KvGeometry:
        geometry = (await self._link.geometry()).as_wire(self._dtype)
        nbytes = CacheLayout(geometry, len(tokens)).nbytes
        if nbytes > self._max_kv_nbytes:
            raise LocalProtocolError(
                f"the KV of {len(tokens)} tokens has {nbytes} bytes, the limit (max_kv_nbytes) is "
                f"{self._max_kv_nbytes}"
            )
        if self._lost and self._wanted != AUTO:
            raise CarrierLost(f"RDMA to {self._link.peer.name} was lost: {self._lost}")
        if self._receiver is not None and not self._lost:
            self._receiver.pool.check(len(tokens))
        return geometry

    async def _fill(self, cache: KvCache, on_progress: Progress | None) -> list[int]:
        """Have the worker fill ``cache``; the digests of the rows."""
        total_nbytes = cache.geometry.prompt_nbytes(cache.num_tokens)
        landed_nbytes = 0
        digests: list[int] = []
        async with aclosing(self._writes(cache, digests)) as writes:
            async for write in writes:
                layer = cache.geometry.layer_names.index(write.layer)
                is_last = write.first_token + write.num_tokens == cache.num_tokens
                landed_nbytes += cache.geometry.write_nbytes(
                    layer, write.num_tokens, is_last=is_last
                )
                if on_progress is not None:
                    on_progress(landed_nbytes, total_nbytes)
        return digests

    async def _writes(self, cache: KvCache, digests: list[int]) -> AsyncGenerator[Write | Placed]:
        """Run one transfer into ``cache``: what has landed each time; at the end all is proven.

        ``digests`` are then those of the rows.
        """
        peer = self._link.peer
        self._generation += 1
        generation = self._generation
        sequence_id = f"client-{secrets.token_hex(8)}"
        max_writes = cache.geometry.num_layers * cache.num_tokens
        expires_at = asyncio.get_running_loop().time() + self._timeout_s
        receiver = None if self._lost else self._receiver
        block_table = await self._grant(receiver, sequence_id, generation, cache, expires_at)
        inbox = self._link.open_inbox(sequence_id, max_writes)
        keys: list[int] = []
        is_quiet = False
        code, reason = int(ErrorCode.CANCELLED), "no longer wanted"
        try:
            if receiver is not None:
                keys = await receiver.open_keys()
            await peer.send(
                Prefill(
                    sequence_id,
                    generation,
                    tokens=list(cache.tokens),
                    timeout_s=max(0.0, expires_at - asyncio.get_running_loop().time()),
                    carrier="" if receiver is None else RDMA,
                    block_table=block_table,
                    dtype=cache.geometry.dtype,
                    heartbeat_s=self._stall_timeout_s / 3,
                    keys=keys,
                )
            )
            while True:
                match message := await self._next(inbox, expires_at):
                    case Write() | Placed():
                        yield message
                    case Commit():
                        digests[:] = self._landing.commit(message)
                        cache.wire_error = message.wire_error
                        # COMMIT followed the last write: nothing can come any more.
                        is_quiet = True
                        with suppress(KvProtoError):
                            # Complete here, whether or not the worker hears of it.
                            await peer.send(CommitAck(sequence_id, generation))
                        return
                    case Abort():
                        raise PeerError(message.code, message.message, sequence_id=sequence_id)
                    case Error():
                        raise peer_error(message)
        except ConnectionLost:
            # Proof on TCP; a writer by RDMA is cut off.
            is_quiet = True
            if receiver is not None:
                receiver.cut()
            raise
        except KvProtoError as exc:
            code, reason = exc.code, str(exc)
            self._on_failure(receiver, exc)
            raise
        finally:
            try:
                if not is_quiet:
                    self._landing.revoke(generation)
                    abort = Abort(sequence_id, generation, code, reason)
                    await self._quiesce(inbox, abort, receiver)
            finally:
                if receiver is not None:
                    receiver.close_keys(keys)
                self._landing.forget(generation)
                self._link.close_inbox(sequence_id)

    async def _grant(
        self,
        receiver: RdmaReceiver | None,
        sequence_id: str,
        generation: int,
        cache: KvCache,
        expires_at: float,
    ) -> list[int]:
        """Let the worker write; the blocks for RDMA, once there are some. DeadlineExceeded."""
        writer = self._link.peer.remote.instance_id
        if receiver is None:
            self._landing.grant(sequence_id, generation, cache, writer=writer)
            return []
        pool = receiver.pool
        try:
            async with asyncio.timeout_at(expires_at):
                block_table = await pool.take(sequence_id, cache.num_tokens)
        except TimeoutError:
            raise DeadlineExceeded(
                f"other calls of this client held the landing pool for {self._timeout_s:g} s "
                "(timeout_s); make fewer at a time, or give it a larger pool_nbytes"
            ) from None
        try:
            self._landing.grant_placed(
                sequence_id, generation, cache, pool, block_table, writer=writer
            )
        except BaseException:
            pool.put_back(sequence_id, generation, block_table)
            raise
        return block_table

    async def _next(self, inbox: Inbox, expires_at: float) -> Message:
        """What the worker says next about a transfer. DeadlineExceeded: too late, or a stall."""
        left_s = expires_at - asyncio.get_running_loop().time()
        try:
            return await inbox.get(max(0.0, min(left_s, self._stall_timeout_s)))
        except TimeoutError:
            text = (
                f"within {self._timeout_s:g} s (timeout_s)"
                if left_s <= self._stall_timeout_s
                else f"for {self._stall_timeout_s:g} s (stall_timeout_s)"
            )
            raise DeadlineExceeded(f"{self._link.peer.name} sent no KV {text}") from None

    async def _quiesce(self, inbox: Inbox, abort: Abort, receiver: RdmaReceiver | None) -> None:
        """Return when the worker can no longer write to the memory of this transfer."""
        peer = self._link.peer
        reason = "the abort was interrupted"
        is_confirmed = False
        try:
            await peer.send(abort)
            async with asyncio.timeout(self._abort_timeout_s):
                while not isinstance(await inbox.get(self._abort_timeout_s), AbortAck):
                    pass
            is_confirmed = self._landing.quiesced(abort.generation)
            reason = "a WRITE follows its ABORT_ACK"
        except TimeoutError:
            reason = "no ABORT_ACK within abort_timeout_s"
        except KvProtoError:
            reason = "the abort could not be sent"
        finally:
            if not is_confirmed:
                # No promise: cut the line, after which no byte can arrive.
                if receiver is not None:
                    receiver.cut()
                peer.abort(reason)
                await peer.wait_closed()


def _landed_rows(cache: KvCache, write: Write | Placed) -> LandedRows:
    first_row = write.first_token - cache.first_token(write.layer)
    is_last = write.first_token + write.num_tokens == cache.num_tokens
    regions: dict[str, NDArray[Any]] = {}
    layer = cache.geometry.layers[cache.geometry.layer_names.index(write.layer)]
    for region in layer.regions:
        rows = cache.region(write.layer, region.name)
        if region.per == "token":
            regions[region.name] = rows[first_row : first_row + write.num_tokens]
        elif is_last:
            regions[region.name] = rows
    return LandedRows(write.layer, write.first_token, write.num_tokens, regions)


async def _finished(
    work: Coroutine[Any, Any, T], on_cancelled: Callable[[T], None] = lambda _result: None
) -> T:
    """The result of work in a thread, which is over when this returns, even if cancelled."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is None:
            on_cancelled(task.result())
        raise
