"""The control port: registration, refusals, leases."""

import asyncio
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from kvproto.errors import ConnectionLost, ErrorCode, HandshakeRefused, KvProtoError
from kvproto.handshake import Identity
from kvproto.messages import Error, Ping, Registered, Renew
from kvproto.tcp import connect

WAIT_S = 10.0


async def get(router: Any, path: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.get(router.url + path) as response:
        return response.status, await response.json()


async def test_ready_needs_one_of_each(start_router: Any, cluster: Any) -> None:
    router = await start_router()
    assert (await get(router, "/readyz"))[0] == 503
    await cluster.add_decode(router)
    assert (await get(router, "/readyz"))[0] == 503
    await cluster.add_prefill(router)
    status, body = await get(router, "/readyz")
    assert status == 200
    assert body == {"state": "serving", "num_prefill_workers": 1, "num_decode_workers": 1}


async def test_health_tells_age_load_and_state(start_router: Any, cluster: Any) -> None:
    router = await start_router()
    await cluster.add_decode(router)
    control = cluster.control_of("decode-1")
    control.num_running, control.num_waiting_tokens = 3, 77
    await control.renew()
    async with asyncio.timeout(WAIT_S):
        while True:
            _, body = await get(router, "/healthz")
            [worker] = body["workers"]
            if worker["num_running"] == 3:
                break
            await asyncio.sleep(0.01)
    assert worker["num_waiting_tokens"] == 77
    assert worker["role"] == "decode"
    assert worker["state"] == "serving"
    assert worker["age_s"] >= worker["last_renewed_s"] >= 0


async def test_lease_is_granted(start_router: Any, cluster: Any) -> None:
    router = await start_router(lease_s=2.5)
    control = await cluster.connect_control(router, cluster.prefill_register())
    assert await control.open() == Registered(2.5)


@pytest.mark.parametrize("value", ["0123", None])
async def test_other_config_is_refused(
    start_router: Any, cluster: Any, wait_for_workers: Any, value: str | None
) -> None:
    router = await start_router()
    facts = {name: fact for name, fact in cluster.facts.items() if name != "config_digest"}
    if value is not None:
        facts["config_digest"] = value
    register = replace(cluster.prefill_register(), facts=facts)
    answer = await (await cluster.connect_control(router, register)).open()
    assert isinstance(answer, Error)
    assert (answer.code, answer.field) == (ErrorCode.INCOMPATIBLE, "config_digest")
    await wait_for_workers(router, {})


async def test_other_config_is_refused_in_the_handshake_already(start_router: Any) -> None:
    router = await start_router()
    identity = Identity(role="decode", instance_id="d", facts={"config_digest": "0123"})
    with pytest.raises(KvProtoError) as info:
        await connect("127.0.0.1", router.service.control_port, identity=identity, timeout_s=WAIT_S)
    assert isinstance(info.value, HandshakeRefused) or info.value.code == ErrorCode.INCOMPATIBLE
    assert info.value.field == "config_digest"


@pytest.mark.parametrize("field", ["weights_digest", "dtype"])
async def test_facts_must_agree_with_the_first_worker(
    start_router: Any, cluster: Any, wait_for_workers: Any, field: str
) -> None:
    router = await start_router()
    await cluster.add_decode(router)
    register = replace(cluster.prefill_register(), facts=cluster.facts | {field: "other"})
    answer = await (await cluster.connect_control(router, register)).open()
    assert isinstance(answer, Error)
    assert (answer.code, answer.field) == (ErrorCode.INCOMPATIBLE, field)
    assert "decode-1" in answer.message
    await wait_for_workers(router, {"decode-1": "serving"})


async def test_register_must_say_what_hello_said(start_router: Any, cluster: Any) -> None:
    router = await start_router()
    control = await cluster.connect_control(router, cluster.prefill_register())
    control.register = replace(control.register, instance_id="somebody-else")
    answer = await control.open()
    assert isinstance(answer, Error)
    assert answer.field == "instance_id"


async def test_register_must_come_first(start_router: Any, cluster: Any) -> None:
    router = await start_router()
    control = await cluster.connect_control(router, cluster.prefill_register())
    await control.renew()
    answer = await control.peer.receive()
    assert isinstance(answer, Error)
    assert answer.code == ErrorCode.UNEXPECTED_MESSAGE
    await control.peer.wait_closed()


async def test_decode_worker_that_cannot_be_reached_is_not_offered(
    start_router: Any, cluster: Any, wait_for_workers: Any
) -> None:
    router = await start_router()
    worker = await cluster.listen_decode("decode-1")
    register = worker.register_message()
    await worker.server.close()
    answer = await (await cluster.connect_control(router, register)).open()
    assert isinstance(answer, Error)
    assert answer.code == ErrorCode.CONNECTION_LOST
    assert str(register.port) in answer.message
    await wait_for_workers(router, {})


async def test_address_of_another_worker_is_refused(
    start_router: Any, cluster: Any, wait_for_workers: Any
) -> None:
    router = await start_router()
    other = await cluster.add_decode(router, "decode-2")
    register = replace(other.register_message(), instance_id="decode-1")
    answer = await (await cluster.connect_control(router, register)).open()
    assert isinstance(answer, Error)
    assert "decode-2" in answer.message
    await wait_for_workers(router, {"decode-2": "serving"})


async def test_lease_expires(start_router: Any, cluster: Any, wait_for_workers: Any) -> None:
    router = await start_router(lease_s=0.3)
    worker = await cluster.add_decode(router)
    control = cluster.control_of("decode-1")
    control.is_renewing = False
    await worker.wait_for(lambda: worker.num_disconnects)
    await wait_for_workers(router, {})
    answer = await control.peer.receive()
    assert isinstance(answer, Error)
    assert answer.code == ErrorCode.LEASE


async def test_worker_is_gone_with_its_connection(
    start_router: Any, cluster: Any, wait_for_workers: Any
) -> None:
    router = await start_router(lease_s=60.0)
    worker = await cluster.add_decode(router)
    await cluster.control_of("decode-1").close()
    await wait_for_workers(router, {})
    await worker.wait_for(lambda: worker.num_disconnects)


async def test_sequences_outlive_the_control_connection(
    start_router: Any, cluster: Any, make_client: Any, wait_for_workers: Any
) -> None:
    router = await start_router()
    worker = await cluster.add_decode(router, pause_after=2)
    call = asyncio.create_task(
        make_client(router).completions.create(model="tiny-chat", prompt="x")
    )
    await worker.wait_for(lambda: worker.generates)
    await cluster.control_of("decode-1").close()
    await wait_for_workers(router, {})
    worker.resume.set()
    assert (await call).usage.completion_tokens == len(cluster.reply)
    assert len(worker.generates) == 1
    await worker.wait_for(lambda: worker.num_disconnects)


async def test_restarted_worker_replaces_itself(
    start_router: Any, cluster: Any, wait_for_workers: Any, make_client: Any
) -> None:
    router = await start_router(lease_s=60.0)
    old = await cluster.add_decode(router)
    stuck = cluster.control_of("decode-1")
    new = await cluster.add_decode(router, "decode-1")
    await stuck.close()
    await make_client(router).completions.create(model="tiny-chat", prompt="x")
    await wait_for_workers(router, {"decode-1": "serving"})
    assert (len(old.generates), len(new.generates)) == (0, 1)


async def test_foreign_renew_ends_the_registration(
    start_router: Any, cluster: Any, wait_for_workers: Any
) -> None:
    router = await start_router()
    control = await cluster.add_prefill(router)
    await control.peer.send(Renew("somebody-else", 0, 0, 0, 0, draining=False))
    answer = await control.peer.receive()
    assert isinstance(answer, Error)
    assert answer.code == ErrorCode.UNEXPECTED_MESSAGE
    with pytest.raises(ConnectionLost):
        await control.peer.receive()
    await wait_for_workers(router, {})


async def test_secret_must_match(start_router: Any, cluster: Any) -> None:
    router = await start_router(secret=b"0123456789abcdef")
    with pytest.raises(KvProtoError):
        await cluster.connect_control(router, cluster.prefill_register())
    peer = await connect(
        "127.0.0.1",
        router.service.control_port,
        identity=Identity(role="prefill", instance_id="p", secret=b"0123456789abcdef"),
        timeout_s=WAIT_S,
    )
    await peer.send(Ping(1))
    await peer.close()
