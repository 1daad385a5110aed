"""Limits and addresses of memory, before any device is asked."""

import ctypes
import mmap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvproto.errors import CarrierUnavailable
from kvproto.rdma import memory
from kvproto.rdma.constants import Access
from kvproto.rdma.memory import RegisteredMemory, Staging, address_of, check_memlock

_IPC_LOCK = "0000000000004000"
_NOT_IPC_LOCK = "000001ffffffbfff"


class VerbsError(Exception):
    """As pyverbs raises it."""


class FakeDevice:
    """A device that registers anything, or refuses."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.pd = object()
        self.children: list[object] = []
        self.events: list[str] = []
        self._refuses = refuses
        self.verbs = SimpleNamespace(error=VerbsError, mr=self._register)

    def _register(self, _pd: object, nbytes: int, access: int, *, address: int) -> object:
        if self._refuses:
            raise VerbsError("Failed to register a MR.")
        self.events.append(f"register {nbytes} access {access}")
        return SimpleNamespace(
            lkey=1, rkey=2, address=address, close=lambda: self.events.append("unregister")
        )

    def adopt(self, child: object) -> None:
        self.children.append(child)

    def disown(self, child: object) -> None:
        self.children.remove(child)


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int | str, str], None]:
    """Set the memlock limit and the capabilities that this process sees."""

    def set_both(soft: int | str, capabilities: str) -> None:
        status = tmp_path / "status"
        status.write_text(f"Name:\tpython\nCapEff:\t{capabilities}\n", encoding="ascii")
        monkeypatch.setattr(memory, "_STATUS", status)
        limits = tmp_path / "limits"
        limits.write_text(
            "Limit                     Soft Limit           Hard Limit           Units     \n"
            "Max processes             127263               127263               processes \n"
            f"Max locked memory         {soft:<20} unlimited            bytes     \n",
            encoding="ascii",
        )
        monkeypatch.setattr(memory, "_LIMITS", limits)

    return set_both


@pytest.mark.parametrize(
    ("soft", "capabilities"),
    [("unlimited", _NOT_IPC_LOCK), (4096, _NOT_IPC_LOCK), (100, _IPC_LOCK)],
)
def test_memory_within_the_limit_or_with_the_capability(
    limit: Callable[[int | str, str], None], soft: int | str, capabilities: str
) -> None:
    limit(soft, capabilities)
    check_memlock(4096, "the KV pool")


def test_too_much_memory_is_one_sentence_with_what_to_do(
    limit: Callable[[int | str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(4095, _NOT_IPC_LOCK)
    expected = (
        "registering the KV pool pins 4096 bytes, the memlock limit of this process is 4095: set "
        "LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited; pdctl node check (check rdma) "
        "looks into it"
    )
    with pytest.raises(CarrierUnavailable) as excinfo:
        check_memlock(4096, "the KV pool")
    assert str(excinfo.value) == expected
    # What cannot be read is no capability.
    for status in (tmp_path / "nothing here", tmp_path / "empty"):
        (tmp_path / "empty").write_text("Name:\tpython\n", encoding="ascii")
        monkeypatch.setattr(memory, "_STATUS", status)
        with pytest.raises(CarrierUnavailable, match="memlock limit"):
            check_memlock(4096, "the KV pool")


@pytest.mark.parametrize("content", [None, "", "Max processes 1 1 processes\n"])
def test_a_limit_that_cannot_be_told_stops_nobody(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = tmp_path / "limits"
    if content is not None:
        limits.write_text(content, encoding="ascii")
    monkeypatch.setattr(memory, "_LIMITS", limits)
    check_memlock(1 << 50, "the KV pool")


def test_the_address_is_where_the_bytes_are() -> None:
    raw = bytearray(b"0123456789")
    view = memoryview(raw)
    assert ctypes.string_at(address_of(view), 10) == b"0123456789"
    assert address_of(view[3:]) == address_of(view) + 3
    with mmap.mmap(-1, 4096) as mapping, memoryview(mapping) as mapped:
        assert address_of(mapped) % mmap.PAGESIZE == 0
        mapping[5] = 7
        assert ctypes.string_at(address_of(mapped) + 5, 1) == b"\x07"


def test_memory_that_a_device_cannot_use_has_no_address() -> None:
    assert address_of(memoryview(b"constant")) == 0
    assert address_of(memoryview(bytearray(8))[::2]) == 0
    assert address_of(memoryview(bytearray())) == 0


def test_a_piece_of_memory_is_registered_and_given_back_once() -> None:
    device, view = FakeDevice(), memoryview(bytearray(64))
    registered = RegisteredMemory(cast("Any", device), view, Access.REMOTE_WRITE, "the KV pool")
    assert device.children == [registered]
    assert (registered.address, registered.nbytes) == (address_of(view), 64)
    assert (registered.lkey, registered.rkey) == (1, 2)
    assert registered.elapsed_s >= 0
    first = registered.address
    assert registered.holds(first, 64)
    assert registered.holds(first + 63, 1)
    assert not registered.holds(first - 1, 2)
    assert not registered.holds(first + 63, 2)
    registered.close()
    registered.close()
    assert device.events == ["register 64 access 2", "unregister"]
    assert device.children == []


@pytest.mark.parametrize("view", [memoryview(b"constant"), memoryview(bytearray(8))[::2]])
def test_memory_without_an_address_is_not_registered(view: memoryview) -> None:
    device = FakeDevice()
    with pytest.raises(CarrierUnavailable, match="the KV pool is not writable memory in one piece"):
        RegisteredMemory(cast("Any", device), view, Access(0), "the KV pool")
    assert device.events == []


def test_the_limit_is_checked_before_the_device_is_asked(
    limit: Callable[[int | str, str], None],
) -> None:
    limit(63, _NOT_IPC_LOCK)
    device = FakeDevice()
    with pytest.raises(CarrierUnavailable, match="memlock limit"):
        RegisteredMemory(cast("Any", device), memoryview(bytearray(64)), Access(0), "the KV pool")
    assert device.events == []


def test_a_device_that_refuses_is_one_sentence() -> None:
    device = FakeDevice(refuses=True)
    view = memoryview(bytearray(64))
    with pytest.raises(CarrierUnavailable, match="cannot register the KV pool of 64 bytes"):
        RegisteredMemory(cast("Any", device), view, Access(0), "the KV pool")
    assert device.children == []
    with pytest.raises(CarrierUnavailable, match="cannot register the staging memory"):
        Staging(cast("Any", device), 4096)


def test_staging_memory_is_a_ring() -> None:
    device = FakeDevice()
    staging = Staging(cast("Any", device), 4096)
    start = staging.memory.address

    def put(source: bytes) -> list[tuple[int, int]]:
        pieces = list(staging.put(memoryview(source)))
        assert b"".join(ctypes.string_at(*piece) for piece in pieces) == source
        return pieces

    assert put(b"a" * 4000) == [(start, 4000)]
    assert (staging.free_nbytes, staging.position) == (96, 4000)
    staging.release(1000)
    staging.release(500)  # the oldest first: nothing is taken back twice
    assert staging.free_nbytes == 1096
    # Around the end: two pieces, and what is not released stays.
    assert put(b"bc" * 500) == [(start + 4000, 96), (start, 904)]
    assert ctypes.string_at(start + 1000, 3000) == b"a" * 3000
    assert (staging.free_nbytes, staging.position) == (96, 5000)
    assert put(b"") == []
    staging.release(staging.position)
    assert staging.free_nbytes == 4096
    staging.close()
    assert device.events == ["register 4096 access 1", "unregister"]
