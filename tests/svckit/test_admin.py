from collections.abc import AsyncIterator

import aiohttp
import pytest

from svckit.admin import AdminServer, port_sentence
from svckit.errors import ServiceError
from svckit.lifecycle import Lifecycle, Step
from svckit.metrics import Metrics


@pytest.fixture
def lifecycle() -> Lifecycle:
    return Lifecycle()


@pytest.fixture
async def admin(lifecycle: Lifecycle) -> AsyncIterator[AdminServer]:
    metrics = Metrics("decode")
    metrics.gauge("running", "Running.").set(3)
    server = AdminServer("127.0.0.1", 0, metrics.registry, lifecycle, lambda: {"num_running": 3})
    await server.start()
    yield server
    await server.close()
    await server.close()  # idempotent


async def get(admin: AdminServer, path: str) -> tuple[int, str, str]:
    timeout = aiohttp.ClientTimeout(total=20)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.get(f"http://127.0.0.1:{admin.port}{path}") as response,
    ):
        return response.status, await response.text(), response.headers["Content-Type"]


async def test_health_is_ok_in_every_state(admin: AdminServer, lifecycle: Lifecycle) -> None:
    for step, state in ((None, "starting"), (Step.READY, "serving"), (Step.DRAIN, "draining")):
        if step is not None:
            lifecycle.advance(step)
        status, text, _ = await get(admin, "/healthz")
        assert status == 200
        assert text == f'{{"state": "{state}", "num_running": 3}}'


async def test_ready_only_while_serving(admin: AdminServer, lifecycle: Lifecycle) -> None:
    assert (await get(admin, "/readyz"))[0] == 503
    lifecycle.advance(Step.READY)
    assert (await get(admin, "/readyz"))[0] == 200
    lifecycle.advance(Step.DRAIN)
    assert (await get(admin, "/readyz"))[:2] == (503, '{"state": "draining"}')


async def test_metrics_in_exposition_format(admin: AdminServer) -> None:
    status, text, content_type = await get(admin, "/metrics")
    assert status == 200
    assert "pd_decode_running 3.0" in text
    assert content_type.startswith("text/plain; version=")


async def test_busy_port_is_one_sentence(admin: AdminServer, lifecycle: Lifecycle) -> None:
    second = AdminServer("127.0.0.1", admin.port, Metrics("x").registry, lifecycle, dict)
    sentence = f"Port {admin.port} on 127.0.0.1 is already in use; .* --admin-port"
    with pytest.raises(ServiceError, match=sentence):
        await second.start()


def test_other_errors_keep_their_reason() -> None:
    error = PermissionError(13, "Permission denied")
    assert port_sentence("::1", 80, "--http-port", error) == (
        "Cannot listen on ::1:80 (--http-port): Permission denied."
    )
