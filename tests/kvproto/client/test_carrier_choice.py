"""What clients say about carriers on a host without RDMA; transfers by it are in tests/rdma."""

import logging
from dataclasses import replace

import pytest

from kvproto.client import BlockingPrefillClient, DecodeClient, PrefillClient
from kvproto.client.rdma_device import check_offers
from kvproto.errors import CarrierUnavailable, LocalProtocolError
from kvproto.messages import Offer, Prefill
from kvproto.rdma import ports
from kvproto.rdma.settings import RdmaSettings

TOKENS = [5, 3, 8, 1, 9, 2, 7]
pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def no_devices(monkeypatch, tmp_path):
    """Also on a host that has some."""
    monkeypatch.setattr("kvproto.rdma.device.read_ports", lambda: ports.read_ports(tmp_path))


@pytest.mark.parametrize("client_class", [PrefillClient, DecodeClient, BlockingPrefillClient])
def test_a_carrier_that_clients_do_not_have(client_class):
    with pytest.raises(LocalProtocolError, match="no carrier 'mapped'; use one of tcp, rdma, auto"):
        client_class("127.0.0.1", 1, carrier="mapped")


@pytest.mark.parametrize("client_class", [PrefillClient, DecodeClient])
async def test_without_a_device_entering_fails_before_anything_is_dialled(no_devices, client_class):
    client = client_class("127.0.0.1", 1, carrier="rdma")
    with pytest.raises(CarrierUnavailable, match="this host has no RDMA device"):
        await client.__aenter__()
    client = client_class("127.0.0.1", 1, carrier="rdma", rdma=RdmaSettings(device="none"))
    with pytest.raises(CarrierUnavailable, match="rdma_device is none"):
        await client.__aenter__()


async def test_auto_uses_tcp_without_a_device_and_says_why(
    no_devices, prefill_worker, decode_worker, compute, caplog
):
    with caplog.at_level(logging.WARNING):
        async with PrefillClient("127.0.0.1", prefill_worker.port, carrier="auto") as client:
            assert client.carrier == "tcp"
            cache = await client.prefill(TOKENS[:-1])
    assert cache.memory == compute(prefill_worker.geometry, TOKENS[:-1]).memory
    sentence = f"towards 127.0.0.1:{prefill_worker.port}: this host has no RDMA device"
    assert sentence in caplog.text
    async with DecodeClient("127.0.0.1", decode_worker.port, carrier="auto") as client:
        generation = client.generate(cache, TOKENS, max_output_tokens=2)
        assert [token async for token in generation] == TOKENS[-2:]
        assert client.carrier == "tcp"
    assert prefill_worker.requests[0].carrier == ""


async def test_over_tcp_rdma_is_not_mentioned(start_worker, fake_prefill, compute):
    worker = fake_prefill()
    worker.identity = replace(worker.identity, carriers=("rdma", "tcp"))
    heard = []

    async def answer(peer, request):
        heard.extend(peer.remote.carriers)
        # Nobody may offer anything here; who does all the same is not answered.
        await worker.send(peer, request)

    worker.answer = answer
    await start_worker(worker)
    async with PrefillClient("127.0.0.1", worker.port) as client:
        cache = await client.prefill(TOKENS)
    assert heard == ["tcp"]
    assert cache.memory == compute(worker.geometry, TOKENS).memory
    [request] = worker.requests
    assert (request.carrier, request.block_table, request.keys) == ("", [], [])


async def test_an_offer_that_nobody_asked_for_disturbs_nothing(decode_worker, compute):
    kv = compute(decode_worker.geometry, TOKENS[:-1])
    ask = decode_worker.ask

    async def offer_first(peer, request):
        await peer.send(Offer("rdma", bytes(32)))
        await ask(peer, request)

    decode_worker.ask = offer_first
    async with DecodeClient("127.0.0.1", decode_worker.port) as client:
        generation = client.generate(kv, TOKENS, max_output_tokens=2)
        assert [token async for token in generation] == TOKENS[-2:]
    assert not [message for message in decode_worker.received if type(message) is Prefill]


async def test_a_worker_without_rdma_is_named(prefill_worker):
    async with PrefillClient("127.0.0.1", prefill_worker.port) as client:
        with pytest.raises(CarrierUnavailable, match=r"^prefill/p-1@.* has no RDMA \(it has tcp\)"):
            check_offers(client._link.peer)
