"""The form in which a prompt's KV leaves, and what it adds up to."""

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvproto.digest import RegionDigests
from kvproto.errors import ConversionError, ErrorCode, LeaseError
from kvproto.geometry import KvGeometry
from kvproto.messages import Prefill
from kvproto.tcp_link import Link
from prefill_svc.errors import PromptRefused
from prefill_svc.transfer import Transfer

_GEOMETRY = KvGeometry.uniform(2, 2, 2, "float32", ("a", "b"))
_TOKENS = [1, 2, 3]


class _Writer:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written: list[tuple[Any, ...]] = []

    async def write(self, *args: Any) -> None:
        *coordinates, buffers, digests = args
        self.written.append((*coordinates, b"".join(buffers)))
        if digests is not None:
            layer, half = coordinates[2], len(self.written[-1][-1]) // 2
            digests.update(layer, 0, self.written[-1][-1][:half])
            digests.update(layer, 1, self.written[-1][-1][half:])

    async def flush(self) -> None:
        pass


@pytest.fixture
def writer() -> _Writer:
    """What is sent by TCP ends up here."""
    return _Writer()


def _open(
    asker_dtype: str = "",
    placing: dict[str, Any] | None = None,
    writer: _Writer | None = None,
    **options: Any,
) -> Transfer:
    request = Prefill("s", 7, tokens=_TOKENS, timeout_s=1.0, **options)
    facts = {"dtype": asker_dtype} if asker_dtype else {}
    peer = SimpleNamespace(remote=SimpleNamespace(facts=facts), writer=lambda _: writer)
    return Transfer(request, _GEOMETRY, cast("Link", peer), placing)


def _floats(values: Sequence[float]) -> memoryview:
    return memoryview(array("f", values)).cast("B")


async def test_bytes_leave_as_they_lie_and_are_counted_by_region(writer: _Writer) -> None:
    transfer = _open(writer=writer)
    key, value = _floats(range(8)), _floats(range(8, 16))
    await transfer.send(1, 0, 2, [key[:16], key[16:], value])
    assert writer.written == [("s", 7, 1, 0, 2, bytes(key) + bytes(value))]
    expected = RegionDigests(_GEOMETRY)
    expected.update(1, 0, key)
    expected.update(1, 1, value)
    assert transfer.digests() == expected.values()
    assert transfer.nbytes == 64
    assert transfer.wire_error == 0.0


@pytest.mark.parametrize(("asked", "facts"), [("float16", ""), ("", "float16")])
async def test_another_dtype_is_converted_and_digested_as_it_travels(
    writer: _Writer, asked: str, facts: str
) -> None:
    transfer = _open(facts, writer=writer, dtype=asked)
    await transfer.send(0, 0, 1, [_floats([1.0, 0.1, 2.0, 4.0]), _floats([0.0] * 4)])
    [(*_, body)] = writer.written
    assert body == bytes.fromhex("003c662e00400044") + bytes(8)
    expected = RegionDigests(_GEOMETRY.as_wire("float16"))
    expected.update(0, 0, body[:8])
    expected.update(0, 1, body[8:])
    assert transfer.digests() == expected.values()
    assert 0 < transfer.wire_error < 1e-4


async def test_some_of_the_heads(writer: _Writer) -> None:
    transfer = _open(writer=writer, first_head=1, num_heads=1)
    await transfer.send(0, 0, 2, [_floats(range(8)), _floats(range(8, 16))])
    [(*_, body)] = writer.written
    assert array("f", body).tolist() == [2, 3, 6, 7, 10, 11, 14, 15]


async def test_an_asker_may_do_without_digests(writer: _Writer) -> None:
    transfer = _open(writer=writer, is_unchecked=True)
    await transfer.send(0, 0, 1, [_floats([1.0] * 4), _floats([1.0] * 4)])
    assert transfer.digests() == []
    assert transfer.nbytes == 32


async def test_a_value_that_the_wire_cannot_hold_is_told(writer: _Writer) -> None:
    transfer = _open(writer=writer, dtype="float16")
    with pytest.raises(ConversionError):
        await transfer.send(0, 0, 1, [_floats([1e30] * 4), _floats([1.0] * 4)])


@pytest.mark.parametrize(
    "options", [{"dtype": "float3"}, {"num_heads": 3}, {"first_head": 1, "num_heads": 2}]
)
def test_a_form_that_cannot_be_made_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(PromptRefused) as caught:
        _open(**options)
    assert caught.value.code == ErrorCode.MALFORMED


def test_a_carrier_that_is_not_open_is_refused() -> None:
    with pytest.raises(PromptRefused, match="'pigeon' is not open") as caught:
        _open(carrier="pigeon")
    assert caught.value.code == ErrorCode.MALFORMED
    with pytest.raises(PromptRefused, match="'mapped' is not open"):
        _open(carrier="mapped")


class _Placing:
    """Stands for a writer into the asker's memory: remembers what was begun and ended."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def begin(self, *args: Any, **options: Any) -> None:
        if args[2] == [99]:
            raise LeaseError("no such block", sequence_id="s")
        self.calls.append(("begin", args, options))

    def end(self, *args: Any) -> None:
        self.calls.append(("end", args))


@pytest.mark.parametrize("carrier", ["mapped", "rdma"])
def test_the_carrier_is_begun_with_the_blocks_and_keys_of_the_request_and_ended(
    carrier: str,
) -> None:
    mapped, rdma = _Placing(), _Placing()
    placing = {"mapped": mapped, "rdma": rdma}
    transfer = _open(placing=placing, carrier=carrier, block_table=[4, 2], keys=[7])
    transfer.end()
    assert placing.pop(carrier).calls == [
        ("begin", ("s", 7, [4, 2], 3), {"keys": [7], "is_checked": True}),
        ("end", ("s", 7)),
    ]
    [other] = placing.values()
    assert other.calls == []


@pytest.mark.parametrize(
    ("options", "code"),
    [({"block_table": [99]}, ErrorCode.LEASE), ({"dtype": "float16"}, ErrorCode.MALFORMED)],
)
def test_memory_that_cannot_be_written_is_refused(options: Any, code: ErrorCode) -> None:
    with pytest.raises(PromptRefused) as caught:
        _open(placing={"rdma": _Placing()}, carrier="rdma", **options)
    assert caught.value.code == code
