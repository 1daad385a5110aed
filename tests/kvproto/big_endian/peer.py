"""What the big-endian host does: dials the test, once for each task, and prints what happened."""

import asyncio
import json
import sys
from typing import Any

from kvproto.errors import KvProtoError
from kvproto.frame import decode_frame, encode_frame
from kvproto.handshake import Identity, canary_bytes
from kvproto.header import HEADER_NBYTES, ByteOrder, Header, Kind
from kvproto.messages import Commit, CommitAck, Write, encode_fields
from kvproto.tcp import Peer, connect
from tests.kvproto.big_endian import prompt

TIMEOUT_S = 60.0


async def push(dtype: str, port: int) -> dict[str, Any]:
    """Write our numbers into the memory of the test."""
    geometry = prompt.geometry_of(dtype)
    identity = Identity("prefill", "big", geometry.facts(), prompt.SECRET)
    peer = await connect("127.0.0.1", port, identity=identity, timeout_s=TIMEOUT_S)
    await prompt.send(peer, geometry)
    answer = await peer.receive()
    await peer.close()
    return {"is_acknowledged": isinstance(answer, CommitAck), "answer": repr(answer)}


async def pull(dtype: str, port: int) -> dict[str, Any]:
    """Have the numbers of the test written into our memory, and look at them."""
    geometry = prompt.geometry_of(dtype)
    receiver = prompt.Receiver(geometry, writer="little")
    identity = Identity("decode", "big", geometry.facts(), prompt.SECRET)
    peer = await connect(
        "127.0.0.1", port, identity=identity, landing=receiver.leases, timeout_s=TIMEOUT_S
    )
    await peer.send(prompt.request())
    receiver.leases.commit(await _receive_commit(peer))
    await peer.send(CommitAck(prompt.SEQUENCE_ID, prompt.GENERATION))
    await peer.close()
    return {"differences": receiver.differences()}


async def lie(port: int) -> dict[str, Any]:
    """Announce little-endian frames, with memory that is not; return the ERROR that comes back."""
    hello = Identity("prefill", "big").hello(b"n" * 32)
    fields = encode_fields(hello, ByteOrder.LITTLE)
    frame = encode_frame(Kind.HELLO, fields, [canary_bytes()], order=ByteOrder.LITTLE)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.writelines(frame)
    writer.write_eof()
    rest = await reader.read()
    writer.close()
    while rest:
        header = Header.decode(rest[:HEADER_NBYTES], max_payload_nbytes=1 << 20)
        end = HEADER_NBYTES + header.payload_nbytes
        answer = decode_frame(rest[:end], max_payload_nbytes=1 << 20)
        if header.kind is Kind.ERROR:
            return answer.fields
        rest = rest[end:]
    return {}


async def _receive_commit(peer: Peer) -> Commit:
    while True:
        message = await peer.receive()
        if isinstance(message, Commit):
            return message
        assert isinstance(message, Write), f"{message} instead of WRITE or COMMIT"


async def main() -> None:
    """``{"push": {dtype: port}, "pull": {dtype: port}, "lie": port}`` on the command line."""
    ports = json.loads(sys.argv[1])
    results: dict[str, Any] = {"byte_order": sys.byteorder, "push": {}, "pull": {}}
    async with asyncio.timeout(3 * TIMEOUT_S):
        for name, task in (("push", push), ("pull", pull)):
            for dtype, port in ports[name].items():
                try:
                    results[name][dtype] = await task(dtype, port)
                except KvProtoError as exc:
                    results[name][dtype] = {"error": str(exc)}
        results["lie"] = await lie(ports["lie"])
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    asyncio.run(main())
