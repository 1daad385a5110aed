"""The client as the writer of a transfer: it sends the KV that it holds to a decode worker.

The decode worker asks with PREFILL, on the connection on which it got GENERATE, as it asks a
prefill worker. One ``KvSender`` answers one such PREFILL, over TCP or by RDMA.
"""

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from kvproto.carrier import KvWriter
from kvproto.client.rdma_sender import RdmaSender
from kvproto.convert import WirePacker
from kvproto.digest import RegionDigests
from kvproto.errors import (
    CarrierLost,
    CarrierUnavailable,
    KvProtoError,
    LeaseError,
    LocalProtocolError,
)
from kvproto.geometry import PER_SEQUENCE, KvGeometry
from kvproto.kv_cache import KvCache
from kvproto.messages import Abort, AbortAck, Commit, Prefill, Started
from kvproto.rdma.host import CARRIER as RDMA
from kvproto.rdma.writer import RdmaWriter
from kvproto.tcp import Peer, TcpWriter

# One WRITE: large enough to cost little, small enough to stop soon.
MAX_WRITE_NBYTES: Final = 4 << 20
# Room for the descriptor of a WRITE within the receiver's largest payload.
_DESCRIPTOR_NBYTES: Final = 4096
# What a decode worker may hold otherwise than the KV does: the form is converted.
_CONVERTED_FACTS: Final = frozenset({"dtype"})

# (sent, total): bytes of the rows.
Progress = Callable[[int, int], None]


def check_tokens(cache: KvCache, tokens: tuple[int, ...]) -> None:
    """LocalProtocolError unless ``cache`` has the rows that decode needs of ``tokens``.

    ``tokens`` may be fewer than those of the cache where every row of theirs is there: not with a
    layer that has a window or rows per sequence, whose earlier rows are gone.
    """
    count = len(tokens)
    pairs = enumerate(zip(cache.tokens, tokens, strict=False))
    other = next(((index, *pair) for index, pair in pairs if pair[0] != pair[1]), None)
    if other is not None:
        raise LocalProtocolError(
            "the KV is that of another prompt: token {} is {} there and {} here".format(*other)
        )
    if count > cache.num_tokens:
        raise LocalProtocolError(
            f"the KV has {cache.num_tokens} tokens, {count} are needed: all of the prompt but its "
            "last"
        )
    if count == cache.num_tokens:
        return
    for index, layer in enumerate(cache.geometry.layers):
        is_kept = layer.first_needed_token(count) >= cache.layout.first_token(index)
        if not is_kept or any(region.per == PER_SEQUENCE for region in layer.regions):
            raise LocalProtocolError(
                f"the KV is that of {cache.num_tokens} tokens, {count} are needed, and layer "
                f"{layer.name} no longer has the rows for fewer; prefill all of the prompt but "
                "its last token"
            )


def check_facts(cache: KvCache, peer: Peer) -> None:
    """LocalProtocolError naming the first fact in which the KV and the worker differ."""
    for name in sorted(cache.facts.keys() & peer.remote.facts.keys() - _CONVERTED_FACTS):
        ours, theirs = cache.facts[name], peer.remote.facts[name]
        if ours != theirs:
            raise LocalProtocolError(
                f"the KV was computed with {name} {ours!r}, {peer.name} has {theirs!r}; use a "
                "worker with the same model"
            )


