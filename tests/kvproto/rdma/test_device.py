"""What is said before a device is opened, and what a device does with made verbs."""

import asyncio
import ipaddress
import os
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvproto.errors import CarrierUnavailable
from kvproto.rdma import device as device_module
from kvproto.rdma.constants import DEVICE_MEM_WINDOW_TYPE_2B, EventType
from kvproto.rdma.device import Device, check_is_roce, open_device
from kvproto.rdma.ports import ROCE_V2, ChosenPort, Gid, Port
from kvproto.rdma.settings import RdmaSettings


class VerbsError(Exception):
    """As pyverbs raises it."""


def port(name: str, *gids: Gid) -> Port:
    return Port(name, 1, "ACTIVE", "Ethernet", 0, gids)


def gid(text: str, index: int = 0, kind: str = ROCE_V2) -> Gid:
    return Gid(index, ipaddress.IPv6Address(text), kind, "eth0")


A = port("a", gid("::ffff:10.0.0.1"), gid("fe80::1", 1, "IB/RoCE v1"))
B = port("b", gid("::ffff:10.0.0.2"), gid("2001:db8::2", 1))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[ChosenPort]:
    """Ports a and b are there; what would be opened is kept here."""
    chosen: list[ChosenPort] = []
    monkeypatch.setattr(device_module, "read_ports", lambda: (A, B))
    monkeypatch.setattr(device_module, "load", lambda: None)
    monkeypatch.setattr(Device, "open", lambda _verbs, port, _settings: chosen.append(port))
    return chosen


@pytest.mark.parametrize(
    ("listen_host", "name", "index"),
    [
        ("10.0.0.2", "b", 0),
        ("2001:db8::2", "b", 1),
        ("10.0.0.9", "a", 0),
        # Every address, this host alone, a name: they say nothing about a port.
        ("0.0.0.0", "a", 0),
        ("::", "a", 0),
        ("127.0.0.1", "a", 0),
        ("decode.example", "a", 0),
        ("", "a", 0),
    ],
)
def test_the_port_that_this_process_listens_on_is_taken(
    opened: list[ChosenPort], listen_host: str, name: str, index: int
) -> None:
    open_device(RdmaSettings(), listen_host)
    assert [(chosen.port.device, chosen.gid.index) for chosen in opened] == [(name, index)]


def test_a_person_chooses(opened: list[ChosenPort]) -> None:
    open_device(RdmaSettings(device="b", gid_index=1), "10.0.0.1")
    assert opened == [ChosenPort(B, B.gids[1])]


def test_rdma_that_is_turned_off_asks_for_nothing(
    opened: list[ChosenPort], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "read_ports", lambda: pytest.fail("asked for ports"))
    with pytest.raises(CarrierUnavailable, match=r"^rdma_device is none$"):
        open_device(RdmaSettings(device="none"))
    assert opened == []


@pytest.mark.usefixtures("opened")
def test_ports_are_looked_at_before_pyverbs_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise CarrierUnavailable("RDMA needs pyverbs")

    monkeypatch.setattr(device_module, "load", missing)
    with pytest.raises(CarrierUnavailable, match="no RDMA port c"):
        open_device(RdmaSettings(device="c"))
    with pytest.raises(CarrierUnavailable, match="not RoCE v2"):
        open_device(RdmaSettings(device="a", gid_index=1))
    with pytest.raises(CarrierUnavailable, match="needs pyverbs"):
        open_device(RdmaSettings())


def test_an_address_that_is_not_one_of_roce_v2() -> None:
    with pytest.raises(CarrierUnavailable) as excinfo:
        check_is_roce(ChosenPort(A, A.gids[1]))
    assert str(excinfo.value) == (
        "GID index 1 of a:1 is IB/RoCE v1, not RoCE v2: leave rdma_gid_index at -1, or name one "
        "that is"
    )
    check_is_roce(ChosenPort(A, A.gids[0]))


# -- an opened one ---------------------------------------------------------------------------------


class MadeContext:
    """A device of two queues; its events come through a pipe, as those of a real one."""

    def __init__(self, log: list[str], *, refuses: bool = False, flags: int = 0) -> None:
        self.reading, self._writing = os.pipe()
        self._log, self._refuses, self._flags = log, refuses, flags
        self.kinds: list[int] = []

    def query_device(self) -> object:
        if self._refuses:
            raise VerbsError("Failed to query device")
        return SimpleNamespace(max_qp_wr=64, max_sge=30, device_cap_flags=self._flags)

    def query_port(self, number: int) -> object:
        assert number == 1
        return SimpleNamespace(active_mtu=3, max_msg_sz=1 << 30)

    def say(self, kind: int) -> None:
        self.kinds.append(kind)
        os.write(self._writing, b"x")

    def get_async_event(self) -> object:
        os.read(self.reading, 1)
        if not self.kinds:
            raise VerbsError("no event")
        kind = self.kinds.pop(0)
        return SimpleNamespace(event_type=kind, ack=lambda: self._log.append(f"ack {kind}"))

    def wake(self) -> None:
        """Readable, and then there is nothing."""
        os.write(self._writing, b"x")

    def close(self) -> None:
        self._log.append("close context")
        os.close(self.reading)
        os.close(self._writing)


