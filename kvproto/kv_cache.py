"""The KV of one prompt, in one buffer and in one canonical order.

    layer 0: region 0, region 1, ...   layer 1: region 0, ...

Each region starts at a multiple of 64 and holds its rows in token order, from the layer's first
needed token on (``geometry.Layer.first_needed_token``: a layer with a window has its last tokens
only) to the last; a region per sequence holds its one row. That is the order in which
``digest.blocks_views`` reads a prompt out of a pool, so digests of both agree. The gaps are zero.
The same bytes are the body of a KV file (``kv_file``).
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvproto.buffer import byte_view
from kvproto.convert import RowView
from kvproto.digest import digest_blocks
from kvproto.errors import LocalProtocolError
from kvproto.frame import ALIGNMENT
from kvproto.geometry import PER_TOKEN, KvGeometry, PoolLayout

# The table of a cache's only block, for what asks for one (leases, digests).
BLOCK_TABLE: Final = (0,)


class CacheLayout(PoolLayout):
    """A pool of one block that holds the rows of one prompt that are needed, and no others.

    Args:
        geometry: of the rows.
        num_tokens: of the prompt, at least 1.

    LocalProtocolError: no tokens.
    """

    __slots__ = ("_first_tokens", "_nbytes", "_region_starts")

    def __init__(self, geometry: KvGeometry, num_tokens: int) -> None:
        super().__init__(geometry, num_blocks=1, block_size=num_tokens)
        first_tokens = [layer.first_needed_token(num_tokens) for layer in geometry.layers]
        region_starts: list[list[int]] = []
        end = 0
        for layer, first_token in enumerate(first_tokens):
            starts: list[int] = []
            for nbytes in geometry.region_nbytes(layer, num_tokens - first_token, is_last=True):
                starts.append(end + -end % ALIGNMENT)
                end = starts[-1] + nbytes
            region_starts.append(starts)
        # The base class is frozen: nobody changes these either.
        object.__setattr__(self, "_first_tokens", first_tokens)
        object.__setattr__(self, "_region_starts", region_starts)
        object.__setattr__(self, "_nbytes", end)

    _first_tokens: list[int]
    _region_starts: list[list[int]]
    _nbytes: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.block_size

    @property
    def nbytes(self) -> int:
        """Bytes of all regions and the gaps between them."""
        return self._nbytes

    def first_token(self, layer: int) -> int:
        """The first token of the layer whose rows are here."""
        return self._first_tokens[layer]

    def start(self, layer: int, region: int) -> int:
        """Byte offset of the region's first row; the indices are unchecked."""
        return self._region_starts[layer][region]

    def pieces(
        self,
        layer: int,
        block_table: Sequence[int],
        first_token: int,
        num_tokens: int,
        *,
        is_last: bool = False,
    ) -> list[list[tuple[int, int]]]:
        """See ``PoolLayout.pieces``; at most one piece per region.

        LocalProtocolError if the rows of some of the tokens are not here.
        """
        offset = first_token - self._first_tokens[layer]
        if offset < 0 or num_tokens < 0 or first_token + num_tokens > self.num_tokens:
            raise LocalProtocolError(
                f"tokens {first_token}..{first_token + num_tokens} of layer "
                f"{self.geometry.layers[layer].name} are not here: the cache has "
                f"{self._first_tokens[layer]}..{self.num_tokens}"
            )
        pieces: list[list[tuple[int, int]]] = []
        for index, region in enumerate(self.geometry.layers[layer].regions):
            start, nbytes = self.start(layer, index), self.geometry.row_nbytes(region)
            if region.per == PER_TOKEN:
                pieces.append([(start + offset * nbytes, num_tokens * nbytes)])
            else:
                pieces.append([(start, nbytes)] if is_last else [])
        return pieces

    def spans(self) -> Iterator[tuple[int, int]]:
        """(byte offset, nbytes) of each region, layer by layer; ascending."""
        for layer, starts in enumerate(self._region_starts):
            num_tokens = self.num_tokens - self._first_tokens[layer]
            sizes = self.geometry.region_nbytes(layer, num_tokens, is_last=True)
            yield from zip(starts, sizes, strict=True)

    def gaps(self) -> list[tuple[int, int]]:
        """(byte offset, nbytes) of what lies between the regions, empty gaps left out."""
        gaps: list[tuple[int, int]] = []
        end = 0
        for start, nbytes in self.spans():
            if start > end:
                gaps.append((end, start - end))
            end = start + nbytes
        return gaps


