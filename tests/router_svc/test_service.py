"""Start and stop of the whole process."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from router_svc.config import RouterConfig
from router_svc.service import serve
from svckit.errors import ServiceError
from svckit.lifecycle import Lifecycle, State, Step

WAIT_S = 10.0


async def test_serve_until_drained(model_dir: Path) -> None:
    lifecycle = Lifecycle()
    states: list[State] = []
    ready = asyncio.Event()

    def note(_old: State, new: State) -> None:
        states.append(new)
        ready.set()

    lifecycle.on_change(note)
    config = RouterConfig(model=model_dir, listen_port=0, control_port=0)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        group.create_task(serve(config, lifecycle))
        await ready.wait()
        lifecycle.advance(Step.DRAIN)
    assert states == [State.SERVING, State.DRAINING]


@pytest.mark.parametrize("name", ["listen_port", "control_port"])
async def test_port_in_use(start_router: Any, name: str) -> None:
    first = await start_router()
    port = first.service.http_port if name == "listen_port" else first.service.control_port
    flag = "--" + name.replace("_", "-")
    expected = pytest.RaisesExc(ServiceError, check=lambda exc: flag in str(exc), match=f"{port}")
    with pytest.RaisesGroup(expected):
        await start_router(**{name: port})


async def test_bad_model_folder(tmp_path: Path) -> None:
    config = RouterConfig(model=tmp_path, listen_port=0, control_port=0)
    with pytest.raises(ServiceError, match=r"config\.json"):
        await serve(config, Lifecycle())


async def test_api_key_file_is_checked(start_router: Any, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("sixteen-bytes-or-more", encoding="ascii")
    path.chmod(0o644)
    with pytest.RaisesGroup(pytest.RaisesExc(ServiceError, match="chmod 600")):
        await start_router(api_key_file=path)


async def test_files_of_tls_are_checked(start_router: Any, tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="give all three, or none"):
        await start_router(tls_cert_file=tmp_path / "crt")
