"""One prompt's KV on its way out: in which form, over which carrier, and what it adds up to."""

import asyncio
from collections.abc import Mapping, Sequence

from kvproto.carrier import KvWriter, PlacingWriter
from kvproto.convert import WirePacker
from kvproto.digest import RegionDigests
from kvproto.errors import ErrorCode, KvProtoError, LocalProtocolError
from kvproto.geometry import KvGeometry
from kvproto.messages import Prefill
from kvproto.tcp_link import Link
from prefill_svc.errors import PromptRefused


class Transfer:
    """Sends the KV of one prompt, layer by layer, in the form that was asked for.

    Args:
        request: says dtype, heads, carrier and whether digests are wanted.
        geometry: of our pool.
        peer: the asker; a request without a dtype of its own gets that of the asker's facts.
        placing: by carrier, the writers into the asker's memory that this worker is attached to.

    PromptRefused: a form that this worker cannot make (MALFORMED), blocks that the asker's
    memory does not have (LEASE).

    Attributes:
        nbytes: sent so far.
    """

    def __init__(
        self,
        request: Prefill,
        geometry: KvGeometry,
        peer: Link,
        placing: Mapping[str, PlacingWriter] | None = None,
    ) -> None:
        dtype = request.dtype or str(peer.remote.facts.get("dtype", ""))
        try:
            wire = geometry.as_wire(dtype, request.num_heads)
            self._packer = WirePacker(geometry, wire, request.first_head)
        except LocalProtocolError as exc:
            raise PromptRefused(ErrorCode.MALFORMED, str(exc)) from exc
        self._request = request
        self._wire = wire
        self._writer, self._placing = self._open(peer, placing or {})
        self._digests = RegionDigests(wire)
        self.nbytes = 0

    @property
    def wire_error(self) -> float:
        """What conversion has lost, see ``convert.WirePacker.wire_error``."""
        return self._packer.wire_error

    def digests(self) -> list[int]:
        """For COMMIT; none if the asker does without."""
        return [] if self._request.is_unchecked else self._digests.values()

    async def send(
        self, layer: int, first_token: int, num_tokens: int, buffers: Sequence[memoryview]
    ) -> None:
        """Send some tokens of one layer; ``buffers`` as ``KvWriter.write`` takes them.

        They must not change until ``flush`` returns. Raises ConnectionLost, DeadlineExceeded, and
        ConversionError for a value that the wire's dtype cannot hold.
        """
        request = self._request
        is_last = first_token + num_tokens == len(request.tokens)
        if self._packer.is_needed:
            buffers = await asyncio.to_thread(
                self._packer.pack, layer, num_tokens, buffers, is_last=is_last
            )
        await self._writer.write(
            request.sequence_id,
            request.generation,
            layer,
            first_token,
            num_tokens,
            buffers,
            None if request.is_unchecked else self._digests,
        )
        self.nbytes += sum(buffer.nbytes for buffer in buffers)

    async def flush(self) -> None:
        """Return once no buffer is read any more. Raises ConnectionLost, DeadlineExceeded."""
        await self._writer.flush()

    def end(self) -> None:
        """Committed or given up: nothing more is written, see ``PlacingWriter.end``. Idempotent."""
        if self._placing is not None:
            self._placing.end(self._request.sequence_id, self._request.generation)

    def _open(
        self, peer: Link, placing: Mapping[str, PlacingWriter]
    ) -> tuple[KvWriter, PlacingWriter | None]:
        request = self._request
        if request.carrier in ("", "tcp"):
            return peer.writer(self._wire), None
        writer = placing.get(request.carrier)
        if writer is None:
            raise PromptRefused(
                ErrorCode.MALFORMED, f"carrier: {request.carrier!r} is not open between us"
            )
        if self._packer.is_needed:
            raise PromptRefused(
                ErrorCode.MALFORMED, f"carrier: converted KV does not travel by {request.carrier}"
            )
        try:
            writer.begin(
                request.sequence_id,
                request.generation,
                request.block_table,
                len(request.tokens),
                keys=request.keys,
                is_checked=not request.is_unchecked,
            )
        except KvProtoError as exc:
            raise PromptRefused(ErrorCode(exc.code), str(exc)) from exc
        return writer, writer
