"""KV rows of one element type and head range turned into another: numpy, and nothing of the wire.

The receiver unpacks (``RowConverter``, given to ``lease.LeaseTable``), the sender packs
(``WirePacker``). Rows are those of ``geometry``: ``[num_heads, head_dim]`` elements, for
``SCALED_INT8`` first one binary32 scale per head and then the integers, x = scale * integer.
Blocks do not matter here: both sides hand over pieces in token order.

What is lost:

    to a wider float        nothing
    to a narrower float     rounded to nearest, ties to even; float64 to bfloat16 goes by way of
                            binary32, as torch does
    to int8                 rounded to nearest, ties to even; scale = max |x| / 127 per row and
                            head, 0 for a head that is all zero

``WirePacker`` refuses what has no value in the other type: NaN and infinities for int8, a finite
number that a float type could only call infinite. It is where a person can still be told. A
receiver never raises for a value: it takes NaN and infinities as they come.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvproto.errors import ConversionError, LocalProtocolError
from kvproto.geometry import PER_TOKEN, SCALE_NBYTES, SCALED_INT8, KvGeometry, Region

INT8_MAX: Final = 127
# How numpy holds each dtype; it has neither bfloat16 nor float8, so their bits are kept.
STORED_AS: Final[Mapping[str, np.dtype[Any]]] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "float8_e4m3fn": np.dtype(np.uint8),
    "float8_e5m2": np.dtype(np.uint8),
    SCALED_INT8: np.dtype(np.int8),
}
# Between these any pair can be converted; float8 only travels as it is.
CONVERTIBLE: Final = frozenset({"float64", "float32", "float16", "bfloat16", SCALED_INT8})

# Rows are packed so many elements at a time: what is made on the way stays in the cache.
_STEP_ELEMENTS: Final = 1 << 15
# Below it squares of binary32 lose digits.
_SMALLEST_SUM: Final = 1e-20

Array = NDArray[Any]


def bfloat16_to_float32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The numbers behind bfloat16 bits, exactly; same shape, a new array."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float32_to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even; NaN stays NaN (a quiet one), same shape."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    upper = bits >> np.uint32(16)
    # Half of the last place that stays, less one where that place is even: ties go to even.
    rounded = upper & np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    is_nan = np.isnan(values)
    if is_nan.any():
        # Adding could carry a NaN into infinity or into the sign.
        rounded = np.where(is_nan, upper | np.uint32(0x0040), rounded)
    return rounded.astype(np.uint16)


@dataclass(slots=True)
class RowView:
    """Rows of one region as arrays over the given memory; writing into them writes the memory.

    Attributes:
        elements: ``[num_rows, num_heads, head_dim]`` in ``STORED_AS[dtype]``.
        scales: ``[num_rows, num_heads]`` binary32 for int8, else None.
    """

    dtype: str
    elements: Array
    scales: NDArray[np.float32] | None

    @classmethod
    def over(cls, memory: memoryview, region: Region, dtype: str) -> "RowView":
        """LocalProtocolError if ``memory`` does not hold whole rows, or the dtype is unknown."""
        stored_as = STORED_AS.get(dtype)
        if stored_as is None:
            raise LocalProtocolError(f"cannot read rows of dtype {dtype!r}: it is unknown")
        heads, dim = region.num_heads, region.head_dim
        scales_nbytes = heads * SCALE_NBYTES if dtype == SCALED_INT8 else 0
        row_nbytes = scales_nbytes + heads * dim * stored_as.itemsize
        if memory.nbytes % row_nbytes:
            raise LocalProtocolError(
                f"cannot read rows of region {region.name}: {memory.nbytes} bytes are not a "
                f"multiple of {row_nbytes}"
            )
        raw = np.frombuffer(memory, np.uint8).reshape(-1, row_nbytes)
        num_rows = raw.shape[0]
        elements = raw[:, scales_nbytes:].view(stored_as).reshape(num_rows, heads, dim)
        scales = raw[:, :scales_nbytes].view(np.float32) if scales_nbytes else None
        return cls(dtype, elements, scales)

    def heads(self, first_head: int, num_heads: int) -> "RowView":
        """Some of the heads; no copy. LocalProtocolError if there are not so many."""
        end_head = first_head + num_heads
        if first_head < 0 or end_head > self.elements.shape[1]:
            raise LocalProtocolError(
                f"heads {first_head}..{end_head} are outside rows of {self.elements.shape[1]} heads"
            )
        scales = None if self.scales is None else self.scales[:, first_head:end_head]
        return RowView(self.dtype, self.elements[:, first_head:end_head], scales)

    def rows(self, first_row: int, num_rows: int) -> "RowView":
        """Some of the rows; no copy."""
        chosen = slice(first_row, first_row + num_rows)
        return RowView(
            self.dtype,
            self.elements[chosen],
            None if self.scales is None else self.scales[chosen],
        )

    def numbers(self) -> Array:
        """The values, ``[num_rows, num_heads, head_dim]`` float64 for float64, else float32.

        LocalProtocolError for float8.
        """
        if self.scales is not None:
            # 0 * infinity and the like: a peer's scales are data, not a reason to warn.
            with np.errstate(all="ignore"):
                return self.elements.astype(np.float32) * self.scales[:, :, np.newaxis]
        if self.dtype == "bfloat16":
            return bfloat16_to_float32(self.elements)
        if self.dtype not in CONVERTIBLE:
            raise LocalProtocolError(f"cannot read {self.dtype} as numbers")
        wide = np.float64 if self.dtype == "float64" else np.float32
        return self.elements.astype(wide, copy=False)

    def assign(self, other: "RowView") -> None:
        """Make these rows hold the values of ``other``, of the same shape; see the module."""
        if self.dtype == other.dtype:
            self.elements[...] = other.elements
            if self.scales is not None:
                self.scales[...] = other.scales
            return
        self.assign_numbers(other.numbers())

    def assign_numbers(self, values: Array) -> None:
        """The same from an array of float32 or float64. LocalProtocolError for float8."""
        if self.dtype not in CONVERTIBLE:
            raise LocalProtocolError(f"cannot convert numbers to {self.dtype}")
        with np.errstate(all="ignore"):
            if self.scales is not None:
                self._quantise(values.astype(np.float32, copy=False))
            elif self.dtype == "bfloat16":
                self.elements[...] = float32_to_bfloat16(values.astype(np.float32, copy=False))
            else:
                self.elements[...] = values.astype(self.elements.dtype)

    def _quantise(self, values: NDArray[np.float32]) -> None:
        scales = np.max(np.abs(values), axis=2) / np.float32(INT8_MAX)
        # Near the largest number the quotient may round up, and its product would be infinite.
        too_large = np.isinf(scales * np.float32(INT8_MAX)) & np.isfinite(scales)
        scales = np.where(too_large, np.nextafter(scales, np.float32(0)), scales)
        # A head of zeros, or of numbers whose scale is below the smallest number: all become 0.
        divisors = np.where(scales == 0, np.float32(1), scales)
        quotients = values / divisors[:, :, np.newaxis]
        np.rint(quotients, out=quotients)
        if not np.isfinite(scales).all():
            # From a receiver's infinity or NaN: the scale says that the head is worth nothing.
            np.nan_to_num(quotients, copy=False, nan=INT8_MAX)
        np.clip(quotients, -INT8_MAX, INT8_MAX, out=quotients)
        assert self.scales is not None, "only rows with scales are quantised"
        self.scales[...] = scales
        self.elements[...] = quotients.astype(np.int8)


class RowConverter:
    """Implements ``carrier.Converter`` for every pair in ``CONVERTIBLE`` and any head range."""

    def unpack(
        self,
        wire: memoryview,
        wire_region: Region,
        wire_dtype: str,
        pool: Sequence[memoryview],
        pool_region: Region,
        pool_dtype: str,
        first_head: int,
    ) -> None:
        """See ``carrier.Converter.unpack``.

        ``wire``: whole rows, ``pool``: pieces of whole rows, together as many rows.
        LocalProtocolError, and the pool may then hold some of the rows: other sizes or heads, a
        dtype that cannot be converted.
        """
        source = RowView.over(wire, wire_region, wire_dtype)
        num_rows = 0
        for piece in pool:
            rows = RowView.over(piece, pool_region, pool_dtype)
            target = rows.heads(first_head, wire_region.num_heads)
            count = target.elements.shape[0]
            if num_rows + count > source.elements.shape[0]:
                raise LocalProtocolError(
                    f"cannot unpack: there are {source.elements.shape[0]} rows and room for more"
                )
            target.assign(source.rows(num_rows, count))
            num_rows += count
        if num_rows != source.elements.shape[0]:
            raise LocalProtocolError(
                f"cannot unpack {source.elements.shape[0]} rows into room for {num_rows}"
            )


class WirePacker:
    """Makes the bodies of one transfer's WRITEs in the form that the receiver asked for.

    One for each transfer; not thread-safe.

    Args:
        geometry: of the pool that the rows come from.
        wire: what travels, ``geometry.as_wire(dtype, num_heads)`` of PREFILL.
        first_head: the first head that travels.

    LocalProtocolError: heads beyond those of a region, a dtype that cannot be converted.
    """

    def __init__(self, geometry: KvGeometry, wire: KvGeometry, first_head: int = 0) -> None:
        if geometry.dtype != wire.dtype and not {geometry.dtype, wire.dtype} <= CONVERTIBLE:
            raise LocalProtocolError(f"cannot convert KV from {geometry.dtype} to {wire.dtype}")
        for held, sent in zip(geometry.layers, wire.layers, strict=True):
            for region, wire_region in zip(held.regions, sent.regions, strict=True):
                if first_head + wire_region.num_heads > region.num_heads:
                    raise LocalProtocolError(
                        f"heads {first_head}..{first_head + wire_region.num_heads} asked for, "
                        f"region {region.name} of {held.name} has {region.num_heads}"
                    )
        self.geometry = geometry
        self.wire = wire
        self.first_head = first_head
        self._squared_error = 0.0
        self._squared_sum = 0.0

    @property
    def is_needed(self) -> bool:
        """False if the rows may travel as they lie in the pool."""
        return self.geometry != self.wire

    @property
    def wire_error(self) -> float:
        """Relative RMS error so far: sqrt(sum (x - x')^2 / sum x^2); 0 if nothing was lost."""
        if not self._squared_error:
            return 0.0
        return math.sqrt(self._squared_error / self._squared_sum)

    def pack(
        self,
        layer: int,
        num_tokens: int,
        buffers: Sequence[memoryview],
        *,
        is_last: bool = False,
    ) -> list[memoryview]:
        """One new buffer per region that travels, for ``KvWriter.write`` of ``wire``.

        ``buffers`` are as ``KvWriter.write`` takes them: pieces of the first region in token
        order, then of the second. ``is_last``: the prompt's last token is among them, so rows per
        sequence are too. Takes as long as reading the bytes a few times; meant for a thread.

        ConversionError: a value that the wire's dtype cannot hold. LocalProtocolError: sizes.
        """
        region_nbytes = self.geometry.region_nbytes(layer, num_tokens, is_last=is_last)
        packed: list[memoryview] = []
        unread = [memoryview(buffer).cast("B") for buffer in buffers if buffer.nbytes]
        for index, (region, wire_region) in enumerate(
            zip(self.geometry.layers[layer].regions, self.wire.layers[layer].regions, strict=True)
        ):
            nbytes = region_nbytes[index]
            if not nbytes:
                continue
            num_rows = num_tokens if region.per == PER_TOKEN else 1
            body = memoryview(bytearray(num_rows * self.wire.row_nbytes(wire_region)))
            target = RowView.over(body, wire_region, self.wire.dtype)
            first_row = 0
            while nbytes:
                if not unread or unread[0].nbytes > nbytes:
                    raise LocalProtocolError(
                        f"cannot pack {num_tokens} tokens of layer {layer}: the buffers do not "
                        f"add up to {region_nbytes} bytes per region"
                    )
                piece = unread.pop(0)
                nbytes -= piece.nbytes
                source = RowView.over(piece, region, self.geometry.dtype).heads(
                    self.first_head, wire_region.num_heads
                )
                count = source.elements.shape[0]
                self._pack_rows(source, target.rows(first_row, count), region)
                first_row += count
            packed.append(body)
        if unread:
            raise LocalProtocolError(
                f"cannot pack {num_tokens} tokens of layer {layer}: {len(unread)} buffers are left"
            )
        return packed

    def _pack_rows(self, source: RowView, target: RowView, region: Region) -> None:
        if source.dtype == target.dtype:
            target.assign(source)
            return
        num_rows, num_heads, head_dim = source.elements.shape
        step = max(1, _STEP_ELEMENTS // (num_heads * head_dim))
        for first in range(0, num_rows, step):
            self._pack_step(source.rows(first, step), target.rows(first, step), region)

    def _pack_step(self, source: RowView, target: RowView, region: Region) -> None:
        values = source.numbers()
        finite = np.isfinite(values)
        are_finite = bool(finite.all())
        if target.scales is not None and not are_finite:
            raise ConversionError(
                f"region {region.name} holds NaN or infinity, which {target.dtype} cannot carry; "
                "ask for a float type"
            )
        target.assign_numbers(values)
        read_back = target.numbers()
        if not are_finite:
            values, read_back = values[finite], read_back[finite]
        if not np.isfinite(read_back).all():
            raise ConversionError(
                f"region {region.name} holds a number beyond the range of {target.dtype}; "
                "ask for a wider type"
            )
        self._squared_error += _sum_of_squares(read_back - values)
        self._squared_sum += _sum_of_squares(values)


def _sum_of_squares(values: Array) -> float:
    """In the type of the values, which is fast; in binary64 where that is too narrow."""
    flat = values.ravel()
    with np.errstate(over="ignore"):
        total = float(np.dot(flat, flat))
    if math.isfinite(total) and total > _SMALLEST_SUM:
        return total
    wide = flat.astype(np.float64)
    return float(np.dot(wide, wide))


class HeadPart(NamedTuple):
    """Some heads on their way from one sender to one receiver of a tensor-parallel group."""

    sender_rank: int
    sender_first_head: int
    receiver_first_head: int
    num_heads: int


def rank_heads(num_heads: int, rank: int, degree: int) -> range:
    """The heads of the model that ``rank`` of ``degree`` ranks holds.

    With at most as many ranks as heads each rank has an equal share, in order. With more ranks
    than heads (few KV heads shared by many query heads) each head is held by ``degree /
    num_heads`` neighbouring ranks. LocalProtocolError: neither divides the other, or no such rank.
    """
    if num_heads < 1 or degree < 1 or not 0 <= rank < degree:
        raise LocalProtocolError(f"there is no rank {rank} of {degree} for {num_heads} heads")
    if num_heads % degree and degree % num_heads:
        raise LocalProtocolError(
            f"{num_heads} KV heads cannot be split over {degree} ranks: one number must divide "
            "the other"
        )
    first_head = rank * num_heads // degree
    return range(first_head, first_head + max(1, num_heads // degree))


def plan_head_parts(
    num_heads: int, sender_degree: int, receiver_rank: int, receiver_degree: int
) -> list[HeadPart]:
    """Which sender gives which heads to one receiver, in the order of the receiver's heads.

    Each of the receiver's heads is in exactly one part. Where several senders hold a head the
    receivers are spread over them by rank. LocalProtocolError as ``rank_heads``.
    """
    wanted = rank_heads(num_heads, receiver_rank, receiver_degree)
    rank_heads(num_heads, 0, sender_degree)
    num_replicas = max(1, sender_degree // num_heads)
    parts: list[HeadPart] = []
    for head in wanted:
        rank = head * sender_degree // num_heads
        rank += receiver_rank % num_replicas
        sender_head = head - rank_heads(num_heads, rank, sender_degree).start
        if parts and parts[-1].sender_rank == rank:
            parts[-1] = parts[-1]._replace(num_heads=parts[-1].num_heads + 1)
        else:
            parts.append(HeadPart(rank, sender_head, head - wanted.start, 1))
    return parts
