"""The data plane as an interface: who may receive KV bytes, and who can send them.

One contract, several carriers: frames on TCP (``tcp.TcpWriter``), mapped memory, RDMA WRITE. The
receiver decides where bytes go (``Landing``), from logical coordinates only; no address ever
comes from a peer. The sender names layer and tokens (``KvWriter``) and never sees the receiver's
memory. Source: docs/wire.md section 6.
"""

from collections.abc import Sequence
from typing import Protocol

from kvproto.geometry import KvGeometry
from kvproto.messages import Write


class Landing(Protocol):
    """Where the bodies of WRITE go. Synchronous: called while bytes are being received.

    For each WRITE the connection calls ``destination`` once and then, if that returned, exactly
    one of ``landed`` and ``abandoned``.
    """

    @property
    def geometry(self) -> KvGeometry:
        """The geometry that both sides agreed on."""

    def destination(self, write: Write, body_nbytes: int, writer: str) -> list[memoryview]:
        """Writable memory for the body, K then V, in order; the sizes add up to ``body_nbytes``.

        ``writer`` is the instance id of the authenticated peer. Until ``landed`` or
        ``abandoned``, the memory is being written. LeaseError refuses the write; nothing is then
        written and neither of the two is called.
        """

    def landed(self, write: Write) -> None:
        """The whole body is in place, its payload check agreed, in this host's byte order."""

    def abandoned(self, write: Write) -> None:
        """The body will not be completed; nobody writes to the memory any more."""


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
    ) -> None:
        """Send K then V of ``num_tokens`` tokens of one layer.

        ``buffers`` are pieces of K in token order, then of V; together
        ``geometry.write_nbytes(num_tokens)`` bytes. They must not change until ``flush`` returns.
        Returns when more may be sent, not when the bytes have arrived: arrival is proven by
        COMMIT_ACK alone. Raises ConnectionLost.
        """

    async def flush(self) -> None:
        """Return once no buffer given to ``write`` is read any more. Raises ConnectionLost."""
