"""The shared secret that both ends of a connection prove to know.

It comes from a file that only its owner can read, or from the environment variable PD_SECRET.
It is never a flag or a TOML value: both end up in process lists and backups.
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from svckit.errors import ConfigError

SECRET_VARIABLE: Final = "PD_SECRET"
MIN_SECRET_NBYTES: Final = 16
MAX_SECRET_NBYTES: Final = 4096


def read_secret(secret_file: Path | None, env: Mapping[str, str]) -> bytes | None:
    """The secret as bytes without surrounding white space, or None if none is configured.

    Raises ConfigError, checked in this order: both sources set, file not readable, not a plain
    file, readable by group or others, too short or too long.
    """
    from_env = env.get(SECRET_VARIABLE, "")
    if secret_file is None:
        return _checked(from_env.encode(), SECRET_VARIABLE) if from_env else None
    if from_env:
        raise ConfigError(f"Both secret_file and {SECRET_VARIABLE} are set; keep one of them.")
    try:
        # O_NONBLOCK: a FIFO given by mistake must not hang the start.
        fd = os.open(secret_file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as exc:
        raise ConfigError(f"Cannot read the secret file {secret_file}: {exc.strerror}.") from exc
    with open(fd, "rb") as file:
        status = os.fstat(fd)  # of the opened file, so that nobody can swap it in between
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"The secret file {secret_file} is not a plain file.")
        if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(
                f"The secret file {secret_file} is open to group or others "
                f"(mode {stat.S_IMODE(status.st_mode):04o}); run chmod 600 on it."
            )
        return _checked(file.read(MAX_SECRET_NBYTES + 1), f"the secret file {secret_file}")


def _checked(raw: bytes, origin: str) -> bytes:
    secret = raw.strip()
    if not MIN_SECRET_NBYTES <= len(secret) <= MAX_SECRET_NBYTES:
        raise ConfigError(
            f"The secret in {origin} has {len(secret)} bytes, but it must have "
            f"{MIN_SECRET_NBYTES} to {MAX_SECRET_NBYTES}."
        )
    return secret
