"""deploy/example.toml holds every setting of every service, with its default."""

import dataclasses
import tomllib
from pathlib import Path

import pytest

import ops
from decode_svc.config import DecodeConfig
from prefill_svc.config import PrefillConfig
from router_svc.config import RouterConfig
from svckit.config import SECTIONS, load_config
from svckit.service_config import ServiceConfig
from svckit.setting import settings_of

EXAMPLE = Path(ops.__file__).parent.parent / "deploy" / "example.toml"
CLASSES: dict[str, type[ServiceConfig]] = {
    "router": RouterConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
}


def test_sections_are_the_services() -> None:
    document = tomllib.loads(EXAMPLE.read_text(encoding="utf-8"))
    assert set(document) == set(SECTIONS) == set(CLASSES)


@pytest.mark.parametrize("section", CLASSES)
def test_it_loads_and_changes_nothing(section: str) -> None:
    from_file = load_config(CLASSES[section], {}, {}, EXAMPLE, section)
    by_default = load_config(CLASSES[section], {"model": str(from_file.model)}, {}, None, section)
    assert dataclasses.asdict(from_file) == dataclasses.asdict(by_default)


@pytest.mark.parametrize("section", CLASSES)
def test_no_setting_is_missing(section: str) -> None:
    document = tomllib.loads(EXAMPLE.read_text(encoding="utf-8"))
    shown = {
        name
        for name, setting in settings_of(CLASSES[section]).items()
        if not setting.metadata.get("hidden")
    }
    assert set(document[section]) == shown
