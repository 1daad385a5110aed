from pathlib import Path

import pytest

from tests.rdma.rig.binding import link_alone, python_version
from tests.rdma.rig.errors import RigUnavailable
from tests.rdma.rig.packages import PackageEntry

_SUFFIX = ".cpython-311-x86_64-linux-gnu.so"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """What the distribution's package looks like, with another package beside it."""
    folder = tmp_path / "dist-packages"
    for name in ("pyverbs", "other"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").touch()
    (folder / "pyverbs" / f"device{_SUFFIX}").touch()
    return folder / "pyverbs"


def test_pyverbs_alone_is_on_the_path(installed: Path, tmp_path: Path) -> None:
    folder = link_alone(tmp_path / "cache", _SUFFIX, installed)
    assert [path.name for path in folder.iterdir()] == ["pyverbs"]
    assert (folder / "pyverbs" / f"device{_SUFFIX}").is_file()
    assert link_alone(tmp_path / "cache", _SUFFIX, installed) == folder


def test_a_stale_link_is_replaced(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/pyverbs").symlink_to(tmp_path / "gone")
    assert (link_alone(tmp_path / "cache", _SUFFIX, installed) / "pyverbs/__init__.py").is_file()


def test_another_python_is_told(installed: Path, tmp_path: Path) -> None:
    with pytest.raises(RigUnavailable, match=r"device\.cpython-311\S+, those of this .*-312"):
        link_alone(tmp_path / "cache", ".cpython-312-x86_64-linux-gnu.so", installed)
    assert not (tmp_path / "cache").exists()


def test_absence_is_told(tmp_path: Path) -> None:
    with pytest.raises(RigUnavailable, match="put no pyverbs into"):
        link_alone(tmp_path / "cache", _SUFFIX, tmp_path / "dist-packages/pyverbs")


@pytest.mark.parametrize(
    ("depends", "version"),
    [
        ("rdma-core (>= 21), python3 (<< 3.12), python3 (>= 3.11~), libc6", "3.11"),
        ("python3 (<< 3.14), python3 (>= 3.13~)", "3.13"),
        ("python3, libc6 (>= 2.14)", None),
        ("", None),
    ],
)
def test_the_python_a_package_is_for(depends: str, version: str | None) -> None:
    assert python_version(PackageEntry("44.0-2", depends)) == version
