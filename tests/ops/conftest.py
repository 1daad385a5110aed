"""What the tests of the operator's tools share."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from ops.ports import free_ports
from tests.ops.fake_router import FakeRouter
from tests.ops.fake_services import FakeServices
from tests.ops.stand_ins import SOURCE_ROOT, StandIns


@pytest.fixture
def stand_ins(tmp_path: Path) -> StandIns:
    return StandIns(tmp_path)


@pytest.fixture
def program_env() -> dict[str, str]:
    """Environment for a program that imports this checkout."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PD_")}
    return {**kept, "PYTHONPATH": str(SOURCE_ROOT), "PYTHONUTF8": "1"}


@pytest.fixture
async def fake_router(program_env: dict[str, str]) -> AsyncIterator[FakeRouter]:
    router = FakeRouter(program_env)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", router.handle)
    async with TestServer(app) as server:
        router.url = f"http://127.0.0.1:{server.port}"
        yield router


@pytest.fixture
def closed_url() -> str:
    """An address where nothing listens."""
    return f"http://127.0.0.1:{free_ports(1).http}"


@pytest.fixture
def fake_services(tmp_path: Path, program_env: dict[str, str]) -> Iterator[FakeServices]:
    services = FakeServices(tmp_path, program_env)
    yield services
    services.close()
