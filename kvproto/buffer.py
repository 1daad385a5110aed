"""Pieces of memory as the protocol handles them, and the one place that swaps their bytes."""

from array import array
from collections.abc import Iterable
from typing import Final

Buffer = bytes | bytearray | memoryview

# Swapping goes through a bounded copy, so a body of any size costs this much extra memory.
_SWAP_PIECE_NBYTES: Final = 64 * 1024
_ARRAY_TYPECODE: Final = {2: "H", 4: "I", 8: "Q"}


def byte_view(buffer: Buffer) -> memoryview:
    """One-dimensional view of the bytes of ``buffer``; no copy. It must be C-contiguous."""
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def total_nbytes(buffers: Iterable[Buffer]) -> int:
    """Sum of the sizes in bytes."""
    return sum(memoryview(buffer).nbytes for buffer in buffers)


def swap_in_place(view: memoryview, element_nbytes: int) -> None:
    """Reverse the bytes of each element of ``view``, which holds whole elements.

    ``element_nbytes`` is 1, 2, 4 or 8 (the sizes of ``geometry.DTYPE_NBYTES``).
    """
    if element_nbytes == 1:
        return
    typecode = _ARRAY_TYPECODE[element_nbytes]
    for start in range(0, view.nbytes, _SWAP_PIECE_NBYTES):
        piece = view[start : start + _SWAP_PIECE_NBYTES]
        elements = array(typecode, bytes(piece))
        elements.byteswap()
        piece[:] = elements.tobytes()
