"""One file as it was: kept beside the journal, and written whole or not at all."""

import contextlib
import hashlib
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from ops.node.errors import NodeError

_CHUNK_NBYTES: Final = 1024 * 1024
_NEW_SUFFIX: Final = ".pdserve-new"


@dataclass(frozen=True, slots=True)
class FileState:
    """What a file is; times do not count.

    Attributes:
        digest: SHA-256 of its bytes, hexadecimal; "" if there is no file.
        mode: permission bits.
        uid: owner.
        gid: group.
    """

    digest: str
    mode: int = 0
    uid: int = 0
    gid: int = 0

    @property
    def is_there(self) -> bool:
        """False if there is no such file."""
        return self.digest != ""

    def as_dict(self) -> dict[str, Any]:
        """For the journal."""
        return {"digest": self.digest, "mode": self.mode, "uid": self.uid, "gid": self.gid}


ABSENT: Final = FileState("")


def state_from(entry: Any) -> FileState:
    """The state that ``as_dict`` wrote. KeyError, TypeError or ValueError if it is none."""
    return FileState(str(entry["digest"]), int(entry["mode"]), int(entry["uid"]), int(entry["gid"]))


def digest_of(content: bytes) -> str:
    """The digest of a file with this content."""
    return hashlib.sha256(content).hexdigest()


def state_of(place: Path) -> FileState:
    """What is at ``place`` now.

    NodeError if it is something other than a plain file, or cannot be read.
    """
    try:
        facts = place.lstat()
        if not stat.S_ISREG(facts.st_mode):
            raise NodeError(f"{place} is not a plain file; move it away, then try again")
        digest = hashlib.sha256()
        with place.open("rb") as file:
            while chunk := file.read(_CHUNK_NBYTES):
                digest.update(chunk)
    except (FileNotFoundError, NotADirectoryError):
        return ABSENT
    except OSError as exc:
        raise NodeError(f"{place} cannot be read: {exc}") from exc
    return FileState(digest.hexdigest(), stat.S_IMODE(facts.st_mode), facts.st_uid, facts.st_gid)


def new_place(place: Path) -> Path:
    """Where a file is written before it gets its name; a kill may leave it there."""
    return place.with_name(f".{place.name}{_NEW_SUFFIX}")


def put_bytes(place: Path, content: bytes, *, mode: int, owner: tuple[int, int] | None) -> None:
    """Make ``place`` a file with ``content``, in one step. OSError if that fails."""
    new = new_place(place)
    with _created(new) as file:
        file.write(content)
        file.flush()
        _finish(file.fileno(), place, mode, owner)
    _name(new, place)


def put_copy(place: Path, saved: Path, state: FileState) -> None:
    """Make ``place`` the file that ``saved`` holds, as ``state`` says. OSError if that fails."""
    new = new_place(place)
    with saved.open("rb") as source, _created(new) as file:
        shutil.copyfileobj(source, file, _CHUNK_NBYTES)
        file.flush()
        _finish(file.fileno(), place, state.mode, (state.uid, state.gid))
    _name(new, place)


def save_copy(place: Path, saved: Path) -> None:
    """Keep the bytes of ``place`` in ``saved``, on the disk for sure. OSError if that fails."""
    with place.open("rb") as source, _created(saved) as file:
        shutil.copyfileobj(source, file, _CHUNK_NBYTES)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(saved.parent)


def remove(place: Path) -> None:
    """Remove a file and what an unfinished write left beside it. OSError if that fails."""
    new_place(place).unlink(missing_ok=True)
    place.unlink(missing_ok=True)
    if place.parent.is_dir():
        sync_folder(place.parent)


def sync_folder(folder: Path) -> None:
    """Names in ``folder`` are on the disk for sure after this."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _created(place: Path) -> BinaryIO:
    """Open for writing, readable by its owner alone until it is finished."""
    place.unlink(missing_ok=True)
    descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    return os.fdopen(descriptor, "wb")


def _finish(descriptor: int, old: Path, mode: int, owner: tuple[int, int] | None) -> None:
    facts = os.fstat(descriptor)
    if owner is not None and owner != (facts.st_uid, facts.st_gid):
        os.fchown(descriptor, *owner)
    os.fchmod(descriptor, mode)
    # Access lists and the label of SELinux belong to the file, not to its content.
    with contextlib.suppress(OSError):
        for name in os.listxattr(old):
            os.setxattr(descriptor, name, os.getxattr(old, name))
    os.fsync(descriptor)


def _name(new: Path, place: Path) -> None:
    os.replace(new, place)
    sync_folder(place.parent)
