"""The KV pool: one mapped buffer, seen as bytes by the transfer and as tensors by the model.

The layout is `kvproto.geometry.PoolLayout`: layer, region (K then V), slot, head, element. Both
views name the same memory, so what the model writes is what the wire sends, without a copy.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

import torch

from kvengine.errors import PoolTooSmall
from kvproto.geometry import KEY_REGION, VALUE_REGION, PoolLayout


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype for a geometry's dtype name, for example "float32"."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is not a torch dtype")
    return dtype


class KvPool:
    """K and V of every slot of every layer, in one piece of memory.

    By default an anonymous mapping: pages are taken from the system when they are first written,
    so a large pool costs nothing until it is used. The memory lives as long as any view of it.

    Args:
        layout: where each token lies.
        memory: take this instead, writable, `layout.nbytes` long; memory that is shared with
            other processes, for example.

    Attributes:
        layout: where each token lies.
        region: writable memoryview of bytes over the whole pool, `layout.nbytes` long.
        keys: per layer, a tensor [num_slots, num_kv_heads, head_dim] in the geometry's dtype.
        values: per layer, the same shape.

    Raises:
        PoolTooSmall: the system refused a mapping of this size.
    """

    def __init__(self, layout: PoolLayout, memory: memoryview | None = None) -> None:
        self.layout = layout
        self.region = _anonymous(layout.nbytes) if memory is None else memory
        geometry = layout.geometry
        whole = torch.frombuffer(self.region, dtype=torch_dtype(geometry.dtype)).view(
            geometry.num_layers, 2, layout.num_slots, geometry.num_kv_heads, geometry.head_dim
        )
        self.keys: list[torch.Tensor] = list(whole[:, KEY_REGION].unbind(0))
        self.values: list[torch.Tensor] = list(whole[:, VALUE_REGION].unbind(0))

    def buffers(
        self, layer: int, block_table: Sequence[int], first_token: int, num_tokens: int
    ) -> list[memoryview]:
        """Return the bytes of a token range of one layer: its K runs, then its V runs.

        No copy: the views show the pool itself and are only as stable as the blocks' owner.

        Raises:
            LocalProtocolError: the range reaches outside the block table.
        """
        pieces = self.layout.pieces(layer, block_table, first_token, num_tokens)
        return [
            self.region[offset : offset + nbytes] for spans in pieces for offset, nbytes in spans
        ]


def _anonymous(nbytes: int) -> memoryview:
    try:
        # Private, not shared: shared anonymous memory is a tmpfs file, without huge pages.
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise PoolTooSmall(
            f"The system refused a KV pool of {nbytes} bytes ({error}): give a smaller pool size."
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without transparent huge pages is slower, not wrong.
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapping)
