"""Asking a decode worker for tokens, with KV that the client brings, or without.

    async with DecodeClient("127.0.0.1", 9200) as client:
        async for token in client.generate(cache, tokens, max_output_tokens=64):
            ...

Source: docs/wire.md section 4 (GENERATE, ``kv_from_sender``) and ``kv_sender``.
"""

import asyncio
import contextlib
import logging
import secrets
import ssl
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

from kvproto.client.kv_sender import KvSender, Progress, check_facts, check_tokens
from kvproto.client.link import CONNECT_TIMEOUT_S, Inbox, Link
from kvproto.client.rdma_device import AUTO, TCP, check_carrier, check_offers, open_toward
from kvproto.client.rdma_sender import RdmaSender
from kvproto.errors import (
    CarrierUnavailable,
    DeadlineExceeded,
    ErrorCode,
    KvProtoError,
    LocalProtocolError,
    Malformed,
    PeerError,
)
from kvproto.kv_cache import KvCache
from kvproto.messages import (
    Abort,
    AbortAck,
    Attached,
    Description,
    Error,
    Finished,
    Generate,
    Message,
    Offer,
    Prefill,
    Tokens,
)
from kvproto.rdma.device import Device
from kvproto.rdma.host import CARRIER as RDMA
from kvproto.rdma.settings import RdmaSettings
from kvproto.tcp import Peer

logger = logging.getLogger("kvproto.client")

TIMEOUT_S: Final = 300.0
# The worker keeps the deadline itself and says so; this long after it, it is not heard any more.
GRACE_S: Final = 5.0
ABORT_TIMEOUT_S: Final = 5.0


