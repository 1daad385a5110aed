import os
from pathlib import Path

import pytest

from tests.rdma.rig import kernel, packages
from tests.rdma.rig.errors import RigUnavailable
from tests.rdma.rig.packages import PackageEntry

_OPTIONS = ("CONFIG_A=y", "CONFIG_B=7")


def _say(line: str) -> None:
    del line


def _apt_knows(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    entries = {
        "linux-source": PackageEntry("6.1.9-1", "linux-source-6.1 (= 6.1.9-1)"),
        "linux-source-6.1": PackageEntry(version or "", "binutils, xz-utils"),
    }
    monkeypatch.setattr(packages, "find_entry", entries.get if version else lambda name: None)
    monkeypatch.setattr(packages, "run_apt", lambda command, log, folder=None: None)


def _our_options() -> tuple[str, ...]:
    return kernel.parse_options(kernel.CONFIG.read_text(encoding="utf-8"))


def test_the_configuration_has_what_the_tests_need() -> None:
    options = _our_options()
    assert all(option.startswith("CONFIG_") and "=" in option for option in options)
    assert len(set(options)) == len(options)
    needed = "RDMA_RXE VETH NET_SCH_NETEM OVERLAY_FS HOSTFS SHMEM UNIX INFINIBAND_USER_ACCESS"
    assert {f"CONFIG_{name}=y" for name in needed.split()} <= set(options)


def test_comments_are_no_options() -> None:
    assert kernel.parse_options("# why\nCONFIG_A=y\n\n  CONFIG_B=7 \n#CONFIG_C=y\n") == _OPTIONS


def test_options_that_the_source_dropped_are_found() -> None:
    built = "# CONFIG_A is not set\nCONFIG_B=7\nCONFIG_C=y\n"
    assert kernel.lost_options(_OPTIONS, built) == ["CONFIG_A=y"]


def test_source_and_options_make_the_name() -> None:
    name = kernel.kernel_name(_OPTIONS, "6.1.9-1")
    assert name.startswith("linux-uml-6.1.9-1-")
    assert name == kernel.kernel_name(_OPTIONS, "6.1.9-1")
    assert name != kernel.kernel_name(_OPTIONS, "6.1.10-1")
    assert name != kernel.kernel_name(("CONFIG_A=y",), "6.1.9-1")


def test_a_cached_kernel_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _apt_knows(monkeypatch, "6.1.9-1")
    cached = tmp_path / kernel.kernel_name(_our_options(), "6.1.9-1")
    cached.touch()
    assert kernel.obtain(tmp_path, _say) == cached


def test_without_lists_the_newest_kernel_of_these_options_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _apt_knows(monkeypatch, None)
    for age, version in enumerate(("6.1.9-1", "6.1.8-1")):
        path = tmp_path / kernel.kernel_name(_our_options(), version)
        path.touch()
        os.utime(path, (1000 - age, 1000 - age))
    (tmp_path / kernel.kernel_name(_OPTIONS, "6.1.9-1")).touch()
    assert kernel.obtain(tmp_path, _say).name.startswith("linux-uml-6.1.9-1-")


def test_without_lists_and_kernel_the_cure_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _apt_knows(monkeypatch, None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RigUnavailable, match="apt knows no linux-source; run apt-get update"):
        kernel.obtain(tmp_path, _say)


def test_root_gets_the_lists_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _apt_knows(monkeypatch, None)
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    def update(command: list[str], log: Path, folder: Path | None = None) -> None:
        assert command == ["apt-get", "-qq", "update"]
        _apt_knows(monkeypatch, "6.1.9-1")
        (tmp_path / kernel.kernel_name(_our_options(), "6.1.9-1")).touch()

    monkeypatch.setattr(packages, "run_apt", update)
    assert kernel.obtain(tmp_path, _say).name.startswith("linux-uml-6.1.9-1-")


def test_a_failed_download_leaves_no_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _apt_knows(monkeypatch, "6.1.9-1")
    monkeypatch.setattr(packages, "missing", lambda names: [])

    def fail(command: list[str], log: Path, folder: Path | None = None) -> None:
        raise RigUnavailable("apt-get failed (no network)")

    monkeypatch.setattr(packages, "run_apt", fail)
    said: list[str] = []
    (tmp_path / "build-killed/linux").mkdir(parents=True)
    with pytest.raises(RigUnavailable, match="no network"):
        kernel.obtain(tmp_path, said.append)
    assert said == ["fetching linux-source-6.1"]
    assert list(tmp_path.glob("linux-uml-*")) == list(tmp_path.glob("build-*")) == []


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (
            "echo '  CC  lib/error-inject.o'; echo 'a.c:3: error: no such type'; exit 2",
            "no such type",
        ),
        ("echo 'make: *** [Makefile:1: all] Error 2' >&2; exit 2", r"make: \*\*\*"),
        ("exit 2", "sh ended with 2"),
    ],
)
def test_a_failed_build_is_told_by_its_first_error(
    tmp_path: Path, script: str, reason: str
) -> None:
    with pytest.raises(RigUnavailable, match=rf"\(.*{reason}.*\); see .*log$"):
        kernel._run(["sh", "-c", script], tmp_path / "log")


def test_the_steps_of_a_build_get_their_variables(tmp_path: Path) -> None:
    kernel._run(["sh", "-c", "echo $WORD"], tmp_path / "log", WORD="wanted")
    assert (tmp_path / "log").read_text(encoding="utf-8") == "wanted\n"
