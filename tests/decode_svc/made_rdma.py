"""A carrier that writes into a decode worker's pool as RDMA does, made of one process's memory.

It has keys and can be cut, so that a decode worker is tested with both where no device is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvproto.digest import RegionDigests
from kvproto.errors import CarrierLost, CarrierUnavailable
from kvproto.geometry import PoolLayout
from kvproto.messages import Placed, Prefill, Probe
from kvproto.placement import Placements
from kvproto.tcp_link import Link

CARRIER = "rdma"


class MadeAttachment:
    """One writer's hold. Implements ``carrier.Attachment``."""

    def __init__(self, host: "MadeHost", writer: str) -> None:
        self.writer = writer
        self.is_gone = False
        self._host = host

    async def wait_gone(self) -> None:
        """It is gone when it is cut, which never takes time."""
        assert self.is_gone

    def cut(self) -> None:
        """Nothing is written any more."""
        self.is_gone = True
        self._host.open_keys.clear()

    async def open_keys(self) -> list[int]:
        """One new key."""
        if self._host.num_keys_left == 0:
            raise CarrierLost("the device is gone")
        self._host.num_keys_left -= 1
        self._host.last_key += 1
        self._host.open_keys.add(self._host.last_key)
        return [self._host.last_key]

    def close_keys(self, keys: list[int]) -> None:
        """They open nothing any more."""
        self._host.open_keys.difference_update(keys)


@dataclass
class MadeHost:
    """The owner's side. Implements ``carrier.CarrierHost``.

    ``max_attached``: later writers are refused. ``num_keys_left``: then the device is gone.
    """

    layout: PoolLayout
    pool: memoryview
    max_attached: int = 1000
    num_keys_left: int = 1000
    carrier: str = CARRIER
    attachments: list[MadeAttachment] = field(default_factory=list)
    open_keys: set[int] = field(default_factory=set)
    last_key: int = 0

    async def attach(self, peer: Any, *, timeout_s: float = 5.0) -> MadeAttachment:
        """No words are needed: it is one process."""
        if len(self.attachments) >= self.max_attached:
            raise CarrierUnavailable("the link is down")
        self.attachments.append(MadeAttachment(self, peer.remote.instance_id))
        return self.attachments[-1]

    def attached(self, peer: Any, message: object) -> None:
        """Nobody sends it."""


class MadeWriter:
    """The writer's side: copies into the pool, if it has a key, and says PLACED."""

    def __init__(self, host: MadeHost, peer: Link, request: Prefill | Probe) -> None:
        self._host, self._peer = host, peer
        self._placements = Placements(host.layout)
        num_tokens = request.num_tokens if isinstance(request, Probe) else len(request.tokens)
        self._keys = request.keys
        self._placements.begin(
            request.sequence_id, request.generation, request.block_table, num_tokens
        )

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
        """See ``KvWriter.write``."""
        if not self._keys or not self._host.open_keys.issuperset(self._keys):
            raise CarrierLost(f"the keys {self._keys} open nothing")
        transfer = self._placements.advance(
            sequence_id, generation, layer, first_token, num_tokens, buffers
        )
        name = self._host.layout.geometry.layers[layer].name
        for first, count, pieces in self._placements.parts(
            transfer, layer, first_token, num_tokens, buffers
        ):
            for piece in pieces:
                end = piece.offset + piece.source.nbytes
                self._host.pool[piece.offset : end] = piece.source
            await self._peer.send(Placed(sequence_id, generation, name, first, count))

    async def flush(self) -> None:
        """Everything was copied at once."""