class KvCache:
    """The KV of one prompt.

    Args:
        geometry: of the rows; its dtype may be another than the model's (``SCALED_INT8``).
        tokens: the token ids that the rows belong to, all of them.
        model: the model's name, for people.
        facts: what the worker that computed the rows says about its model (``weights_digest``,
            ``config_digest`` and so on); who takes the rows compares them with its own.
        memory: ``CacheLayout(geometry, len(tokens)).nbytes`` bytes; new and zero by default.
        wire_error: relative RMS error against what was computed; 0 if nothing was lost.
        next_tokens: the rest of the prompt, for which there are no rows.

    LocalProtocolError: no tokens; memory of another size.
    """

    def __init__(
        self,
        geometry: KvGeometry,
        tokens: Sequence[int],
        *,
        model: str = "",
        facts: dict[str, str | int] | None = None,
        memory: memoryview | bytearray | bytes | None = None,
        wire_error: float = 0.0,
        next_tokens: Sequence[int] = (),
    ) -> None:
        self.layout = CacheLayout(geometry, len(tokens))
        self.tokens = tuple(tokens)
        self.model = model
        self.facts = dict(facts or {})
        self.wire_error = wire_error
        self.next_tokens = tuple(next_tokens)
        self.memory = byte_view(bytearray(self.layout.nbytes) if memory is None else memory)
        if self.memory.nbytes != self.layout.nbytes:
            raise LocalProtocolError(
                f"KV cache: the memory has {self.memory.nbytes} bytes, {len(tokens)} tokens need "
                f"{self.layout.nbytes}"
            )

    @property
    def geometry(self) -> KvGeometry:
        """Of the rows."""
        return self.layout.geometry

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of the memory."""
        return self.memory.nbytes

    def first_token(self, layer: str) -> int:
        """The first token of a layer whose rows are here."""
        return self.layout.first_token(self._layer(layer))

    def region(self, layer: str, region: str) -> NDArray[Any]:
        """The rows of one region, ``[tokens, heads, head_dim]``; no copy.

        Row 0 belongs to ``first_token(layer)``; a region per sequence has one row. bfloat16 comes
        as uint16 and float8 as uint8, the bits; int8 as the integers that ``scales`` belong to.
        ``numbers`` gives floats. Read-only if the memory is. LocalProtocolError: no such region.
        """
        return self._rows(layer, region).elements

    def scales(self, layer: str, region: str) -> NDArray[np.float32]:
        """Of an int8 region: x = scale * integer, ``[tokens, heads]``; no copy.

        LocalProtocolError: no such region, or it is of another dtype.
        """
        scales = self._rows(layer, region).scales
        if scales is None:
            raise LocalProtocolError(f"KV cache: {self.geometry.dtype} rows have no scales")
        return scales

    def numbers(self, layer: str, region: str) -> NDArray[Any]:
        """The values of a region, ``[tokens, heads, head_dim]`` float32 (of float64: float64).

        LocalProtocolError: no such region, float8.
        """
        return self._rows(layer, region).numbers()

    def views(self, layer: int, first_token: int, num_tokens: int) -> list[memoryview]:
        """The bytes of a token range of one layer, for ``KvWriter.write``; no copy.

        Rows per sequence are among them if the range ends with the last token.
        LocalProtocolError if the rows of some of the tokens are not here.
        """
        is_last = first_token + num_tokens == self.num_tokens
        pieces = self.layout.pieces(layer, BLOCK_TABLE, first_token, num_tokens, is_last=is_last)
        return [self.memory[start : start + nbytes] for spans in pieces for start, nbytes in spans]

    def digests(self) -> list[int]:
        """xxh3-64 of each region's rows as they lie here, layer by layer, region by region.

        Takes as long as hashing the bytes; call it in a thread for large caches.
        """
        return digest_blocks(self.layout, self.memory, BLOCK_TABLE, self.num_tokens)

    def swap_bytes(self) -> None:
        """Reverse the bytes of each number in place, for rows of a host of the other order."""
        for layer in self.geometry.layers:
            for region in layer.regions:
                rows = self._rows(layer.name, region.name)
                rows.elements.byteswap(inplace=True)
                if rows.scales is not None:
                    rows.scales.byteswap(inplace=True)

    def _layer(self, name: str) -> int:
        try:
            return self.geometry.layer_names.index(name)
        except ValueError:
            names = self.geometry.layer_names
            raise LocalProtocolError(
                f"KV cache: there is no layer {name!r}; the layers are {names[0]} .. {names[-1]}"
            ) from None

    def _rows(self, layer: str, region: str) -> RowView:
        layer_index = self._layer(layer)
        for index, held in enumerate(self.geometry.layers[layer_index].regions):
            if held.name == region:
                first = self.layout.first_token(layer_index)
                count = self.num_tokens - first if held.per == PER_TOKEN else 1
                start = self.layout.start(layer_index, index)
                nbytes = count * self.geometry.row_nbytes(held)
                memory = self.memory[start : start + nbytes]
                return RowView.over(memory, held, self.geometry.dtype)
        names = ", ".join(held.name for held in self.geometry.layers[layer_index].regions)
        raise LocalProtocolError(f"KV cache: layer {layer} has no region {region!r}, only {names}")
