"""A decode worker on a host without RDMA: it goes on without, or says why it cannot."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from decode_svc.config import DecodeConfig
from decode_svc.rdma_pool import RdmaPool
from kvproto.errors import CarrierUnavailable
from kvproto.geometry import KvGeometry, PoolLayout
from svckit.errors import ServiceError

_LAYOUT = PoolLayout(KvGeometry.uniform(1, 1, 2, "float32", ("a",)), 8, 4)
_POOL = memoryview(bytearray(_LAYOUT.nbytes))


def _start(**settings: Any) -> object:
    pool = RdmaPool(DecodeConfig(model=Path("tiny"), instance_id="d", **settings))
    try:
        return pool.start(_LAYOUT, _POOL)
    finally:
        pool.close()
        pool.close()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hosts for which a device was asked for; there is none."""
    hosts: list[str] = []

    def refuse(_settings: object, host: str) -> None:
        hosts.append(host)
        raise CarrierUnavailable("this host has no RDMA device")

    monkeypatch.setattr("decode_svc.rdma_pool.open_device", refuse)
    return hosts


def test_auto_goes_on_without(asked: list[str]) -> None:
    assert _start(advertise_host="10.0.0.7") is None
    assert _start(listen_host="10.0.0.8") is None
    assert asked == ["10.0.0.7", "10.0.0.8"]


@pytest.mark.parametrize("kv_carrier", ["tcp", "mapped"])
def test_another_carrier_asks_for_no_device(asked: list[str], kv_carrier: str) -> None:
    assert _start(kv_carrier=kv_carrier) is None
    assert asked == []


@pytest.mark.usefixtures("asked")
def test_a_worker_that_insists_does_not_start() -> None:
    expected = r"^kv_carrier is rdma, but this host has no RDMA device\.$"
    with pytest.raises(ServiceError, match=expected):
        _start(kv_carrier="rdma")


def test_a_device_without_room_for_the_pool_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    device = SimpleNamespace(close=lambda: closed.append(True))

    def refuse(*_: object) -> None:
        raise CarrierUnavailable("memlock")

    monkeypatch.setattr("decode_svc.rdma_pool.open_device", lambda *_: device)
    monkeypatch.setattr("decode_svc.rdma_pool.RdmaHost", refuse)
    pool = RdmaPool(DecodeConfig(model=Path("tiny"), instance_id="d"))
    assert pool.start(_LAYOUT, _POOL) is None
    assert closed == [True]


def test_converted_kv_does_not_travel_by_rdma(asked: list[str]) -> None:
    assert _start(kv_wire_dtype="float16") is None
    with pytest.raises(ServiceError, match="kv_wire_dtype converts the KV, which needs TCP"):
        _start(kv_wire_dtype="float16", kv_carrier="rdma")
    assert asked == []
