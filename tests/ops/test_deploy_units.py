"""The systemd units and the example of each role: they agree with each other and with the code."""

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import ops
from decode_svc.config import DecodeConfig
from ops.start import SERVICES
from prefill_svc.config import PrefillConfig
from router_svc.config import RouterConfig
from svckit import lifecycle
from svckit.config import load_config
from svckit.service_config import ServiceConfig

DEPLOY = Path(ops.__file__).parent.parent / "deploy"
CLASSES: dict[str, type[ServiceConfig]] = {
    "router": RouterConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
}
SECRETS = "/etc/pdserve/secrets"


def unit(role: str) -> configparser.ConfigParser:
    """The unit of a role. No key stands twice in it, so configparser can read it."""
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    path = DEPLOY / "systemd" / f"pdserve-{role}@.service"
    parser.read_string(path.read_text(encoding="utf-8"))
    return parser


def config(role: str, tmp_path: Path) -> ServiceConfig:
    """The example of a role, with its secrets in ``tmp_path``."""
    text = (DEPLOY / f"{role}.toml").read_text(encoding="utf-8")
    for name in set(re.findall(rf"^\w+ = \"{SECRETS}/([\w-]+)\"", text, re.MULTILINE)):
        secret = tmp_path / name
        secret.write_text("0123456789abcdef\n", encoding="utf-8")
        secret.chmod(0o600)
    path = tmp_path / f"{role}.toml"
    path.write_text(text.replace(SECRETS, str(tmp_path)), encoding="utf-8")
    return load_config(CLASSES[role], {}, {}, path, role)


@pytest.mark.parametrize("role", SERVICES)
def test_the_example_of_a_role_loads(role: str, tmp_path: Path) -> None:
    loaded = config(role, tmp_path)
    assert loaded.secret == b"0123456789abcdef"
    assert loaded.log_format == "json"


def test_workers_find_the_router_and_each_other(tmp_path: Path) -> None:
    router = config("router", tmp_path)
    workers = [config(role, tmp_path) for role in ("prefill", "decode")]
    assert isinstance(router, RouterConfig)
    for worker in workers:
        assert isinstance(worker, PrefillConfig | DecodeConfig)
        assert worker.router_port == router.control_port
        assert worker.advertise_host not in ("", "0.0.0.0")
        assert worker.mapped_dir == Path("/run/pdserve")
    assert len({worker.listen_port for worker in workers}) == 2
    assert len({worker.admin_port for worker in workers}) == 2


@pytest.mark.parametrize("role", SERVICES)
def test_the_unit_starts_the_service_with_its_configuration(role: str) -> None:
    service = unit(role)["Service"]
    assert service["ExecStart"] == (
        f"/opt/pdserve/bin/pdctl start {role} --config /etc/pdserve/{role}-%i.toml"
    )
    assert service["EnvironmentFile"] == f"-/etc/pdserve/{role}.env"
    assert service["User"] == service["Group"] == "pdserve"


@pytest.mark.parametrize("role", SERVICES)
def test_a_drain_has_the_time_that_the_service_takes_for_it(role: str, tmp_path: Path) -> None:
    service = unit(role)["Service"]
    longest_s = (
        config(role, tmp_path).drain_timeout_s
        + lifecycle._DRAIN_BACKSTOP_S
        + lifecycle._CANCEL_TIMEOUT_S
    )
    assert float(service["TimeoutStopSec"]) > longest_s
    assert service["KillSignal"] == "SIGTERM"
    assert service["KillMode"] == "mixed"


@pytest.mark.parametrize("role", SERVICES)
def test_a_stop_that_was_asked_for_is_not_restarted(role: str) -> None:
    service = unit(role)["Service"]
    not_restarted = set(map(int, service["RestartPreventExitStatus"].split()))
    # 128 + SIGINT and 128 + SIGTERM: a second signal.
    assert not_restarted == {lifecycle.EXIT_DRAIN_DEADLINE, 130, 143}
    assert lifecycle.EXIT_SERVICE_ERROR not in not_restarted
    assert lifecycle.EXIT_DEFECT not in not_restarted
    assert service["Restart"] == "on-failure"
    assert int(unit(role)["Unit"]["StartLimitBurst"]) > 1


@pytest.mark.parametrize("role", SERVICES)
def test_what_a_service_sees_and_may_do(role: str) -> None:
    service = unit(role)["Service"]
    assert service["Environment"].split() == [
        "PYTHONUTF8=1",
        "LANG=C.UTF-8",
        "PYTHONUNBUFFERED=1",
    ]
    assert service["LimitMEMLOCK"] == "infinity"
    assert int(service["LimitNOFILE"]) >= 65536
    assert service["NoNewPrivileges"] == "yes"
    assert service["ProtectSystem"] == "strict"
    assert service["CapabilityBoundingSet"] == ""
    assert set(service["RestrictAddressFamilies"].split()) >= {"AF_INET", "AF_INET6", "AF_UNIX"}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_workers_keep_their_devices_and_the_folder_of_mapped_memory(role: str) -> None:
    service = unit(role)["Service"]
    assert service["PrivateDevices"] == "no"
    # Each of these would restrict devices, or memory that compiled kernels need.
    assert "ProtectClock" not in service
    assert "DeviceAllow" not in service
    assert service["MemoryDenyWriteExecute"] == "no"
    assert service["ReadWritePaths"] == "/run/pdserve"
    tmpfiles = (DEPLOY / "systemd/pdserve.tmpfiles.conf").read_text(encoding="utf-8")
    assert "d /run/pdserve 0700 pdserve pdserve" in tmpfiles.splitlines()


def test_systemd_has_nothing_to_say(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    units = []
    for role in SERVICES:
        text = (DEPLOY / "systemd" / f"pdserve-{role}@.service").read_text(encoding="utf-8")
        copy = tmp_path / f"pdserve-{role}@0.service"
        # The program is not installed here, and systemd looks whether it can be started.
        copy.write_text(text.replace("/opt/pdserve/bin/pdctl", "/bin/true"), encoding="utf-8")
        units.append(copy)
    ended = subprocess.run(
        [analyze, "verify", *units], capture_output=True, encoding="utf-8", check=False
    )
    complaints = [line for line in ended.stderr.splitlines() if "pdserve" in line]
    assert complaints == []
    assert ended.returncode == 0, ended.stderr


def test_log_rotation_keeps_the_descriptor_that_the_service_holds(tmp_path: Path) -> None:
    text = (DEPLOY / "logrotate/pdserve").read_text(encoding="utf-8")
    lines = [line.strip() for line in text.splitlines() if not line.startswith("#")]
    assert lines[0] == "/var/log/pdserve/*.log {"
    assert lines[-1] == "}"
    assert {"copytruncate", "missingok", "compress", "su pdserve pdserve"} <= set(lines)
    logrotate = shutil.which("logrotate")
    if logrotate is not None:
        ended = subprocess.run(
            [logrotate, "-d", "-s", tmp_path / "state", DEPLOY / "logrotate/pdserve"],
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
        assert "unknown option" not in ended.stderr


def test_the_journal_is_bounded() -> None:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string((DEPLOY / "journald/pdserve.conf").read_text(encoding="utf-8"))
    assert {"systemmaxuse", "ratelimitburst"} <= set(parser["Journal"])
