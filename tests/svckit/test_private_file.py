from pathlib import Path

import pytest

from svckit.errors import ConfigError
from svckit.private_file import read_private_file


def test_at_most_so_many_bytes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.touch(mode=0o600)
    path.write_bytes(b"0123456789")
    assert read_private_file(path, "key file", max_nbytes=4) == b"0123"


def test_the_error_names_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"x")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=rf"^The key file {path} is open to group or others"):
        read_private_file(path, "key file", max_nbytes=4)
    with pytest.raises(ConfigError, match=r"^Cannot read the key file .*No such file"):
        read_private_file(tmp_path / "absent", "key file", max_nbytes=4)
    with pytest.raises(ConfigError, match=r"^The key file .* is not a plain file"):
        read_private_file(tmp_path, "key file", max_nbytes=4)
