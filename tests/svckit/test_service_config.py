from dataclasses import dataclass
from pathlib import Path

from svckit.config import load_config
from svckit.service_config import ServiceConfig, WorkerConfig
from svckit.setting import option, settings_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample(WorkerConfig):
    listen_port: int = option("Port.", default=7402)


def test_all_shared_flags_exist() -> None:
    flags = {setting.flag for setting in settings_of(WorkerConfig).values()}
    assert flags >= {
        *("--listen-host", "--listen-port", "--admin-port", "--router-host", "--router-port"),
        *("--model", "--threads", "--cpus", "--log-level", "--log-format", "--secret-file"),
        *("--instance-id", "--drain-timeout-s"),
    }


def test_a_service_overrides_a_default() -> None:
    flags = {"model": "/m", "admin_port": "0", "cpus": "0,2-3"}
    config = load_config(Sample, flags, {}, None, "decode")
    assert config.listen_port == 7402
    assert config.model == Path("/m")
    assert config.cpus == (0, 2, 3)
    assert config.router_port == 7400


def test_base_has_no_router_address() -> None:
    assert not {"router_host", "router_port"} & settings_of(ServiceConfig).keys()