def made_verbs(log: list[str], context: MadeContext) -> Any:
    pd = SimpleNamespace(close=lambda: log.append("close pd"))
    return SimpleNamespace(
        error=VerbsError, pd=lambda _: pd, open_context=lambda _name: (context, context.reading)
    )


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
async def device(log: list[str]) -> Any:
    context = MadeContext(log)
    made = Device.open(made_verbs(log, context), ChosenPort(A, A.gids[0]), RdmaSettings())
    yield made
    made.close()


async def test_limits_are_those_of_the_device_and_of_the_settings(log: list[str]) -> None:
    context = MadeContext(log, flags=DEVICE_MEM_WINDOW_TYPE_2B)
    chosen = ChosenPort(A, A.gids[0])
    made = Device.open(made_verbs(log, context), chosen, RdmaSettings(mtu_nbytes=512))
    assert (made.mtu_nbytes, made.max_send_wr, made.max_sge) == (512, 64, 16)
    assert made.has_windows
    assert made.stats() == {
        "device": "a:1",
        "gid_index": 0,
        "gid": str(A.gids[0].address),
        "mtu_nbytes": 512,
        "num_children": 0,
    }
    made.close()


async def test_settings_do_not_go_beyond_the_port(device: Device) -> None:
    assert device.mtu_nbytes == 1024
    assert not device.has_windows


async def test_a_device_that_refuses_is_closed_again(log: list[str]) -> None:
    context = MadeContext(log, refuses=True)
    with pytest.raises(CarrierUnavailable, match="cannot use the RDMA port a:1"):
        Device.open(made_verbs(log, context), ChosenPort(A, A.gids[0]), RdmaSettings())
    assert log == ["close context"]


async def test_a_device_that_cannot_be_opened(log: list[str]) -> None:
    def refuse(_name: str) -> None:
        raise VerbsError("Failed to open")

    verbs = cast("Any", SimpleNamespace(error=VerbsError, open_context=refuse))
    with pytest.raises(CarrierUnavailable, match="cannot open the RDMA device a: Failed to open"):
        Device.open(verbs, ChosenPort(A, A.gids[0]), RdmaSettings())


async def test_children_are_closed_first_the_youngest_first(device: Device, log: list[str]) -> None:
    def child(name: str) -> Any:
        return SimpleNamespace(close=lambda: log.append(f"close {name}"))

    memory, queue, gone = child("memory"), child("queue"), child("gone")
    for one in (memory, gone, queue):
        device.adopt(one)
    device.disown(gone)
    device.disown(gone)
    assert device.stats()["num_children"] == 2
    device.close()
    device.close()
    assert log == ["close queue", "close memory", "close pd", "close context"]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (EventType.DEVICE_FATAL, "the RDMA device a:1 is lost"),
        (EventType.QP_FATAL, "the RDMA device a:1 reports QP_FATAL"),
        (EventType.CQ_ERR, "the RDMA device a:1 reports CQ_ERR"),
        # Connections survive these.
        (EventType.PORT_ERR, ""),
        (EventType.PORT_ACTIVE, ""),
        (EventType.GID_CHANGE, ""),
        (99, ""),
    ],
)
async def test_events_are_read_and_told_to_whom_they_may_concern(
    device: Device, log: list[str], kind: int, text: str
) -> None:
    heard: list[str] = []
    device.listen(heard.append)
    device.context.say(kind)
    async with asyncio.timeout(5):
        while not log:
            await asyncio.sleep(0)
    assert log == [f"ack {int(kind)}"], "closing what it is about waits for this"
    assert heard == ([text] if text else [])
    device.unlisten(heard.append)


async def test_a_wake_up_without_an_event_is_nothing(device: Device, log: list[str]) -> None:
    heard: list[str] = []
    device.listen(heard.append)
    device.context.wake()
    device.context.say(EventType.PORT_ACTIVE)
    async with asyncio.timeout(5):
        while not log:
            await asyncio.sleep(0)
    assert heard == []
