import os
from pathlib import Path

import pytest

from tests.rdma.rig import packages
from tests.rdma.rig.errors import RigUnavailable
from tests.rdma.rig.packages import PackageEntry, parse_entry, parse_installed

_SHOW = """\
Package: python3-pyverbs
Source: rdma-core
Version: 44.0-2
Depends: rdma-core (>= 21), python3 (<< 3.12), python3 (>= 3.11~), libc6 (>= 2.14)
Description-en: Python bindings for rdma-core
 Depends: is a word in this text
"""


def test_only_wholly_installed_packages_count() -> None:
    text = "installed gcc\nnot-installed flex\nhalf-configured bison\nconfig-files bc\n"
    assert parse_installed(text) == {"gcc"}
    assert parse_installed("") == frozenset()


def test_missing_keeps_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "installed", lambda names: frozenset({"b"}))
    assert packages.missing(["c", "b", "a"]) == ["c", "a"]


def test_the_fields_of_an_entry() -> None:
    entry = parse_entry(_SHOW)
    assert entry is not None
    assert entry.version == "44.0-2"
    assert entry.depends.startswith("rdma-core (>= 21), python3 (<< 3.12)")
    assert parse_entry("N: No packages found\n") is None
    assert parse_entry("Version: 1\n") == PackageEntry("1", "")


def test_a_plain_user_is_told_what_root_must_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RigUnavailable, match=r"only root .* apt-get install bison flex$"):
        packages.install(["bison", "flex"], tmp_path / "log")


def test_a_failing_command_is_told_by_its_last_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(RigUnavailable, match=r"sh failed \(E: no network\); .*log$"):
        packages.run_apt(["sh", "-c", "echo first; echo 'E: no network' >&2; exit 100"], log)
    assert "first" in log.read_text()


def test_a_command_that_says_nothing_is_told_too(tmp_path: Path) -> None:
    with pytest.raises(RigUnavailable, match=r"false failed"):
        packages.run_apt(["false"], tmp_path / "log")


def test_commands_run_in_the_folder_given(tmp_path: Path) -> None:
    packages.run_apt(["touch", "here"], tmp_path / "log", tmp_path)
    assert (tmp_path / "here").exists()
