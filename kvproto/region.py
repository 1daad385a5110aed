"""A region: the memory of one process that writers on the same host map and write into.

    offset 0            a REGION frame without a body: who owns it and what lies in it
    SLOTS_OFFSET        NUM_SLOTS slots of SLOT_NBYTES: where each writer proves that it reached us
    POOL_OFFSET         the pool, as ``PoolLayout`` says

The memory is an anonymous file (memfd) without a name: who has it was given it. Its size is sealed,
so no peer can cut it off under us, which would end this process by SIGBUS. Every page is taken at
creation, so that lack of memory is an error then and not SIGBUS later. The frame is written last:
a region whose first bytes are zero is not finished. Linux only; elsewhere ``unavailable_reason``
says so. Source: docs/wire.md section 6, memfd_create(2), fcntl(2) file sealing, madvise(2).
"""

import ctypes
import errno
import fcntl
import mmap
import os
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Final

from kvproto.buffer import byte_view
from kvproto.errors import CarrierUnavailable, KvProtoError, LocalProtocolError, Malformed
from kvproto.fields import MAX_U32, MAX_U64, Text, UInt
from kvproto.frame import decode_frame, encode_frame
from kvproto.geometry import KvGeometry, PoolLayout
from kvproto.handshake import CANARY_NBYTES, canary_bytes
from kvproto.header import HEADER_NBYTES, HOST_ORDER, Header, Kind
from kvproto.messages import MAX_BLOCKS, NONCE_NBYTES
from kvproto.record import decode_record, encode_record, field_infos

CARRIER: Final = "mapped"
ATTACH_TIMEOUT_S: Final = 5.0
# What goes with the descriptor to a writer: the index of its probe slot.
SLOT_INDEX: Final = struct.Struct("<I")
# 64 KiB is a multiple of every page size that Linux has on our processors.
POOL_OFFSET: Final = 64 * 1024
SLOTS_OFFSET: Final = 4096
SLOT_NBYTES: Final = 128
NUM_SLOTS: Final = 256
CANARY_AND_NONCE_NBYTES: Final = CANARY_NBYTES + NONCE_NBYTES
# Linux's numbers, which Python's modules do not have yet.
_MADV_POPULATE_WRITE: Final = 23
_MFD_NOEXEC_SEAL: Final = 8


@dataclass(frozen=True, slots=True)
class RegionHeader:
    """Descriptor of the REGION frame."""

    instance_id: Annotated[str, Text(64, 1, ascii_only=True)]
    dtype: Annotated[str, Text(16, 1, ascii_only=True)]
    regions_digest: Annotated[str, Text(16, 16, ascii_only=True)]
    num_blocks: Annotated[int, UInt(MAX_BLOCKS, 1)]
    block_size: Annotated[int, UInt(MAX_U32, 1)]
    slots_offset: Annotated[int, UInt(MAX_U64)]
    num_slots: Annotated[int, UInt(MAX_U32)]
    pool_offset: Annotated[int, UInt(MAX_U64)]
    pool_nbytes: Annotated[int, UInt(MAX_U64, 1)]


_FIELDS: Final = field_infos(RegionHeader)


def unavailable_reason() -> str:
    """Why this system has no mapped memory, in one sentence; "" where it has."""
    if sys.platform == "linux" and hasattr(os, "memfd_create"):
        return ""
    return f"mapped memory needs Linux (memfd and descriptor passing), this is {sys.platform}"


