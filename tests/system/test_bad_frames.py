"""Bad bytes at a worker's port: refused with the reason, and nobody else notices."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from kvproto.errors import ErrorCode, HandshakeRefused
from kvproto.frame import decode_frame, encode_frame
from kvproto.handshake import Identity, canary_bytes
from kvproto.header import HEADER_NBYTES, HOST_ORDER, Header, Kind
from kvproto.messages import encode_fields
from kvproto.tcp import connect
from tests.system.cluster import Cluster
from tests.system.completions import client_of, complete

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def cluster(
    tiny_model_dir: Callable[[str], Path], start_cluster: Callable[..., Cluster]
) -> Cluster:
    return start_cluster(tiny_model_dir("llama"))


def _hello() -> bytes:
    hello = Identity(role="client", instance_id="test").hello(bytes(32))
    fields = encode_fields(hello, HOST_ORDER)
    return b"".join(encode_frame(Kind.HELLO, fields, [canary_bytes()], order=HOST_ORDER))


def _with(raw: bytes, offset: int, value: int) -> bytes:
    return raw[:offset] + bytes([value]) + raw[offset + 1 :]


def _forty_byte_header() -> bytes:
    """The widened form seen in early notes: the same fields, eight more bytes."""
    raw = _hello()
    return raw[:HEADER_NBYTES] + bytes(8) + raw[HEADER_NBYTES:]


def _length_2_63() -> bytes:
    return Header(Kind.HELLO, 1 << 63, 0).encode()


_FRAMES: dict[str, tuple[Callable[[], bytes], ErrorCode | None]] = {
    "wrong magic": (lambda: _with(_hello(), 0, 0xDF), ErrorCode.BAD_MAGIC),
    "HTTP": (lambda: b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", ErrorCode.BAD_MAGIC),
    "wrong version": (lambda: _with(_hello(), 4, 9), ErrorCode.UNSUPPORTED_VERSION),
    "wrong byte order": (lambda: _with(_hello(), 5, 3), ErrorCode.BAD_BYTE_ORDER),
    # The first eight bytes too many read as a descriptor of length 0.
    "40-byte header": (_forty_byte_header, ErrorCode.MALFORMED),
    "flipped bit": (lambda: _with(_hello(), 100, _hello()[100] ^ 4), ErrorCode.CHECKSUM_MISMATCH),
    "flipped length": (lambda: _with(_hello(), 9, _hello()[9] ^ 1), ErrorCode.CHECKSUM_MISMATCH),
    "length 2^63": (_length_2_63, ErrorCode.PAYLOAD_TOO_LARGE),
    # The sender has hung up: there is nobody to tell, the connection just ends.
    "truncated": (lambda: _hello()[:-10], None),
}


async def _error_for(port: int, raw: bytes) -> int | None:
    """Send ``raw``, close our half, and return the code of the ERROR that comes back, if any."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(raw)
        writer.write_eof()
        async with asyncio.timeout(15):
            answer = await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()
    # Both sides speak at once: their HELLO, then the ERROR.
    codes = []
    while answer:
        header = Header.decode(answer[:HEADER_NBYTES], max_payload_nbytes=1 << 20)
        end = HEADER_NBYTES + header.payload_nbytes
        frame = decode_frame(answer[:end], max_payload_nbytes=1 << 20)
        answer = answer[end:]
        if frame.header.kind is Kind.ERROR:
            codes.append(int(frame.fields["code"]))
    assert len(codes) <= 1, codes
    return codes[0] if codes else None


@pytest.mark.parametrize("name", sorted(_FRAMES))
async def test_bad_frames_are_refused_by_every_service(cluster: Cluster, name: str) -> None:
    make, code = _FRAMES[name]
    ports = {worker["instance_id"]: worker for worker in cluster.health("router")["workers"]}
    for worker in ports.values():
        port = int(worker["address"].rpartition(":")[2])
        assert await _error_for(port, make()) == code, worker["instance_id"]
    assert await _error_for(cluster.control_port, make()) == code


@pytest.mark.parametrize("field", ["weights_digest", "num_layers", "dtype", "layout"])
async def test_another_model_is_refused_and_the_field_is_named(
    cluster: Cluster, field: str
) -> None:
    for worker in cluster.health("router")["workers"]:
        host, _, port = worker["address"].rpartition(":")
        other = 99 if field == "num_layers" else "another"
        identity = Identity(role="client", instance_id="test", facts={field: other})
        with pytest.raises(HandshakeRefused) as caught:
            await connect(host, int(port), identity=identity, timeout_s=10)
        assert caught.value.field == field


async def test_the_system_still_serves(cluster: Cluster) -> None:
    """Runs last in this file: after all of the above."""
    async with client_of(cluster) as client:
        output, timings = await complete(
            client, cluster.health("router")["model"], list(range(40)), 4
        )
    assert output
    assert timings["carrier"] == "mapped"
    await cluster.wait_idle()
