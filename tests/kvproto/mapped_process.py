"""A writer in a process of its own: ``python -m tests.kvproto.mapped_process PORT DIRECTORY MODE``.

once      answers each PREFILL (one token in PREFILL.tokens for each to write) and commits
endless   from the first PREFILL on it writes one byte value into its blocks for ever, as the
          worst writer would; it hears nothing, and ends only when it is killed
"""

import asyncio
import sys
from pathlib import Path

from kvproto.digest import RegionDigests
from kvproto.handshake import Identity
from kvproto.mapped import MappedWriter, answer_offer
from kvproto.messages import Offer, Prefill, Started
from kvproto.tcp import Peer, connect
from tests.kvproto.mapped_pair import GEOMETRY, LAYOUT, WAIT_S, Kv

STALE = 0xAA


async def main(port: int, directory: Path, mode: str) -> None:
    """Serve until the connection ends."""
    identity = Identity("prefill", "p", GEOMETRY.facts(), carriers=("mapped", "tcp"))
    peer = await connect("127.0.0.1", port, identity=identity, timeout_s=WAIT_S)
    mapped: MappedWriter | None = None
    async for message in peer:
        if isinstance(message, Offer):
            attachment = await answer_offer(peer, message, GEOMETRY, directory=directory)
            assert attachment is not None
            mapped = MappedWriter(peer, attachment)
        elif isinstance(message, Prefill):
            assert mapped is not None
            if mode == "endless":
                await peer.send(Started(message.sequence_id, message.generation, 0.0))
                await peer.flushed()
                scribble(attachment.region, message.block_table, len(message.tokens))
            await transfer(peer, mapped, message)
    if mapped is not None:
        await mapped.close()


def scribble(region, block_table, num_tokens) -> None:
    """Never returns."""
    pieces = [
        (offset, memoryview(bytearray([STALE]) * nbytes))
        for layer in range(GEOMETRY.num_layers)
        for spans in LAYOUT.pieces(layer, block_table, 0, num_tokens, is_last=True)
        for offset, nbytes in spans
    ]
    while True:
        for offset, piece in pieces:
            region.put(offset, piece)


async def transfer(peer: Peer, mapped: MappedWriter, message: Prefill) -> None:
    """Write and commit."""
    key = (message.sequence_id, message.generation)
    num_tokens = len(message.tokens)
    kv = Kv(GEOMETRY, num_tokens, seed=message.generation)
    mapped.begin(*key, message.block_table, num_tokens)
    digests = RegionDigests(GEOMETRY)
    for layer, first in enumerate(kv.first):
        count = num_tokens - first
        await mapped.write(*key, layer, first, count, kv.pieces(layer, first, count), digests)
    await mapped.flush()
    mapped.end(*key)
    await peer.send(kv.commit(*key))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
