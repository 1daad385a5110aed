"""The data plane as an interface: who may receive KV bytes, and who can send them.

One contract, several carriers: frames on TCP (``tcp.TcpWriter``), mapped memory, RDMA WRITE. The
receiver decides where bytes go (``Landing``), from logical coordinates only; no address ever
comes from a peer. The sender names layer and tokens (``KvWriter``) and never sees the receiver's
memory, unless a carrier has attached it to the region that the receiver offered.
Source: docs/wire.md section 6.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from kvproto.digest import RegionDigests
from kvproto.geometry import KvGeometry, Region
from kvproto.header import ByteOrder
from kvproto.messages import Attached, Placed, Write


class Landing(Protocol):
    """Where KV goes. Synchronous: called while bytes are being received.

    For each WRITE the connection calls ``destination`` once and then, if that returned,
    ``received`` for each piece and exactly one of ``landed`` and ``abandoned``.
    """

    @property
    def geometry(self) -> KvGeometry:
        """The geometry that both sides agreed on."""

    def destination(
        self, write: Write, body_nbytes: int, shape_word: int, writer: str
    ) -> list[memoryview]:
        """Writable memory for the body, in order; the sizes add up to ``body_nbytes``.

        ``writer`` is the instance id of the authenticated peer. Until ``landed`` or
        ``abandoned``, the memory is being written. LeaseError refuses the write; nothing is then
        written and none of the others is called. Malformed: another shape word than the write's.
        """

    def received(self, write: Write, piece: memoryview) -> None:
        """The next bytes of the body as they arrived, in the sender's byte order."""

    def landed(self, write: Write, order: ByteOrder) -> None:
        """The whole body is in place, in the sender's ``order``; the frame's checks agreed."""

    def abandoned(self, write: Write) -> None:
        """The body will not be completed; nobody writes to the memory any more."""

    def placed(self, placed: Placed, writer: str) -> None:
        """A carrier has put these tokens where they belong. LeaseError refuses to count them."""


class Converter(Protocol):
    """Turns rows as they travel into rows as the pool holds them; see ``convert.RowConverter``."""

    def unpack(
        self,
        wire: memoryview,
        wire_region: Region,
        wire_dtype: str,
        pool: Sequence[memoryview],
        pool_region: Region,
        pool_dtype: str,
        first_head: int,
    ) -> None:
        """Write the rows of ``wire`` into heads ``first_head ..`` of the rows of ``pool``."""


class KvWriter(Protocol):
    """Sends the KV of one sequence into a peer's leased blocks."""

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
        """Send ``num_tokens`` tokens of one layer.

        ``buffers`` are pieces of the layer's first region in token order, then of its second, and
        so on: ``geometry.write_nbytes`` bytes. They must not change until ``flush`` returns.
        ``digests``, if given, takes the bytes as well, while they are in the cache anyway.
        Returns when more may be sent, not when the bytes have arrived: arrival is proven by
        COMMIT_ACK alone. Raises ConnectionLost.
        """

    async def flush(self) -> None:
        """Return once no buffer given to ``write`` is read any more. Raises ConnectionLost."""


class PlacingWriter(KvWriter, Protocol):
    """A writer that puts the bytes into the receiver's memory itself, and then says PLACED."""

    def begin(
        self,
        sequence_id: str,
        generation: int,
        block_table: Sequence[int],
        num_tokens: int,
        *,
        keys: Sequence[int] = (),
        is_checked: bool = True,
    ) -> None:
        """PREFILL or PROBE came: these are its blocks, for tokens ``0 .. num_tokens - 1``.

        ``keys``: of the message, for a carrier that has keys. ``is_checked``: COMMIT will have
        digests, so the receiver is to digest meanwhile.

        LeaseError, in this order: the transfer exists; no tokens, or too few blocks for them; a
        block that the pool does not have, or one twice.
        """

    def end(self, sequence_id: str, generation: int) -> None:
        """The transfer was committed or aborted: nothing more of it is written. Idempotent.

        What is under way may go on; once ``flush`` has returned it has ended.
        """

    async def close(self) -> None:
        """End every transfer and let go of the receiver's memory. Idempotent."""


class Attachment(Protocol):
    """One writer's hold on our memory, as the owner sees it.

    Attributes:
        writer: instance id of the writer, as it authenticated on TCP.
    """

    writer: str

    @property
    def is_gone(self) -> bool:
        """The writer can write no more."""

    async def wait_gone(self) -> None:
        """Until ``is_gone``. A deadline is the caller's."""

    def cut(self) -> None:
        """Take the hold away at once if this side can; ``is_gone`` then. Idempotent."""

    async def open_keys(self) -> list[int]:
        """Keys that open our memory to the writer for one lease; none if the carrier has none.

        Raises CarrierLost.
        """

    def close_keys(self, keys: list[int]) -> None:
        """They open nothing any more when this returns. Call it once the writer is done."""


class CarrierHost(Protocol):
    """Offers our memory to writers over one carrier.

    Attributes:
        carrier: "mapped", "rdma".
    """

    carrier: str

    @property
    def has_lease_keys(self) -> bool:
        """A writer reaches our memory only with keys, each good for one lease alone."""

    async def attach(self, peer: Any, *, timeout_s: float = ...) -> Attachment:
        """Offer the memory to ``peer``, a ``tcp_peer.Peer``; return once it can write.

        Whoever reads from ``peer`` must pass its ATTACHED to ``attached``. CarrierUnavailable says
        why not; ConnectionLost.
        """

    def attached(self, peer: Any, message: Attached) -> None:
        """ATTACHED came from ``peer``. An answer to no offer, or to one of another, is ignored."""
