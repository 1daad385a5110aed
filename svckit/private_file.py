"""A file that only its owner may read: the shared secret, the key of a certificate."""

import os
import stat
from pathlib import Path

from svckit.errors import ConfigError


def read_private_file(path: Path, what: str, *, max_nbytes: int) -> bytes:
    """The first ``max_nbytes`` of the file; ``what`` names it in errors, such as "secret file".

    Raises ConfigError, checked in this order: not readable, not a plain file, open to group or
    others.
    """
    try:
        # O_NONBLOCK: a FIFO given by mistake must not hang the start.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as exc:
        raise ConfigError(f"Cannot read the {what} {path}: {exc.strerror}.") from exc
    try:
        status = os.fstat(fd)  # of the opened file, so that nobody can swap it in between
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"The {what} {path} is not a plain file.")
        if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(
                f"The {what} {path} is open to group or others "
                f"(mode {stat.S_IMODE(status.st_mode):04o}); run chmod 600 on it."
            )
        with open(fd, "rb", closefd=False) as file:
            return file.read(max_nbytes)
    finally:
        os.close(fd)
