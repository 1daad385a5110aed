from pathlib import Path

import pytest

from ops.diagnosis.discovery import (
    ConfiguredPorts,
    Target,
    admin_targets,
    is_loopback,
    read_configured_ports,
)
from ops.ports import plan_ports
from svckit.errors import ServiceError
from tests.ops.diagnosis.made_services import worker_entry


def ports_of(targets: tuple[Target, ...]) -> list[int]:
    return [int(target.url.rpartition(":")[2]) for target in targets]


def test_named_ports_are_asked_alone_and_must_answer() -> None:
    urls = ["http://127.0.0.1:1/", "http://127.0.0.1:2", "http://127.0.0.1:1"]
    assert admin_targets(urls, [7411], [worker_entry("decode", "d")]) == (
        Target("http://127.0.0.1:1", is_required=True),
        Target("http://127.0.0.1:2", is_required=True),
    )


@pytest.mark.parametrize("num_workers", [1, 2, 9, 10, 23])
def test_the_admin_ports_of_pdctl_up_are_found(num_workers: int) -> None:
    plan = plan_ports(8000, 7400, num_workers)
    workers = [worker_entry("decode", str(port), f"127.0.0.1:{port}") for port in plan.workers]
    targets = admin_targets([], [], workers)
    assert set(plan.admins) <= set(ports_of(targets))
    assert not any(target.is_required for target in targets)


def test_default_and_configured_ports_are_guesses_too() -> None:
    assert ports_of(admin_targets([], [9000, 7412], [])) == [9000, 7412, 7411]


@pytest.mark.parametrize(
    "address", ["10.0.0.1:7401", "127.0.0.1:x", "", "127.0.0.1:65535", "host:1", ":"]
)
def test_workers_elsewhere_and_odd_addresses_are_not_guessed(address: str) -> None:
    assert ports_of(admin_targets([], [], [worker_entry("decode", "d", address)])) == [7411, 7412]


def test_a_long_list_is_cut() -> None:
    workers = [worker_entry("decode", str(n), f"127.0.0.1:{n}") for n in range(1, 5000)]
    assert len(admin_targets([], [], workers)) == 128


def test_an_address_of_another_kind_is_refused() -> None:
    with pytest.raises(ServiceError, match="must start with http"):
        admin_targets(["localhost:1"], [], [])


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("[::1]", True), ("localhost", True), ("10.0.0.1", False), ("", False)],
)
def test_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_configuration(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        '[router]\nlisten_host = "0.0.0.0"\nlisten_port = 8100\napi_key_file = "/k"\n'
        "[prefill]\nadmin_port = 1\n[decode]\nadmin_port = 0\n",
        encoding="utf-8",
    )
    assert read_configured_ports(path) == ConfiguredPorts("http://127.0.0.1:8100", Path("/k"), (1,))
    path.write_text('router = 7\n[decode]\nadmin_port = "x"\n', encoding="utf-8")
    assert read_configured_ports(path) == ConfiguredPorts()
    assert read_configured_ports(None) == ConfiguredPorts()
    path.write_text('[router]\nlisten_host = "::1"\nlisten_port = 80\n', encoding="utf-8")
    assert read_configured_ports(path).router_url == "http://[::1]:80"


def test_a_configuration_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="Cannot read the configuration file"):
        read_configured_ports(tmp_path / "none.toml")
    path = tmp_path / "bad.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ServiceError, match="not valid TOML"):
        read_configured_ports(path)
