"""Service settings that cannot work end in one sentence."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from decode_svc.config import DecodeConfig
from decode_svc.service import serve
from svckit.errors import ServiceError
from svckit.lifecycle import Lifecycle


def _config(model: Path, **settings: Any) -> DecodeConfig:
    defaults: dict[str, Any] = {
        "listen_port": 0,
        "admin_port": 0,
        "threads": 1,
        "kv_pool_nbytes": 8 << 20,
        "instance_id": "d",
    }
    return DecodeConfig(model=model, **{**defaults, **settings})


async def _sentence(config: DecodeConfig) -> str:
    with pytest.raises(ServiceError) as caught:
        async with asyncio.timeout(50):
            await serve(config, Lifecycle())
    return str(caught.value)


async def test_a_missing_model(tmp_path: Path) -> None:
    assert str(tmp_path / "nothing") in await _sentence(_config(tmp_path / "nothing"))


async def test_a_pool_that_holds_nothing(tiny_model_dir: Any) -> None:
    sentence = await _sentence(_config(tiny_model_dir("llama"), kv_pool_nbytes=1))
    assert "pool" in sentence


async def test_a_busy_port(tiny_model_dir: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        sentence = await _sentence(_config(tiny_model_dir("llama"), listen_port=port))
        assert str(port) in sentence
        assert "uses this port" in sentence


async def test_listening_for_everybody_needs_a_secret(tiny_model_dir: Any) -> None:
    sentence = await _sentence(_config(tiny_model_dir("llama"), listen_host="0.0.0.0"))
    assert "secret" in sentence


async def test_files_of_tls_are_read_before_the_model(tmp_path: Path) -> None:
    config = _config(tmp_path / "nothing", tls_cert_file=tmp_path / "crt")
    assert "give all three, or none" in await _sentence(config)
