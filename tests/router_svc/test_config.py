"""Settings of the router."""

from pathlib import Path
from typing import Any

import pytest

from router_svc.config import RouterConfig
from svckit.config import load_config
from svckit.errors import ConfigError


def load(**flags: Any) -> RouterConfig:
    return load_config(RouterConfig, {"model": "/models/m"} | flags, {}, None, "router")


def test_defaults() -> None:
    config = load()
    assert config.model == Path("/models/m")
    assert (config.listen_host, config.listen_port) == ("127.0.0.1", 8000)
    assert (config.control_host, config.control_port) == ("127.0.0.1", 7400)
    assert (config.default_max_tokens, config.max_body_nbytes) == (512, 4 << 20)
    assert (config.request_timeout_s, config.resume_timeout_s, config.lease_s) == (600, 20, 3)


def test_sizes_have_units() -> None:
    assert load(max_body_nbytes="1MiB").max_body_nbytes == 1 << 20


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "router.example", ""])
def test_http_beyond_this_host_needs_a_key(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="api-key-file"):
        load(listen_host=host)
    assert load(listen_host=host, api_key_file=str(tmp_path / "key")).listen_host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    assert load(listen_host=host, control_host=host).control_host == host


def test_control_port_beyond_this_host_needs_a_secret(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="secret-file"):
        load(control_host="0.0.0.0")
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef", encoding="ascii")
    secret.chmod(0o600)
    config = load(control_host="0.0.0.0", secret_file=str(secret))
    assert config.secret == b"0123456789abcdef"


@pytest.mark.parametrize(
    ("name", "value"), [("max_requests", 0), ("lease_s", 0), ("max_body_nbytes", "1")]
)
def test_limits(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        load(**{name: value})