class Region:
    """The owner's side. Made by ``create``.

    Attributes:
        layout: of the pool.
        instance_id: the owner's.
        pool: writable memoryview of the pool's bytes, ``layout.nbytes`` long; tensors may be
            built on it.
        fd: the anonymous file, to be passed to writers; -1 after ``close``.
    """

    def __init__(
        self, layout: PoolLayout, instance_id: str, descriptor: int, mapping: mmap.mmap
    ) -> None:
        self.layout = layout
        self.instance_id = instance_id
        self.fd = descriptor
        self._mapping: mmap.mmap | None = mapping
        self._memory = memoryview(mapping)
        self.pool = self._memory[POOL_OFFSET : POOL_OFFSET + layout.nbytes]

    @classmethod
    def create(
        cls, layout: PoolLayout, instance_id: str, *, available_nbytes: int | None = None
    ) -> "Region":
        """Take the memory, all of it, now; takes as long as zeroing it.

        Raises, in this order: CarrierUnavailable: no such system; LocalProtocolError: the region
        needs more than ``available_nbytes`` (the kernel does not refuse more than there is, it
        kills for it), or the system refuses the memory.
        """
        reason = unavailable_reason()
        if reason:
            raise CarrierUnavailable(reason)
        nbytes = POOL_OFFSET + -(-layout.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if available_nbytes is not None and nbytes > available_nbytes:
            raise _too_large(nbytes, f"there are {available_nbytes} available")
        try:
            descriptor = _memfd(f"pdserve-{instance_id}")
        except OSError as exc:
            raise _too_large(nbytes, f"{exc.strerror}") from exc
        try:
            os.ftruncate(descriptor, nbytes)
            mapping = mmap.mmap(descriptor, nbytes)
            try:
                _take_pages(descriptor, mapping, nbytes)
                seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            except OSError:
                mapping.close()
                raise
        except (OSError, OverflowError, ValueError) as exc:
            os.close(descriptor)
            raise _too_large(nbytes, str(exc)) from exc
        region = cls(layout, instance_id, descriptor, mapping)
        frame = region._frame()
        region._memory[: len(frame)] = frame
        return region

    def slot(self, index: int) -> memoryview:
        """The memory of one probe slot, ``index`` below NUM_SLOTS."""
        start = SLOTS_OFFSET + index * SLOT_NBYTES
        return self._memory[start : start + SLOT_NBYTES]

    def close(self) -> bool:
        """Give the memory back; True if it is unmapped now. Idempotent.

        While somebody still holds ``pool`` or a view of it (a tensor), the mapping stays, and goes
        with the last view. The descriptor is closed in any case: no writer can attach any more.
        Writers that did keep what they have.
        """
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if self._mapping is not None:
            try:
                self.pool.release()
                self._memory.release()
                self._mapping.close()
            except BufferError:
                return False
            self._mapping = None
        return True

    def _frame(self) -> bytes:
        geometry = self.layout.geometry
        header = RegionHeader(
            instance_id=self.instance_id,
            dtype=geometry.dtype,
            regions_digest=geometry.regions_digest(),
            num_blocks=self.layout.num_blocks,
            block_size=self.layout.block_size,
            slots_offset=SLOTS_OFFSET,
            num_slots=NUM_SLOTS,
            pool_offset=POOL_OFFSET,
            pool_nbytes=self.layout.nbytes,
        )
        fields = encode_record(header, _FIELDS, HOST_ORDER)
        return b"".join(encode_frame(Kind.REGION, fields, order=HOST_ORDER))


class ForeignRegion:
    """The writer's side: another process's region, mapped. Made by ``map``.

    Several threads may use it at once. Pages are mapped when they are first written, so the first
    transfer into a block costs one fault a page more than later ones.

    Attributes:
        header: what the owner says about it.
        layout: of the pool, in this side's geometry.
    """

    def __init__(self, header: RegionHeader, layout: PoolLayout, mapping: mmap.mmap) -> None:
        self.header = header
        self.layout = layout
        self._mapping: mmap.mmap | None = mapping
        self._memory = memoryview(mapping)
        self._pool_address = _address(self._memory) + header.pool_offset
        self._pool = self._memory[header.pool_offset : header.pool_offset + header.pool_nbytes]

    @classmethod
    def map(cls, descriptor: int, geometry: KvGeometry, owner: str) -> "ForeignRegion":
        """Check a descriptor that was passed to us, and map it; the caller closes it.

        CarrierUnavailable, in this order: it is no sealed memory; its first page is no finished
        REGION frame (damaged, of another version); byte order, owner, dtype or shapes are not
        those that were agreed; the offsets do not fit; the system refuses to map it.
        """
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError as exc:
            raise CarrierUnavailable("what the owner passed is no sealed memory") from exc
        # Without these the owner could cut the file off under us: SIGBUS.
        if not seals & fcntl.F_SEAL_SHRINK:
            raise CarrierUnavailable("the owner's region is not sealed: it could shrink under us")
        nbytes = os.fstat(descriptor).st_size
        header = _read_header(os.pread(descriptor, SLOTS_OFFSET, 0))
        layout = _check_header(header, geometry, owner, nbytes)
        try:
            mapping = mmap.mmap(descriptor, nbytes)
        except (OSError, ValueError, OverflowError) as exc:
            raise CarrierUnavailable(f"cannot map a region of {nbytes} bytes: {exc}") from exc
        # A child would keep the memory without knowing when to let go.
        mapping.madvise(mmap.MADV_DONTFORK)
        with suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        return cls(header, layout, mapping)

    def write_slot(self, index: int, nonce: bytes) -> None:
        """Write the canary and the nonce, as this process sees memory, into a probe slot.

        CarrierUnavailable: there is no such slot.
        """
        if index >= self.header.num_slots:
            raise CarrierUnavailable(f"the owner named probe slot {index}, which it does not have")
        start = self.header.slots_offset + index * SLOT_NBYTES
        self._memory[start : start + CANARY_AND_NONCE_NBYTES] = canary_bytes() + nonce

    def put(self, offset: int, source: memoryview) -> None:
        """Copy bytes to byte ``offset`` of the pool; other threads run meanwhile.

        LocalProtocolError: outside the pool, or the region was closed; nothing is written then.
        """
        nbytes = source.nbytes
        if offset < 0 or offset + nbytes > self.header.pool_nbytes:
            raise LocalProtocolError(
                f"mapped region: {nbytes} bytes at {offset} are outside the pool of "
                f"{self.header.pool_nbytes}"
            )
        # Local names keep the memory: ``close`` refuses while a copy holds a view of it.
        try:
            target = self._pool[offset : offset + nbytes]
        except ValueError as exc:
            raise LocalProtocolError("mapped region: it was closed") from exc
        with target:
            if source.readonly:
                target[:] = source
            else:
                # Unlike an assignment, ctypes lets the other threads run.
                ctypes.memmove(self._pool_address + offset, _address(source), nbytes)

    def close(self) -> None:
        """Unmap. Idempotent. BufferError if a copy is under way; nothing has changed then."""
        if self._mapping is not None:
            self._pool.release()
            self._memory.release()
            self._mapping.close()
            self._mapping = None


def _memfd(name: str) -> int:
    """An anonymous file that may be sealed; not executable where the kernel knows of that."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
    return os.memfd_create(name, flags)  # Linux before 6.3


def _take_pages(descriptor: int, mapping: mmap.mmap, nbytes: int) -> None:
    """Take every page now, huge ones where the system gives them; OSError if it has too few."""
    with suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    try:
        mapping.madvise(_MADV_POPULATE_WRITE)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        os.posix_fallocate(descriptor, 0, nbytes)  # Linux before 5.14, pages of the usual size


def _address(view: memoryview) -> int:
    """Where a writable view lies; valid while the view is."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _too_large(nbytes: int, reason: str) -> LocalProtocolError:
    return LocalProtocolError(
        f"cannot take {nbytes} bytes of shared memory for the KV pool ({reason}); give a smaller "
        "pool size"
    )


def _read_header(raw: bytes) -> RegionHeader:
    try:
        if raw[:HEADER_NBYTES] == bytes(HEADER_NBYTES):
            raise Malformed("header", "is not written yet")
        header = Header.decode(raw[:HEADER_NBYTES], max_payload_nbytes=SLOTS_OFFSET - HEADER_NBYTES)
        if header.kind is not Kind.REGION:
            raise Malformed("kind", f"is {header.kind.name}")
        if header.order is not HOST_ORDER:
            raise Malformed("byte_order", f"is {header.order.name.lower()}, not this host's")
        end = HEADER_NBYTES + header.payload_nbytes
        fields = decode_frame(byte_view(raw[:end]), max_payload_nbytes=SLOTS_OFFSET).fields
        return RegionHeader(**decode_record(_FIELDS, fields, header.order))
    except KvProtoError as exc:
        raise CarrierUnavailable(f"the owner's region has no sound header: {exc}") from exc


def _check_header(
    header: RegionHeader, geometry: KvGeometry, owner: str, nbytes: int
) -> PoolLayout:
    for name, ours, theirs in (
        ("instance_id", owner, header.instance_id),
        ("dtype", geometry.dtype, header.dtype),
        ("regions_digest", geometry.regions_digest(), header.regions_digest),
    ):
        if ours != theirs:
            raise CarrierUnavailable(
                f"the owner's region has {name} {theirs!r}, this side needs {ours!r}"
            )
    layout = PoolLayout(geometry, header.num_blocks, header.block_size)
    slots_end = header.slots_offset + header.num_slots * SLOT_NBYTES
    if (
        header.pool_nbytes != layout.nbytes
        or header.slots_offset < HEADER_NBYTES
        or slots_end > header.pool_offset
        or header.pool_offset % mmap.PAGESIZE
        or header.pool_offset + header.pool_nbytes > nbytes
    ):
        raise CarrierUnavailable(f"the owner's region of {nbytes} bytes does not fit: {header}")
    return layout
