"""The JavaScript client against real workers, and against big-endian ones."""

import asyncio
import json
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvproto.blocks import BlockPool
from kvproto.description import describe
from kvproto.digest import RegionDigests
from kvproto.geometry import KvGeometry, Layer, PoolLayout, Region
from kvproto.handshake import Identity
from kvproto.header import ByteOrder
from kvproto.lease import LeaseTable
from kvproto.messages import (
    Abort,
    Accepted,
    Commit,
    CommitAck,
    Describe,
    Finished,
    Generate,
    Prefill,
    Started,
    Tokens,
    Write,
)
from kvproto.tcp import Peer, TcpWriter, serve
from kvproto.tcp_server import Server
from tests.system.cluster import Cluster
from tests.system.completions import complete_all
from tests.tiny_models import EOS_TOKEN_ID

_SCRIPT = Path(__file__).parents[2] / "examples" / "prefill_and_decode.mjs"
_TIMEOUT_S = 50.0
# The shortest, beyond a block and the sliding window, and several steps of the prefill worker.
_LENGTHS = (2, 34, 400)
_MAX_TOKENS = 8
# For the big-endian workers.
_GEOMETRY = KvGeometry(
    (
        Layer("attention", (Region("k", 2, 8), Region("v", 2, 8))),
        Layer("window", (Region("k", 2, 8), Region("v", 2, 8)), window_tokens=20),
    ),
    "float32",
)
_OUTPUT = [5, 151643, 0xFFFFFFFF]


