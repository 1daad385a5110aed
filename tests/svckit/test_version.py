from importlib.metadata import PackageNotFoundError, version

import pytest

from svckit import version as version_module
from svckit.version import DISTRIBUTION, program_version


def test_an_installed_program_knows_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_module, "DISTRIBUTION", "pytest")
    assert program_version() == version("pytest")


def test_a_checkout_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> str:
        assert name == DISTRIBUTION
        raise PackageNotFoundError(name)

    monkeypatch.setattr(version_module, "version", fails)
    assert program_version() == ""
