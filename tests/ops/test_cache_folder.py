from pathlib import Path

from ops.cache_folder import cache_folder


def test_variable_wins(tmp_path: Path) -> None:
    assert cache_folder({"PD_CACHE_DIR": str(tmp_path)}) == tmp_path


def test_checkout_has_its_own(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    assert cache_folder({}, tmp_path) == tmp_path / ".cache"


def test_installed_uses_the_users_folder(tmp_path: Path) -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/c"}, tmp_path) == Path("/c/pdserve")
    assert cache_folder({}, tmp_path) == Path.home() / ".cache" / "pdserve"
