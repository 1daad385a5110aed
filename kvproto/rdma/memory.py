"""Registered memory: what a device may read and write, and the keys to it.

Registering pins the pages and costs time, so it is done once for a pool. Memory that is not
registered, such as KV that was converted for the wire, passes through ``Staging``.
"""

import ctypes
import mmap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kvproto.errors import CarrierUnavailable
from kvproto.rdma.constants import Access
from kvproto.rdma.device import Device
from kvproto.rdma.verbs import NODE_CHECK_HINT, needed_for

_CAP_IPC_LOCK: Final = 14
_STATUS: Final = Path("/proc/self/status")
_LIMITS: Final = Path("/proc/self/limits")
_MEMLOCK_ROW: Final = "Max locked memory"


def address_of(view: memoryview) -> int:
    """Where the bytes of ``view`` lie; 0 for memory that may not be written or is not in one piece.

    The address is good as long as the view's owner keeps the memory.
    """
    if view.readonly or not view.c_contiguous or not view.nbytes:
        return 0
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def check_memlock(nbytes: int, what: str) -> None:
    """CarrierUnavailable if this process may not pin as much, as far as can be told beforehand."""
    limit_nbytes = _memlock_limit()
    if limit_nbytes is None or nbytes <= limit_nbytes or _may_lock_all():
        return
    raise CarrierUnavailable(
        f"registering {what} pins {nbytes} bytes, the memlock limit of this process is "
        f"{limit_nbytes}: set "
        f"LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited; {NODE_CHECK_HINT}"
    )


def _memlock_limit() -> int | None:
    """Bytes that this process may pin; None: any, or it cannot be told. proc_pid_limits(5)."""
    try:
        lines = _LIMITS.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(_MEMLOCK_ROW):
            soft = line[len(_MEMLOCK_ROW) :].split()[0]
            return int(soft) if soft.isdigit() else None
    return None


def _may_lock_all() -> bool:
    """The process has CAP_IPC_LOCK, which no limit stops. capabilities(7)."""
    try:
        lines = _STATUS.read_text(encoding="ascii").splitlines()
    except OSError:
        return False
    for line in lines:
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False


class RegisteredMemory:
    """One piece of memory that the device may use. A child of the device.

    Args:
        device: whose.
        view: writable, in one piece; kept until ``close``.
        access: what for; local reading is always allowed.
        what: for the error: "the KV pool".

    CarrierUnavailable: the memory is read-only; the memlock limit; what the device says.

    Attributes:
        address, nbytes: where it is.
        lkey, rkey: keys for this side's and the other side's work requests.
        region: of verbs.
        elapsed_s: what registering took.
    """

    def __init__(self, device: Device, view: memoryview, access: Access, what: str) -> None:
        self.address = address_of(view)
        self.nbytes = view.nbytes
        if not self.address:
            raise CarrierUnavailable(f"{what} is not writable memory in one piece")
        check_memlock(self.nbytes, what)
        began_at = time.monotonic()
        with needed_for(device.verbs, f"register {what} of {self.nbytes} bytes for RDMA"):
            self.region: Any = device.verbs.mr(
                device.pd, self.nbytes, int(access), address=self.address
            )
        self.elapsed_s = time.monotonic() - began_at
        self.lkey: int = self.region.lkey
        self.rkey: int = self.region.rkey
        self._view: memoryview | None = view
        self._device = device
        device.adopt(self)

    def holds(self, address: int, nbytes: int) -> bool:
        """All these bytes are in it."""
        return self.address <= address and address + nbytes <= self.address + self.nbytes

    def close(self) -> None:
        """Unregister. Nobody may use it any more: close queue pairs first. Idempotent."""
        if self._view is not None:
            self._device.disown(self)
            self.region.close()
            self._view = None


class Staging:
    """A ring of registered memory for bytes that lie in memory that is not.

    ``put`` copies; ``release`` gives the oldest bytes back. The caller keeps the order.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = memoryview(self._mapping)
        try:
            self.memory = RegisteredMemory(
                device, self._view, Access.LOCAL_WRITE, "the staging memory"
            )
        except BaseException:
            self._view.release()
            self._mapping.close()
            raise
        self.nbytes = nbytes
        self._num_put = self._num_released = 0

    @property
    def free_nbytes(self) -> int:
        """How much ``put`` takes now."""
        return self.nbytes - (self._num_put - self._num_released)

    @property
    def position(self) -> int:
        """Bytes put so far: what ``release`` takes when these are no longer needed."""
        return self._num_put

    def put(self, source: memoryview) -> Iterator[tuple[int, int]]:
        """Copy ``source``, at most ``free_nbytes``; (address, nbytes) of its one or two pieces."""
        while source.nbytes:
            start = self._num_put % self.nbytes
            count = min(source.nbytes, self.nbytes - start)
            self._view[start : start + count] = source[:count]
            self._num_put += count
            source = source[count:]
            yield self.memory.address + start, count

    def release(self, position: int) -> None:
        """Everything put before ``position`` is no longer needed."""
        self._num_released = max(self._num_released, position)

    def close(self) -> None:
        """Unregister and unmap. Idempotent."""
        self.memory.close()
        self._view.release()
        self._mapping.close()
