"""A prefill worker on a host without RDMA goes on without."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from kvproto.errors import CarrierUnavailable
from prefill_svc.config import PrefillConfig
from prefill_svc.rdma_pool import RdmaPool


def test_without_a_device_there_is_no_carrier(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts: list[str] = []

    def refuse(_settings: object, host: str) -> None:
        hosts.append(host)
        raise CarrierUnavailable("this host has no RDMA device")

    monkeypatch.setattr("prefill_svc.rdma_pool.open_device", refuse)
    pool = RdmaPool(PrefillConfig(model=Path("tiny"), instance_id="p", advertise_host="10.0.0.7"))
    pool.start(memoryview(bytearray(64)))
    assert hosts == ["10.0.0.7"]
    assert not pool.is_open
    assert pool.stats() is None
    pool.close()
    pool.close()


def test_a_device_without_room_for_the_pool_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    device = SimpleNamespace(close=lambda: closed.append(True), stats=lambda: {"device": "rxe0:1"})
    monkeypatch.setattr("prefill_svc.rdma_pool.open_device", lambda *_: device)
    pool = RdmaPool(PrefillConfig(model=Path("tiny"), instance_id="p"))
    pool.start(memoryview(b"constant"))
    assert closed == [True]
    assert not pool.is_open
    assert pool.stats() is None
