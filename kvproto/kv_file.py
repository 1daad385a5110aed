"""Files that hold the KV of one prompt: written so that a reader maps them and copies nothing.

    KvFileWriter    room is reserved, the body is mapped and filled, then the header is written
    KvFile          the head is checked, the body is mapped

A file appears under its name complete or not at all. Until then it is a hidden neighbour, mode
0600, whose first bytes are zero. Reserving first makes a full disk an error here; without it the
kernel would answer the write into the mapping with SIGBUS, which nothing can catch.

A reader has the same to fear from somebody who shortens a file that it has mapped. So it maps
only what nobody else may change (owned by this user, not writable by group or others) and reads
everything else into memory. Whoever runs as the same user must replace files, not rewrite them,
as ``KvFileWriter`` does. Source: docs/clients.md.
"""

import mmap
import os
import secrets
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final

from xxhash import xxh3_64

from kvproto.description import layer_records
from kvproto.digest import check_digests
from kvproto.errors import (
    BadMagic,
    DigestMismatch,
    KvFileError,
    LocalProtocolError,
    PayloadTooLarge,
    RemoteProtocolError,
    Truncated,
    UnexpectedMessage,
)
from kvproto.frame import PREFIX_NBYTES
from kvproto.geometry import KvGeometry
from kvproto.header import HEADER_NBYTES, HOST_ORDER, ByteOrder
from kvproto.kv_cache import CacheLayout, KvCache
from kvproto.kv_file_head import (
    FORMAT_VERSION,
    HeadSizes,
    KvFileHead,
    decode_head,
    decode_sizes,
    encode_head,
    head_nbytes,
    with_digests,
)

_FILE_MODE: Final = 0o600
_READ_NBYTES: Final = 1 << 20
_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


class KvFileWriter:
    """A KV file being made. ``commit`` or ``discard`` ends it; a context manager discards.

    Args:
        path: the final name; a file there is replaced by ``commit``.
        geometry, tokens, model, facts, next_tokens: as for ``KvCache``.

    Raises KvFileError: no folder, no permission, no room on the disk. LocalProtocolError: no
    tokens, or a field of the head beyond its limit.

    Attributes:
        cache: its memory is the mapped body; fill it.
    """

    def __init__(
        self,
        path: Path | str,
        geometry: KvGeometry,
        tokens: Sequence[int],
        *,
        model: str = "",
        facts: dict[str, str | int] | None = None,
        next_tokens: Sequence[int] = (),
    ) -> None:
        self.path = Path(path)
        self._head = KvFileHead(
            FORMAT_VERSION,
            model,
            dict(facts or {}),
            geometry.dtype,
            layer_records(geometry),
            list(tokens),
            [0] * geometry.num_regions,
            next_tokens=list(next_tokens),
        )
        body_start = head_nbytes(self._head)
        self._scratch = self.path.parent / f".{self.path.name}.{secrets.token_hex(8)}.part"
        self._fd = -1
        if self.path.is_dir():
            raise KvFileError(str(self.path), "is a folder; name a file in it")
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self._scratch, flags, _FILE_MODE)
            body_nbytes = CacheLayout(geometry, len(tokens)).nbytes
            os.posix_fallocate(self._fd, 0, body_start + body_nbytes)
            self._map = mmap.mmap(self._fd, body_start + body_nbytes)
        except (OSError, ValueError, OverflowError) as exc:
            self.discard()
            raise KvFileError(str(self.path), f"cannot be written: {_reason(exc)}") from exc
        memory = memoryview(self._map)[body_start:]
        self.cache = KvCache(
            geometry, tokens, model=model, facts=facts, memory=memory, next_tokens=next_tokens
        )

    def __enter__(self) -> "KvFileWriter":
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.discard()

    def commit(self, digests: Sequence[int] | None = None) -> None:
        """The body is complete: write the head, reach the disk, take the final name.

        ``digests`` are those of ``cache.digests()``, which are computed if not given. Blocks until
        the disk has everything; call it in a thread. KvFileError, and the file is gone.
        """
        computed = list(digests) if digests is not None else self.cache.digests()
        head = with_digests(self._head, computed, self.cache.wire_error)
        raw = bytes(encode_head(head, self.cache.memory))
        try:
            # The body first: a head on the disk must never stand in front of bytes that are not.
            self._map.flush()
            os.fsync(self._fd)
            _write_all(self._fd, raw[HEADER_NBYTES:], HEADER_NBYTES)
            _write_all(self._fd, raw[:HEADER_NBYTES], 0)
            os.fsync(self._fd)
            self._scratch.rename(self.path)
            _sync_folder(self.path.parent)
        except OSError as exc:
            self.discard()
            raise KvFileError(str(self.path), f"cannot be written: {_reason(exc)}") from exc
        self._close()

    def discard(self) -> None:
        """Remove the unfinished file. Idempotent, and nothing after ``commit``.

        Memory of ``cache`` stays valid as long as somebody holds a view of it.
        """
        if self._fd >= 0:
            self._close()
            with suppress(FileNotFoundError):
                self._scratch.unlink()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)


