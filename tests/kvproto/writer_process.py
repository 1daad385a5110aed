"""A writer in a process of its own, for ``carrier_contract.CarrierRig.spawn_writer``.

It writes one byte value into its grant, layer after layer, again and again, and reads no answer:
the worst writer that still speaks the protocol. It ends when its connection does.
"""

import asyncio
import json
import sys
from typing import Any

from kvproto.errors import ConnectionLost
from kvproto.tcp import TcpWriter
from tests.kvproto.carrier_contract import LARGE, Kv, tcp_writer_connection


async def main(plan: dict[str, Any]) -> None:
    """Write until the connection ends."""
    assert plan["carrier"] == "tcp"
    peer = await tcp_writer_connection(plan["port"], plan["writer"], LARGE, keepalive_s=5.0)
    writer = TcpWriter(peer, LARGE)
    num_tokens = plan["num_tokens"]
    kv = Kv(LARGE, num_tokens, value=plan["value"])
    try:
        while True:
            for layer in range(LARGE.num_layers):
                pieces = kv.pieces(layer, 0, num_tokens)
                await writer.write(
                    plan["sequence_id"], plan["generation"], layer, 0, num_tokens, pieces
                )
                await writer.flush()
                await asyncio.sleep(0)  # neither of the two need wait for anything
    except ConnectionLost:
        pass


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