class KvSender:
    """Answers one PREFILL out of a cache.

    Args:
        peer: the decode worker.
        request: its PREFILL.
        cache: the rows; must not change until ``run`` has returned.
        on_progress: called after each WRITE, or what takes its place.
        rdma: this side's end of RDMA, if it has one.
        is_rdma_only: refuse a PREFILL that asks for another carrier.

    Attributes:
        task: what ``run`` runs in, set by the owner; for ``stop``.
        error: why nothing was delivered, if it was our fault or our carrier's.
    """

    def __init__(
        self,
        peer: Peer,
        request: Prefill,
        cache: KvCache,
        on_progress: Progress | None = None,
        *,
        rdma: RdmaSender | None = None,
        is_rdma_only: bool = False,
    ) -> None:
        self._peer = peer
        self._request = request
        self._cache = cache
        self._on_progress = on_progress
        self._rdma = rdma
        self._is_rdma_only = is_rdma_only
        self._num_tokens = len(request.tokens)
        self._placing: RdmaWriter | None = None
        self.task: asyncio.Task[None] | None = None
        self.error: KvProtoError | None = None

    async def run(self) -> None:
        """Send everything; a fault of ours is told to the worker, and kept in ``error``.

        Cancelled, it stops between two frames, of which some may not have left this process yet;
        see ``stop``. Raises ConnectionLost, DeadlineExceeded.
        """
        key = (self._request.sequence_id, self._request.generation)
        try:
            packer = self._packer()
            writer = await self._writer(packer.wire)
            await self._peer.send(Started(*key, queue_s=0.0))
            commit = await self._write_all(packer, writer)
            await writer.flush()
            await self._peer.send(commit)
            self._end()
        except (LocalProtocolError, LeaseError, CarrierUnavailable, CarrierLost) as exc:
            await self._give_up(exc)

    async def stop(self) -> None:
        """Cancel ``run``; when this returns, nothing reaches the worker's memory by RDMA any more.

        What TCP still has to send is behind it in order. Raises ConnectionLost.
        """
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait([self.task])
        self._end()
        await self._settle()

    def _packer(self) -> WirePacker:
        """What is sent, and how it is made. LocalProtocolError: it cannot be."""
        request, held = self._request, self._cache.geometry
        check_tokens(self._cache, tuple(request.tokens))
        dtype = request.dtype or str(self._peer.remote.facts.get("dtype", ""))
        return WirePacker(held, held.as_wire(dtype, request.num_heads), request.first_head)

    async def _writer(self, wire: KvGeometry) -> KvWriter:
        """What sends it. LocalProtocolError, CarrierUnavailable, LeaseError: nothing does."""
        request = self._request
        if request.carrier in {"", "tcp"}:
            if self._is_rdma_only:
                reason = "" if self._rdma is None else self._rdma.reason
                raise CarrierUnavailable(
                    f"{self._peer.name} asks for the KV over TCP and this client has carrier "
                    f"rdma alone: {reason}"
                )
            return TcpWriter(self._peer, wire)
        if request.carrier != RDMA or self._rdma is None:
            raise LocalProtocolError(f"this client does not write over {request.carrier!r}")
        writer = await self._rdma.writer()
        if wire != self._rdma.geometry:
            raise LocalProtocolError(
                "the KV has other regions than the worker's memory; use a worker with the same "
                "model"
            )
        writer.begin(
            request.sequence_id,
            request.generation,
            request.block_table,
            self._num_tokens,
            keys=request.keys,
            is_checked=not request.is_unchecked,
        )
        self._placing = writer
        return writer

    async def _write_all(self, packer: WirePacker, writer: KvWriter) -> Commit:
        request, wire = self._request, packer.wire
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        digests = RegionDigests(wire)
        sent_nbytes, total_nbytes = 0, wire.prompt_nbytes(self._num_tokens)
        for layer, held in enumerate(wire.layers):
            first_token = held.first_needed_token(self._num_tokens)
            while first_token < self._num_tokens:
                count = min(self._num_tokens - first_token, self._max_tokens(wire, layer))
                is_last = first_token + count == self._num_tokens
                buffers = self._cache.views(layer, first_token, count)
                if packer.is_needed:
                    buffers = await asyncio.to_thread(
                        packer.pack, layer, count, buffers, is_last=is_last
                    )
                body = digests.begin(layer, wire.region_nbytes(layer, count, is_last=is_last))
                if not request.is_unchecked:
                    for buffer in buffers:
                        body.update(buffer)
                digests.accept(layer, body)
                await writer.write(
                    request.sequence_id, request.generation, layer, first_token, count, buffers
                )
                sent_nbytes += sum(buffer.nbytes for buffer in buffers)
                if self._on_progress is not None:
                    self._on_progress(sent_nbytes, total_nbytes)
                first_token += count
        return Commit(
            request.sequence_id,
            request.generation,
            num_tokens=self._num_tokens,
            nbytes=sent_nbytes,
            digests=[] if request.is_unchecked else digests.values(),
            queue_s=0.0,
            prefill_s=0.0,
            handoff_s=loop.time() - began_at,
            # Two independent losses add up as squares.
            wire_error=math.hypot(self._cache.wire_error, packer.wire_error),
        )

    def _max_tokens(self, wire: KvGeometry, layer: int) -> int:
        """Tokens of a layer in one WRITE. LocalProtocolError: the receiver takes not even one."""
        limit = self._peer.remote.max_payload_nbytes - _DESCRIPTOR_NBYTES
        sequence_nbytes = wire.write_nbytes(layer, 0, is_last=True)
        token_nbytes = wire.write_nbytes(layer, 1)
        if sequence_nbytes + token_nbytes > limit:
            raise LocalProtocolError(
                f"one token of layer {wire.layers[layer].name} does not fit into a frame of "
                f"{self._peer.remote.max_payload_nbytes} bytes, the largest that "
                f"{self._peer.name} takes"
            )
        limit = min(limit, MAX_WRITE_NBYTES) - sequence_nbytes
        return max(1, limit // max(1, token_nbytes))

    def _end(self) -> None:
        """Nothing of this transfer is posted from now on."""
        if self._placing is not None:
            self._placing.end(self._request.sequence_id, self._request.generation)

    async def _settle(self) -> None:
        """What was posted has arrived, or never will. Raises ConnectionLost."""
        if self._placing is not None:
            with suppress(CarrierLost):  # its end is the best of promises
                await self._placing.flush()

    async def _give_up(self, error: KvProtoError) -> None:
        self.error = error
        key = (self._request.sequence_id, self._request.generation)
        self._end()
        await self._settle()
        await self._peer.flushed()
        await self._peer.send(Abort(*key, code=error.code, message=str(error)))
        await self._peer.send(AbortAck(*key))