class DecodeClient:
    """A raw client of one decode worker; an async context manager.

    Several generations may run at once. When the connection is lost all of them fail, and a new
    client is needed. Leaving the context ends those that still run.

    Args:
        host, port: where the worker listens.
        secret: the shared secret, if the worker has one.
        tls: context for TLS towards the worker.
        abort_timeout_s: how long the worker may take to confirm an abort before it is cut off.
        connect_timeout_s: for connecting and for DESCRIBE.
        carrier: how KV goes to the worker: "tcp"; "rdma" and nothing else; "auto": RDMA if it can
            be had, else TCP.
        rdma: which device, and how; see ``RdmaSettings``.

    LocalProtocolError: no such carrier. Entering raises what ``tcp.connect`` raises, and with
    "rdma" CarrierUnavailable and what ``describe`` raises.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        secret: bytes | None = None,
        tls: ssl.SSLContext | None = None,
        abort_timeout_s: float = ABORT_TIMEOUT_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        carrier: str = TCP,
        rdma: RdmaSettings | None = None,
    ) -> None:
        check_carrier(carrier)
        self._link = Link(
            host,
            port,
            secret=secret,
            tls=tls,
            on_stray=self._on_stray,
            on_carrier=self._on_carrier,
            timeout_s=connect_timeout_s,
        )
        self._address = (host, port)
        self._wanted = carrier
        self._rdma_settings = rdma or RdmaSettings()
        self._rdma: RdmaSender | None = None
        self._abort_timeout_s = abort_timeout_s
        self._generations: set[Generation] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def carrier(self) -> str:
        """How KV goes to the worker now: "rdma" from the first KV on that the worker took so."""
        return RDMA if self._rdma is not None and self._rdma.is_attached else TCP

    async def __aenter__(self) -> Self:
        device = None if self._wanted == TCP else await self._open_device()
        if device is not None:
            self._link.say_carriers(RDMA, TCP)
        try:
            await self._link.__aenter__()
            if device is not None:
                await self._prepare(device)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        finally:
            if device is not None and self._rdma is None:
                device.close()
        return self

    async def __aexit__(
        self,
        type_: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            for generation in list(self._generations):
                await generation.aclose()
        finally:
            try:
                await self._link.__aexit__(type_, value, traceback)
                for task in self._tasks:
                    task.cancel()
                if self._tasks:
                    await asyncio.wait(self._tasks)
            finally:
                if self._rdma is not None:
                    await self._rdma.close()

    async def describe(self) -> Description:
        """The worker's model and layout; asked for once."""
        return await self._link.describe()

    def generate(
        self,
        kv: KvCache | None,
        tokens: Sequence[int] | None = None,
        *,
        max_output_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        timeout_s: float = TIMEOUT_S,
        on_progress: Progress | None = None,
    ) -> "Generation":
        """Continue a prompt; nothing is sent before the first token is asked for.

        Args:
            kv: rows of all of ``tokens`` but the last, which decode computes itself. Rows of the
                last one too do no harm unless a layer has a window or rows per sequence. None:
                the worker computes the prompt itself, if it is short enough for it.
            tokens: the whole prompt; by default ``kv.tokens`` and ``kv.next_tokens``.
            max_output_tokens: the output ends after so many.
            temperature: 0 is greedy.
            top_p: 1 is off.
            top_k: 0 is off.
            seed: of the random choice.
            stop_token_ids: tokens that end the output.
            ignore_eos: go on behind the model's own end token.
            timeout_s: for everything.
            on_progress: called as the rows are sent.

        Raises LocalProtocolError: no tokens, ``kv`` is of another prompt; later, with the first
        token: of another model.
        """
        if tokens is None:
            tokens = () if kv is None else (*kv.tokens, *kv.next_tokens)
            if kv is not None and not kv.next_tokens:
                raise LocalProtocolError(
                    "the KV does not say how the prompt goes on; give all of its tokens"
                )
        prompt = tuple(tokens)
        if not prompt:
            raise LocalProtocolError("there are no tokens to continue")
        # A prompt of one token needs no KV at all.
        if kv is not None and len(prompt) > 1:
            check_tokens(kv, prompt[:-1])
        request = Generate(
            sequence_id=f"client-{secrets.token_hex(8)}",
            tokens=list(prompt),
            num_prompt_tokens=len(prompt),
            max_output_tokens=max_output_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop_token_ids=list(stop_token_ids),
            ignore_eos=ignore_eos,
            prefill_workers=[],
            timeout_s=timeout_s,
            kv_from_sender=kv is not None and len(prompt) > 1,
        )
        return Generation(self, request, kv, on_progress)

    # -- used by Generation --------------------------------------------------------------------

    @property
    def link(self) -> Link:
        """The connection."""
        return self._link

    @property
    def abort_timeout_s(self) -> float:
        """How long the worker may take to confirm an abort."""
        return self._abort_timeout_s

    def add(self, generation: "Generation") -> None:
        """It runs from now on."""
        self._generations.add(generation)

    def discard(self, generation: "Generation") -> None:
        """It is over."""
        self._generations.discard(generation)

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> asyncio.Task[None]:
        """Run something beside the reader; the client owns it."""
        task = asyncio.create_task(_until_lost(work), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @property
    def rdma(self) -> RdmaSender | None:
        """This side's end of RDMA, if it has one."""
        return self._rdma

    @property
    def is_rdma_only(self) -> bool:
        """KV must not go over TCP."""
        return self._wanted == RDMA

    # -- RDMA ----------------------------------------------------------------------------------

    async def _open_device(self) -> Device | None:
        """The device; None if there is none and "auto" was asked for."""
        try:
            return await open_toward(self._rdma_settings, *self._address)
        except CarrierUnavailable as exc:
            self._pass_over(exc)
            return None

    async def _prepare(self, device: Device) -> None:
        """Be ready for the worker's offer, which comes with the first KV."""
        peer = self._link.peer
        try:
            check_offers(peer)
        except CarrierUnavailable as exc:
            self._pass_over(exc)
        else:
            self._rdma = RdmaSender(device, peer, await self._link.geometry())

    def _pass_over(self, error: CarrierUnavailable) -> None:
        """RDMA cannot be used, which is the end of it unless "auto" was asked for."""
        if self._wanted != AUTO:
            raise error
        host, port = self._address
        logger.warning("RDMA is not used towards %s:%s: %s", host, port, error)

    def _on_carrier(self, message: Offer | Attached) -> None:
        if self._rdma is not None and isinstance(message, Offer):
            self._rdma.answer(message)

    def _on_stray(self, message: Message) -> None:
        """About a sequence that is over: nothing of ours writes for it, and that is the answer."""
        if isinstance(message, Abort | Prefill):
            key = (message.sequence_id, message.generation)
            self.spawn(lambda: self._link.peer.send(AbortAck(*key)), f"answer {key}")


class Generation:
    """The output of one prompt, token by token; made by ``DecodeClient.generate``.

    An async iterator. It ends with "stop" or "length"; any other end raises. Leaving the loop
    early does not end it: close it, or leave the client's context.

    Iterating raises PeerError (what the worker says), LocalProtocolError (the KV does not fit the
    worker), DeadlineExceeded, ConnectionLost, Malformed (tokens are missing).
    """

    def __init__(
        self,
        client: DecodeClient,
        request: Generate,
        kv: KvCache | None,
        on_progress: Progress | None,
    ) -> None:
        self._client = client
        self._request = request
        self._kv = kv
        self._on_progress = on_progress
        self._inbox: Inbox | None = None
        self._is_over = False
        self._is_confirmed = asyncio.Event()
        self._unread: list[int] = []
        self._num_received = 0
        self._expires_at = 0.0
        self._sender: KvSender | None = None
        self._sending: dict[int, KvSender] = {}
        self._finished: Finished | None = None

    @property
    def finish_reason(self) -> str:
        """What the worker said at the end, "stop" or "length" if it was a good one; "" before."""
        return "" if self._finished is None else self._finished.reason

    @property
    def timings(self) -> Mapping[str, float | int | str]:
        """What the worker says about the time it took, see docs/wire.md 4.3; empty before."""
        return {} if self._finished is None else self._finished.timings

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> int:
        if self._unread:
            return self._unread.pop(0)
        if self._is_over:
            raise StopAsyncIteration
        try:
            if self._inbox is None:
                await self._start()
            while not self._unread and not await self._is_finished():
                pass
        except BaseException:
            await self.aclose()
            raise
        if not self._unread:
            raise StopAsyncIteration
        return self._unread.pop(0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop: the worker is told, and nothing of ours is sent any more. Idempotent.

        Whoever waits for a token gets LocalProtocolError.
        """
        if self._inbox is None or self._is_over:
            self._is_over = True
            return
        self._is_over = True
        peer = self._client.link.peer
        try:
            await self._stop_sending()
            code = ErrorCode.CANCELLED
            await peer.send(Abort(self._request.sequence_id, 0, code, "no longer wanted"))
            await self._await_confirmation(peer)
        except KvProtoError:
            pass  # the connection is lost, or does not take our words
        finally:
            if not self._is_confirmed.is_set():
                peer.abort("the abort of a generation was not confirmed")
            self._forget()
            # Another task may wait for the next token.
            self._inbox.end(LocalProtocolError("the generation was closed"))

    # -- inside --------------------------------------------------------------------------------

    async def _start(self) -> None:
        link = self._client.link
        if self._kv is not None:
            check_facts(self._kv, link.peer)
        self._expires_at = asyncio.get_running_loop().time() + self._request.timeout_s + GRACE_S
        self._inbox = link.open_inbox(
            self._request.sequence_id, self._request.max_output_tokens, self._on_message
        )
        self._client.add(self)
        await link.peer.send(self._request)

    def _on_message(self, message: Message) -> bool:
        """What concerns our KV is answered at once, whether or not anybody waits for tokens."""
        match message:
            case Prefill():
                self._begin_sending(message)
            case Abort():
                sender = self._sending.pop(message.generation, None)
                self._client.spawn(lambda: self._answer_abort(message, sender), "answer ABORT")
            case Error():
                # It refuses a WRITE or the COMMIT; FINISHED says what becomes of the sequence.
                for sender in self._sending.values():
                    if sender.task is not None:
                        sender.task.cancel()
            case Tokens() | Finished():
                return True
            case AbortAck(generation=0):
                self._is_confirmed.set()
            case _:
                pass  # ACCEPTED, COMMIT_ACK, ABORT_ACK: nothing to do
        return False

    def _begin_sending(self, request: Prefill) -> None:
        peer = self._client.link.peer
        if self._kv is None or self._is_over:
            key = (request.sequence_id, request.generation)
            self._client.spawn(lambda: peer.send(AbortAck(*key)), "answer PREFILL")
            return
        sender = self._sender = KvSender(
            peer,
            request,
            self._kv,
            self._on_progress,
            rdma=self._client.rdma,
            is_rdma_only=self._client.is_rdma_only,
        )
        sender.task = self._client.spawn(sender.run, f"send KV of {request.sequence_id}")
        self._sending[request.generation] = sender

    async def _answer_abort(self, abort: Abort, sender: KvSender | None) -> None:
        """ABORT_ACK behind the last byte of that generation."""
        if sender is not None:
            await sender.stop()
        await self._client.link.peer.send(AbortAck(abort.sequence_id, abort.generation))

    async def _stop_sending(self) -> None:
        for sender in self._sending.values():
            await sender.stop()
        if self._sending:
            # The rows may change once they have left this process.
            await self._client.link.peer.flushed(timeout_s=self._client.abort_timeout_s)

    async def _await_confirmation(self, peer: Peer) -> None:
        """Until the worker has confirmed our ABORT, or ``abort_timeout_s``."""
        waits = [
            asyncio.ensure_future(self._is_confirmed.wait()),
            asyncio.ensure_future(peer.wait_closed()),
        ]
        try:
            await asyncio.wait(
                waits,
                timeout=self._client.abort_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            for wait in waits:
                wait.cancel()

    async def _is_finished(self) -> bool:
        """Take one message. True at a good end; a bad one raises."""
        assert self._inbox is not None, "started"
        left_s = self._expires_at - asyncio.get_running_loop().time()
        try:
            message = await self._inbox.get(max(0.0, left_s))
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self._client.link.peer.name} sent no end of the output within "
                f"{self._request.timeout_s + GRACE_S:g} s"
            ) from None
        if isinstance(message, Tokens):
            if message.first_index != self._num_received:
                raise Malformed(
                    "first_index", f"is {message.first_index}, {self._num_received} tokens came"
                )
            self._num_received += len(message.tokens)
            self._unread += message.tokens
            return False
        assert isinstance(message, Finished), "nothing else is kept, see _on_message"
        self._finished = message
        await self._end()
        if message.reason in {"stop", "length"}:
            return True
        if self._sender is not None and self._sender.error is not None:
            raise self._sender.error
        raise PeerError(message.code, message.message, sequence_id=message.sequence_id)

    async def _end(self) -> None:
        """The worker has said its last word."""
        self._is_over = True
        with contextlib.suppress(KvProtoError):
            await self._stop_sending()
        self._forget()

    def _forget(self) -> None:
        self._client.link.close_inbox(self._request.sequence_id)
        self._client.discard(self)


async def _until_lost(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """A lost connection is known to whoever waits for its messages."""
    with contextlib.suppress(KvProtoError):
        await work()
