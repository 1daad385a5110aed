"""The private directory in which owners of mapped regions listen, and how to get at it safely.

Only this user may enter the directory, so only processes of this user find a region. Both sides
open the directory once, check what they opened, and reach its sockets through that descriptor
(``/proc/self/fd/N/name``): nobody can put another directory in its place between the check and
the use, and the 107 bytes of a Unix socket address are never short, however deep the directory
lies. Linux only. Source: unix(7), proc(5).
"""

import os
import re
import socket
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvproto.errors import CarrierUnavailable

SUFFIX: Final = ".sock"
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NEW_SUFFIX: Final = ".new"
# A name that is not in place after this long belongs to an owner that died while it started.
_STALE_NEW_S: Final = 60.0
# pid, uid, gid as the kernel's struct ucred: three int of 4 bytes.
_UCRED_NBYTES: Final = 12
_BACKLOG: Final = 64


def default_path() -> Path:
    """``$XDG_RUNTIME_DIR/pdserve``, or ``/tmp/pdserve-UID`` where there is no such variable."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/"):
        return Path(runtime) / "pdserve"
    # Not TMPDIR: two services with different settings of it would not find each other.
    return Path(f"/tmp/pdserve-{os.geteuid()}")


class SocketDirectory:
    """An open private directory. Use ``open``; ``close`` when done.

    Attributes:
        path: as it was given, for sentences.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def open(cls, path: Path | None = None, *, is_owner: bool) -> "SocketDirectory":
        """Open ``path`` (None: ``default_path``); an owner of regions creates it if missing.

        CarrierUnavailable, in this order: it cannot be created; it is missing, a symbolic link or
        no directory; it belongs to another user; others may enter it.
        """
        path = default_path() if path is None else path
        if is_owner:
            try:
                path.mkdir(mode=0o700)
            except FileExistsError:
                pass
            except OSError as exc:
                raise CarrierUnavailable(
                    f"cannot create the directory {path} for mapped memory: {exc.strerror}; create "
                    "it with mode 0700 or configure another"
                ) from exc
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as exc:
            raise CarrierUnavailable(
                f"cannot open {path} for mapped memory: {exc.strerror}; it must be a directory, "
                "not a link"
            ) from exc
        status = os.fstat(descriptor)
        reason = ""
        if status.st_uid != os.geteuid():
            reason = f"belongs to uid {status.st_uid}, not to {os.geteuid()}"
        elif stat.S_IMODE(status.st_mode) & 0o077:
            reason = f"has mode {stat.S_IMODE(status.st_mode):04o}, others may enter it"
        if reason:
            os.close(descriptor)
            raise CarrierUnavailable(
                f"{path} is not used for mapped memory: it {reason}; make it private with mode "
                "0700 or configure another directory"
            )
        return cls(path, descriptor)

    def close(self) -> None:
        """Idempotent; sockets that were opened stay open."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def address(self, name: str) -> str:
        """Address of a name in the directory, valid in this process while this object is open."""
        return f"/proc/self/fd/{self._descriptor}/{name}"

    def listen(self, instance_id: str) -> socket.socket:
        """A listening socket, non-blocking, that ``socket_name(instance_id)`` leads to.

        Sockets of owners that died are removed first. CarrierUnavailable: the id is no name; a
        process serves under it already; the directory cannot be written.
        """
        name = socket_name(instance_id)
        # Listening before it has its name: a socket that nobody listens on is always a dead one.
        new_name = f"{instance_id}.{os.getpid()}{_NEW_SUFFIX}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._remove_stale()
            listener.setblocking(False)
            listener.bind(self.address(new_name))
            try:
                listener.listen(_BACKLOG)
                # Unlike a rename, a link does not replace what is there.
                os.link(new_name, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
            finally:
                os.unlink(new_name, dir_fd=self._descriptor)
        except OSError as exc:
            listener.close()
            reason = exc.strerror
            if isinstance(exc, FileExistsError):
                reason = "another process serves under this instance id"
            raise CarrierUnavailable(
                f"cannot listen as {name} in {self.path} for mapped memory: {reason}"
            ) from exc
        return listener

    def unlink(self, instance_id: str) -> None:
        """Remove the name of a listening socket. Idempotent."""
        with suppress(FileNotFoundError):
            os.unlink(socket_name(instance_id), dir_fd=self._descriptor)

    def _remove_stale(self) -> None:
        for entry in os.listdir(self._descriptor):
            if not entry.endswith((SUFFIX, _NEW_SUFFIX)):
                continue
            with suppress(FileNotFoundError):
                status = os.stat(entry, dir_fd=self._descriptor, follow_symlinks=False)
                is_starting = (
                    entry.endswith(_NEW_SUFFIX)
                    and abs(time.time() - status.st_mtime) < _STALE_NEW_S
                )
                if stat.S_ISSOCK(status.st_mode) and not is_starting and self._is_dead(entry):
                    os.unlink(entry, dir_fd=self._descriptor)

    def _is_dead(self, name: str) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(self.address(name))
            except ConnectionRefusedError:
                return True
            except OSError:
                return False  # its backlog is full: somebody listens
            return False


def socket_name(instance_id: str) -> str:
    """File name of an owner's socket. CarrierUnavailable if the id cannot be a file name."""
    if not _NAME.fullmatch(instance_id):
        raise CarrierUnavailable(
            f"instance id {instance_id!r} cannot name a socket for mapped memory: it must be 1..64 "
            "letters, digits, dots, hyphens and underscores"
        )
    return instance_id + SUFFIX


def peer_uid(connected: socket.socket) -> int:
    """The user at the other end of a Unix socket, as the kernel noted it. Source: unix(7)."""
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED_NBYTES)
    return int.from_bytes(raw[4:8], sys.byteorder)