async def _run(node: str, *arguments: str) -> dict[str, Any]:
    """What the script prints; its complaint is the failure."""
    process = await asyncio.create_subprocess_exec(
        *(node, str(_SCRIPT), *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()
    result: dict[str, Any] = json.loads(output)
    return result


def _address(cluster: Cluster, role: str) -> str:
    [address] = [
        str(worker["address"])
        for worker in cluster.health("router")["workers"]
        if worker["instance_id"].startswith(role)
    ]
    return address


def _comma_separated(tokens: Sequence[int]) -> str:
    return ",".join(map(str, tokens))


@pytest.mark.system
@pytest.mark.timeout(180)
@pytest.mark.parametrize("family", ["gemma3", "llama"])
async def test_tokens_are_those_of_an_ordinary_request(
    node: str, family: str, tmp_path: Path, tiny_model_dir: Callable[[str], Path]
) -> None:
    secret_file = tmp_path / "secret"
    secret_file.touch(mode=0o600)
    secret_file.write_text("a secret that all processes share\n", encoding="utf-8")
    flags = ["--secret-file", str(secret_file)]
    cluster = Cluster(
        tmp_path,
        tiny_model_dir(family),
        worker_flags={"prefill": [*flags, "--max-step-tokens", "64"], "decode": flags},
        router_flags=flags,
    )
    rng = random.Random(family)
    prompts = [[rng.randrange(EOS_TOKEN_ID) for _ in range(length)] for length in _LENGTHS]
    try:
        cluster.start()
        answers = await complete_all(cluster, prompts, max_tokens=_MAX_TOKENS, num_in_flight=1)
        workers = [_address(cluster, role) for role in ("prefill", "decode")]
        for prompt, (expected, _) in zip(prompts, answers, strict=True):
            tokens = _comma_separated(prompt)
            answer = await _run(node, *workers, tokens, str(_MAX_TOKENS), str(secret_file))
            assert answer["tokens"] == expected, f"{len(prompt)} tokens"
            assert answer["timings"]["carrier"] == "tcp", f"{len(prompt)} tokens"
        await cluster.wait_idle()
    finally:
        cluster.stop()


class BigEndianPrefill:
    """A prefill worker that announces big-endian frames and sends big-endian numbers."""

    def __init__(self, geometry: KvGeometry = _GEOMETRY) -> None:
        self.geometry = geometry
        self.native = RegionDigests(self.geometry)
        self.is_acknowledged = asyncio.Event()
        self.is_aborted = asyncio.Event()
        self.wrong_digest = 0

    async def serve(self) -> Server:
        identity = Identity("prefill", "p", self.geometry.facts(), byte_order=ByteOrder.BIG)
        return await serve("127.0.0.1", 0, identity=identity, handler=self.handle)

    async def handle(self, peer: Peer) -> None:
        async for message in peer:
            match message:
                case Describe():
                    await peer.send(describe(self.geometry, model="m", max_model_len=1000))
                case Prefill():
                    await self._prefill(peer, message)
                case CommitAck():
                    self.is_acknowledged.set()
                case Abort():
                    self.is_aborted.set()

    async def _prefill(self, peer: Peer, prompt: Prefill) -> None:
        key, num_tokens = (prompt.sequence_id, prompt.generation), len(prompt.tokens)
        writer, sent = TcpWriter(peer, self.geometry), RegionDigests(self.geometry)
        await peer.send(Started(*key, queue_s=0.0))
        for index, layer in enumerate(self.geometry.layers):
            for first in range(layer.first_needed_token(num_tokens), num_tokens, 64):
                count = min(64, num_tokens - first)
                is_last = first + count == num_tokens
                pieces = []
                sizes = self.geometry.region_nbytes(index, count, is_last=is_last)
                for region, nbytes in enumerate(sizes):
                    numbers = [first * 1000 + region + i / 4 for i in range(nbytes // 4)]
                    pieces.append(memoryview(struct.pack(f">{len(numbers)}f", *numbers)))
                    sent.update(index, region, pieces[-1])
                    native = struct.pack(f"={len(numbers)}f", *numbers)
                    self.native.update(index, region, native)
                await writer.write(*key, index, first, count, pieces)
        nbytes = self.geometry.prompt_nbytes(num_tokens)
        digests = sent.values()
        digests[-1] ^= self.wrong_digest
        await peer.send(Commit(*key, num_tokens, nbytes, digests, 0.0, 0.0, 0.0))


class BigEndianDecode:
    """A decode worker that announces big-endian frames and takes payloads of 16 KiB at most."""

    def __init__(self) -> None:
        layout = PoolLayout(_GEOMETRY, 64, 4)
        self.blocks = BlockPool(64)
        self.leases = LeaseTable(layout, memoryview(bytearray(layout.nbytes)), self.blocks)
        self.digests: list[int] = []
        self.num_writes = 0

    async def serve(self) -> Server:
        identity = Identity(
            *("decode", "d", _GEOMETRY.facts()),
            byte_order=ByteOrder.BIG,
            max_payload_nbytes=1 << 14,
        )
        return await serve(
            "127.0.0.1", 0, identity=identity, handler=self.handle, landing=self.leases
        )

    async def handle(self, peer: Peer) -> None:
        async for message in peer:
            match message:
                case Generate(sequence_id, tokens):
                    assert message.kv_from_sender
                    await peer.send(Accepted(sequence_id))
                    needed = tokens[:-1]
                    table = self.blocks.allocate(sequence_id, -(-len(needed) // 4))
                    self.leases.grant(sequence_id, 7, table, len(needed))
                    await peer.send(Prefill(sequence_id, 7, needed, 5.0))
                case Write():
                    self.num_writes += 1
                case Commit(sequence_id, generation):
                    self.leases.commit(message)
                    self.digests = message.digests
                    await peer.send(CommitAck(sequence_id, generation))
                    await peer.send(Tokens(sequence_id, 0, _OUTPUT))
                    await peer.send(Finished(sequence_id, "length"))


async def test_numbers_of_big_endian_workers_end_up_in_this_hosts_order(node: str) -> None:
    prefill, decode = BigEndianPrefill(), BigEndianDecode()
    servers = [await prefill.serve(), await decode.serve()]
    try:
        addresses = [f"127.0.0.1:{server.port}" for server in servers]
        answer = await _run(node, *addresses, _comma_separated(range(201)))
        async with asyncio.timeout(10):
            await prefill.is_acknowledged.wait()
    finally:
        for server in servers:
            await server.close()
    assert answer["tokens"] == _OUTPUT
    assert decode.digests == prefill.native.values()
    # 200 tokens of 128 bytes, then the window of 20: more than one WRITE fits 16 KiB.
    assert decode.num_writes == 4


async def _refusal(node: str, prefill: BigEndianPrefill) -> str:
    """What the script says of a prefill worker; it never gets as far as decode."""
    server = await prefill.serve()
    try:
        with pytest.raises(AssertionError) as caught:
            await _run(node, f"127.0.0.1:{server.port}", "127.0.0.1:1", _comma_separated(range(99)))
        if prefill.wrong_digest:
            async with asyncio.timeout(10):
                await prefill.is_aborted.wait()
    finally:
        await server.close()
    assert not prefill.is_acknowledged.is_set()
    return str(caught.value)


async def test_wrong_digests_are_refused_in_words(node: str) -> None:
    prefill = BigEndianPrefill()
    prefill.wrong_digest = 1
    assert "other digests" in await _refusal(node, prefill)


async def test_a_state_per_sequence_is_refused_in_words(node: str) -> None:
    layer = Layer("mamba", (Region("state", 3, 8, "sequence"),))
    prefill = BigEndianPrefill(KvGeometry((layer,), "float32"))
    assert "mamba: no room for float32 per sequence" in await _refusal(node, prefill)


async def test_a_stream_that_ends_inside_a_frame_is_an_error(node: str) -> None:
    async def end_early(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\xde\xad\xbe")
        writer.close()

    server = await asyncio.start_server(end_early, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(AssertionError, match=f"127.0.0.1:{port} ended the connection"):
            await _run(node, f"127.0.0.1:{port}", "127.0.0.1:1", "1,2,3")