class KvFile:
    """A committed KV file, opened. ``close`` it, or use it as a context manager.

    Attributes:
        path: its name.
        head: what the file says about itself; ``order`` is that of the bytes in it.
        cache: the rows. Mapped from the file, read-only, without a copy, if it may be mapped (see
            the module) and has this host's byte order; else a copy in memory, in this host's
            order.
    """

    def __init__(
        self, path: Path, fd: int, sizes: HeadSizes, head: KvFileHead, cache: KvCache
    ) -> None:
        self.path = path
        self.head = head
        self.cache = cache
        self._fd = fd
        self._sizes = sizes

    @classmethod
    def open(cls, path: Path | str, *, is_copied: bool = False) -> "KvFile":
        """Open and check the head; the body is not read unless it must be copied.

        ``is_copied``: read the body into memory in any case.

        Raises KvFileError, in this order: not there, not readable, a link, not a plain file, not
        committed, of another kind, cut or with bytes behind its end, damaged head, a body that
        does not fit layers and tokens; while reading: it became shorter.
        """
        path = Path(path)
        try:
            # O_NONBLOCK: a FIFO must not hang.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            fd = os.open(path, flags)
        except (OSError, ValueError) as exc:
            link = path.is_symlink() if isinstance(exc, OSError) else False
            reason = "is a symbolic link; name the file itself" if link else _reason(exc)
            raise KvFileError(str(path), reason) from exc
        try:
            return cls._checked(path, fd, is_copied=is_copied)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def _checked(cls, path: Path, fd: int, *, is_copied: bool) -> "KvFile":
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise KvFileError(str(path), "is not a plain file")
        try:
            sizes = _read_sizes(path, fd, status.st_size)
            head, geometry = decode_head(_read_all(path, fd, 0, sizes.body_start), sizes)
        except RemoteProtocolError as exc:
            raise KvFileError(str(path), _sentence(exc, status.st_size)) from exc
        is_private = status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_MAY_WRITE
        order = sizes.header.order
        memory: memoryview
        if is_private and order is HOST_ORDER and not is_copied:
            try:
                mapping = mmap.mmap(fd, status.st_size, prot=mmap.PROT_READ)
            except (OSError, ValueError) as exc:
                raise KvFileError(str(path), f"cannot be mapped: {_reason(exc)}") from exc
            memory = memoryview(mapping)[sizes.body_start :]
        else:
            memory = memoryview(_read_all(path, fd, sizes.body_start, sizes.body))
        try:
            cache = KvCache(
                geometry,
                head.tokens,
                model=head.model,
                facts=head.facts,
                memory=memory,
                wire_error=head.wire_error,
                next_tokens=head.next_tokens,
            )
        except LocalProtocolError as exc:
            raise KvFileError(str(path), f"its body does not fit its head ({exc})") from exc
        if order is not HOST_ORDER:
            cache.swap_bytes()
        return cls(path, fd, sizes, head, cache)

    @property
    def order(self) -> ByteOrder:
        """Byte order of the file."""
        return self._sizes.header.order

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self._sizes.body_start + self._sizes.body

    def verify(self) -> None:
        """Read the whole body and compare it with the digests in the head.

        Reads through the file, not through the mapping: a file that somebody shortens is an
        error. Takes as long as reading does; call it in a thread. KvFileError names the region
        that is damaged.
        """
        layout, geometry = self.cache.layout, self.cache.geometry
        start = self._sizes.body_start
        computed = [self._digest(start + offset, nbytes) for offset, nbytes in layout.spans()]
        try:
            check_digests(geometry, self.head.digests, computed, sequence_id="")
        except DigestMismatch as exc:
            reason = f"{exc.args[0].replace('at the sender', 'in its head')}; it is damaged"
            raise KvFileError(str(self.path), reason) from exc
        for offset, nbytes in layout.gaps():
            if any(_read_all(self.path, self._fd, start + offset, nbytes)):
                raise KvFileError(
                    str(self.path), f"byte {start + offset} and following are not zero"
                )

    def close(self) -> None:
        """Close the file. Views of ``cache`` stay valid, the mapping ends with the last one."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> "KvFile":
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _digest(self, offset: int, nbytes: int) -> int:
        hasher = xxh3_64()
        while nbytes:
            piece = _read_all(self.path, self._fd, offset, min(nbytes, _READ_NBYTES))
            hasher.update(piece)
            offset += len(piece)
            nbytes -= len(piece)
        return hasher.intdigest()


def save_kv(path: Path | str, cache: KvCache) -> None:
    """Write a cache that lies in memory. Blocks; errors as ``KvFileWriter``."""
    with KvFileWriter(
        path,
        cache.geometry,
        cache.tokens,
        model=cache.model,
        facts=cache.facts,
        next_tokens=cache.next_tokens,
    ) as writer:
        writer.cache.memory[:] = cache.memory
        writer.cache.wire_error = cache.wire_error
        writer.commit()


def _read_sizes(path: Path, fd: int, file_nbytes: int) -> HeadSizes:
    raw = bytes(_read_all(path, fd, 0, min(file_nbytes, HEADER_NBYTES + PREFIX_NBYTES)))
    if raw and not any(raw[:HEADER_NBYTES]):
        raise KvFileError(
            str(path), "is not committed: who writes it has not finished, or died; write it again"
        )
    return decode_sizes(raw, file_nbytes=file_nbytes)


def _read_all(path: Path, fd: int, offset: int, nbytes: int) -> bytearray:
    """Exactly ``nbytes``; KvFileError if the file ends before, or cannot be read."""
    data = bytearray(nbytes)
    view = memoryview(data)
    try:
        while view.nbytes:
            count = os.preadv(fd, [view[:_READ_NBYTES]], offset)
            if not count:
                raise KvFileError(
                    str(path), f"ends at byte {offset}; somebody shortened it while it was read"
                )
            view, offset = view[count:], offset + count
    except OSError as exc:
        raise KvFileError(str(path), f"cannot be read: {_reason(exc)}") from exc
    return data


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view.nbytes:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def _sync_folder(folder: Path) -> None:
    """The new name reaches the disk too."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sentence(exc: RemoteProtocolError, file_nbytes: int) -> str:
    """What a fault of the head means for a file."""
    if isinstance(exc, BadMagic | Truncated | UnexpectedMessage):
        return f"is not a KV file ({exc})"
    if isinstance(exc, PayloadTooLarge):
        return f"was cut: it has {file_nbytes} bytes, its header announces more; fetch it again"
    return f"its head is damaged or of another release ({exc})"


def _reason(exc: Exception) -> str:
    return (isinstance(exc, OSError) and exc.strerror) or str(exc)
