import os
from pathlib import Path

import pytest

from svckit.errors import ConfigError
from svckit.secret import MAX_SECRET_NBYTES, read_secret

SECRET = b"0123456789abcdef"


def secret_file(tmp_path: Path, mode: int = 0o600, content: bytes = SECRET + b"\n") -> Path:
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_file_is_read_without_its_newline(tmp_path: Path) -> None:
    assert read_secret(secret_file(tmp_path), {}) == SECRET


def test_variable_is_read() -> None:
    assert read_secret(None, {"PD_SECRET": SECRET.decode()}) == SECRET


def test_none_configured() -> None:
    assert read_secret(None, {}) is None
    assert read_secret(None, {"PD_SECRET": ""}) is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620])
def test_file_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match=f"mode {mode:04o}.*chmod 600"):
        read_secret(secret_file(tmp_path, mode), {})


@pytest.mark.parametrize("content", [b"", b"short\n", b"x" * (MAX_SECRET_NBYTES + 1)])
def test_length_is_bounded(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ConfigError, match="it must have 16 to 4096"):
        read_secret(secret_file(tmp_path, content=content), {})


def test_both_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Both secret_file and PD_SECRET"):
        read_secret(secret_file(tmp_path), {"PD_SECRET": SECRET.decode()})


def test_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Cannot read the secret file .*No such file"):
        read_secret(tmp_path / "absent", {})


def test_fifo_is_refused_without_hanging(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(ConfigError, match="not a plain file"):
        read_secret(tmp_path / "fifo", {})


def test_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a plain file"):
        read_secret(tmp_path, {})
