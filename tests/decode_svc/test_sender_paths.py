"""Which carrier the KV of a client takes; real transfers by RDMA are in tests/rdma."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decode_svc.metrics import DecodeMetrics
from decode_svc.sender_paths import SenderPaths
from kvproto.errors import CarrierUnavailable, ConnectionLost
from kvproto.messages import Attached
from kvproto.tcp_link import Link


@dataclass
class FakeAttachment:
    is_cut: bool = False

    def cut(self) -> None:
        self.is_cut = True


@dataclass
class FakeHost:
    """Attaches when ``may_attach`` is set; ``refusal`` says why not."""

    carrier: str = "rdma"
    refusal: str = ""
    may_attach: asyncio.Event = field(default_factory=asyncio.Event)
    attached_to: list[Any] = field(default_factory=list)
    attachments: list[FakeAttachment] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)

    @property
    def has_lease_keys(self) -> bool:
        return self.carrier == "rdma"

    async def attach(self, peer: Any, *, timeout_s: float) -> FakeAttachment:
        self.attached_to.append(peer)
        await self.may_attach.wait()
        if self.refusal:
            raise CarrierUnavailable(self.refusal)
        self.attachments.append(FakeAttachment())
        return self.attachments[-1]

    def attached(self, peer: Any, message: Attached) -> None:
        self.answers.append((peer, message))


@dataclass(eq=False)
class FakeLink:
    remote: Any
    name: str = "client/c"
    control: object = field(default_factory=object)


def paths_of(*hosts: FakeHost) -> tuple[SenderPaths, DecodeMetrics]:
    metrics = DecodeMetrics()
    return SenderPaths(cast("Any", hosts), metrics, timeout_s=1.0), metrics


def client(*carriers: str) -> Link:
    return cast("Link", FakeLink(SimpleNamespace(carriers=carriers)))


def num_fallbacks(metrics: DecodeMetrics) -> float:
    return metrics.path_fallbacks.labels(carrier="rdma")._value.get()


async def test_a_client_is_attached_once_and_cut_when_it_leaves() -> None:
    host, peer = FakeHost(), client("rdma", "tcp")
    paths, metrics = paths_of(FakeHost("mapped"), host)
    paths.add(peer)
    asking = [asyncio.create_task(paths.get(peer)) for _ in range(3)]
    host.may_attach.set()
    first, *others = [await task for task in asking]
    assert (first.carrier, host.attached_to) == ("rdma", [peer.control])
    assert others == [first, first]
    assert paths.stats() == {"client/c": "rdma"}
    message = Attached("rdma", bytes(32))
    paths.attached(peer, message)
    assert host.answers == [(peer.control, message)]
    paths.remove(peer)
    paths.remove(peer)
    assert [attachment.is_cut for attachment in host.attachments] == [True]
    assert num_fallbacks(metrics) == 0
    with pytest.raises(ConnectionLost, match="the client closed the connection"):
        await paths.get(peer)


async def test_a_client_without_rdma_or_that_cannot_attach_is_asked_over_tcp() -> None:
    host = FakeHost(refusal="client/c cannot attach: no device")
    host.may_attach.set()
    paths, metrics = paths_of(host)
    plain, broken = client("tcp"), client("rdma", "tcp")
    for peer in (plain, broken):
        paths.add(peer)
    assert (await paths.get(plain)).carrier == "tcp"
    assert host.attached_to == []
    for _ in range(2):
        path = await paths.get(broken)
        assert (path.carrier, dict(path.passed_over)) == ("tcp", {"rdma": host.refusal})
    assert len(host.attached_to) == 1
    assert num_fallbacks(metrics) == 1


async def test_a_client_whose_rdma_fails_is_cut_off_and_asked_over_tcp() -> None:
    host, peer = FakeHost(), client("rdma", "tcp")
    host.may_attach.set()
    paths, metrics = paths_of(host)
    paths.add(peer)
    await paths.get(peer)
    paths.demote(peer, "RETRY_EXC_ERR")
    paths.demote(peer, "the same, of another sequence")
    path = await paths.get(peer)
    assert (path.carrier, dict(path.passed_over)) == ("tcp", {"rdma": "RETRY_EXC_ERR"})
    assert host.attachments[0].is_cut
    assert num_fallbacks(metrics) == 1
    paths.remove(peer)
    paths.demote(peer, "too late")
    assert num_fallbacks(metrics) == 1


async def test_a_client_that_leaves_while_it_is_attached_keeps_no_hold() -> None:
    host, peer = FakeHost(), client("rdma", "tcp")
    paths, _ = paths_of(host)
    paths.add(peer)
    asking = asyncio.create_task(paths.get(peer))
    while not host.attached_to:
        await asyncio.sleep(0)
    paths.remove(peer)
    host.may_attach.set()
    with pytest.raises(ConnectionLost):
        await asking
    assert host.attachments[0].is_cut
