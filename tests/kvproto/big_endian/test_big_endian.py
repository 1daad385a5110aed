"""KV between this host and one of the other byte order: a real s390x Python, run by qemu.

Skipped where the rig is missing; the reason names the command that makes it.
"""

import asyncio
import json
import struct
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
import xxhash

from kvproto.carrier import Landing
from kvproto.errors import ErrorCode, KvProtoError
from kvproto.geometry import KvGeometry
from kvproto.handshake import Identity
from kvproto.messages import Commit, CommitAck, Prefill
from kvproto.tcp import Peer, serve
from tests.kvproto.big_endian import prompt
from tests.kvproto.big_endian.rig import Rig, RigUnusable, find_rig

try:
    RIG = find_rig()
except RigUnusable as reason:
    pytest.skip(str(reason), allow_module_level=True)

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

_TIMEOUT_S = 200.0
_FORMATS = {"float64": "d", "float32": "f", "float16": "H", "bfloat16": "H"}


@dataclass
class Meeting:
    """What both hosts saw; ``peer`` is what the other one printed."""

    peer: dict[str, Any] = field(default_factory=dict)
    receivers: dict[str, prompt.Receiver] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    acknowledged: set[str] = field(default_factory=set)


@pytest.fixture(scope="module")
def meeting() -> Meeting:
    """One process of the other host does everything: its start takes most of the time."""
    RIG.check()
    return asyncio.run(_meet(RIG))


async def _meet(rig: Rig) -> Meeting:
    meeting = Meeting()
    async with asyncio.timeout(_TIMEOUT_S), AsyncExitStack() as stack:
        ports: dict[str, Any] = {"push": {}, "pull": {}}
        for dtype in prompt.DTYPES:
            geometry = prompt.geometry_of(dtype)
            ports["push"][dtype] = await _receive(stack, meeting, dtype, geometry)
            ports["pull"][dtype] = await _send(stack, meeting, dtype, geometry)
        ports["lie"] = ports["pull"]["float32"]
        arguments = ["-m", "tests.kvproto.big_endian.peer", json.dumps(ports)]
        process = await asyncio.create_subprocess_exec(
            *rig.command(arguments),
            env=rig.environ(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            output, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, errors.decode()
        meeting.peer = json.loads(output)
    return meeting


async def _receive(
    stack: AsyncExitStack, meeting: Meeting, dtype: str, geometry: KvGeometry
) -> int:
    """Listen for a prefill worker; return the port."""
    receiver = meeting.receivers[dtype] = prompt.Receiver(geometry, writer="big")

    async def handle(peer: Peer) -> None:
        async for message in peer:
            if isinstance(message, Commit):
                meeting.commits[dtype] = message
                try:
                    receiver.leases.commit(message)
                except KvProtoError as exc:
                    meeting.refusals[dtype] = str(exc)
                    peer.abort("the test has failed")
                    return
                await peer.send(CommitAck(message.sequence_id, message.generation))

    return await _listen(stack, "decode", geometry, handle, receiver.leases)


async def _send(stack: AsyncExitStack, meeting: Meeting, dtype: str, geometry: KvGeometry) -> int:
    """Listen for a decode worker; return the port."""

    async def handle(peer: Peer) -> None:
        async for message in peer:
            if isinstance(message, Prefill):
                assert message == prompt.request()
                await prompt.send(peer, geometry)
            elif isinstance(message, CommitAck):
                meeting.acknowledged.add(dtype)

    return await _listen(stack, "prefill", geometry, handle, None)


async def _listen(
    stack: AsyncExitStack, role: str, geometry: KvGeometry, handle: Any, landing: Landing | None
) -> int:
    server = await serve(
        "127.0.0.1",
        0,
        identity=Identity(role, "little", geometry.facts(), prompt.SECRET),
        handler=handle,
        landing=landing,
        # The other host computes fifty times slower than it would in the flesh.
        handshake_timeout_s=60.0,
        keepalive_s=30.0,
    )
    stack.push_async_callback(server.close)
    return server.port


def test_the_other_host_is_big_endian(meeting: Meeting) -> None:
    assert sys.byteorder == "little", "this test needs a little-endian host"
    assert meeting.peer["byte_order"] == "big"


@pytest.mark.parametrize("dtype", prompt.DTYPES)
def test_its_numbers_arrive_in_our_memory(meeting: Meeting, dtype: str) -> None:
    assert meeting.peer["push"][dtype].get("is_acknowledged"), meeting.peer["push"][dtype]
    assert dtype not in meeting.refusals
    assert meeting.receivers[dtype].differences() == []


@pytest.mark.parametrize("dtype", prompt.DTYPES)
def test_our_numbers_arrive_in_its_memory(meeting: Meeting, dtype: str) -> None:
    assert meeting.peer["pull"][dtype] == {"differences": []}
    assert dtype in meeting.acknowledged


@pytest.mark.parametrize("dtype", sorted(_FORMATS))
def test_its_digests_are_of_its_own_byte_order(meeting: Meeting, dtype: str) -> None:
    """And the commit was accepted all the same: we digest what arrives, before it is swapped."""
    code = _FORMATS[dtype]
    expected = []
    for _, _, region, seeds in prompt.row_seeds(prompt.geometry_of(dtype)):
        count = region.num_heads * region.head_dim
        rows = [struct.pack(f">{count}{code}", *prompt.row_numbers(code, count, s)) for s in seeds]
        expected.append(xxhash.xxh3_64_intdigest(b"".join(rows)))
    assert meeting.commits[dtype].digests == expected


def test_a_host_that_announces_the_wrong_order_is_refused(meeting: Meeting) -> None:
    answer = meeting.peer["lie"]
    assert answer["code"] == ErrorCode.INCOMPATIBLE
    assert answer["field"] == "byte_order"
