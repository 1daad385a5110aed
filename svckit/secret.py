"""The shared secret that both ends of a connection prove to know.

It comes from a file that only its owner can read, or from the environment variable PD_SECRET.
It is never a flag or a TOML value: both end up in process lists and backups.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from svckit.errors import ConfigError
from svckit.private_file import read_private_file

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
    raw = read_private_file(secret_file, "secret file", max_nbytes=MAX_SECRET_NBYTES + 1)
    return _checked(raw, f"the secret file {secret_file}")


def _checked(raw: bytes, origin: str) -> bytes:
    secret = raw.strip()
    if not MIN_SECRET_NBYTES <= len(secret) <= MAX_SECRET_NBYTES:
        raise ConfigError(
            f"The secret in {origin} has {len(secret)} bytes, but it must have "
            f"{MIN_SECRET_NBYTES} to {MAX_SECRET_NBYTES}."
        )
    return secret
