"""What the KV cache of a model looks like, and where each token of it lies in a pool.

A *layer* has named *regions*: K and V for ordinary attention, one latent for multi-head latent
attention, a state for a recurrent layer. A region holds one row per token, or one per sequence. A
*slot* is one token position of the pool, ``block_id * block_size + offset``. A pool is one buffer:

    pool[layer][region][slot]      ->  one token's row, shape [num_heads, head_dim]
    pool[layer][region][block_id]  ->  one sequence's row, kept with the sequence's first block

so a run of neighbouring slots is one contiguous piece of memory, and merging neighbouring blocks
makes few large pieces. The geometry is agreed in the handshake; the block size is not, because
coordinates on the wire are logical (layer name, region, token index).

Pure arithmetic: no buffer is touched here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Final

import xxhash

from kvproto.errors import LocalProtocolError
from kvproto.shape import MAX_HEAD_DIM, MAX_KV_HEADS, MAX_LAYERS, MAX_SEQ_LEN, Shape

KEY_REGION: Final = 0
VALUE_REGION: Final = 1
LAYOUT: Final = "layer/region/token/head"
MAX_LAYER_NAME_NBYTES: Final = 128
MAX_LAYER_REGIONS: Final = 8
PER_TOKEN: Final = "token"
PER_SEQUENCE: Final = "sequence"
# Elements of 8 bits, and before them one binary32 scale for each head: x = scale * int8.
SCALED_INT8: Final = "int8"
SCALE_NBYTES: Final = 4
# The names torch uses, without "torch.". Sizes in bytes of one element.
DTYPE_NBYTES: Final[Mapping[str, int]] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    SCALED_INT8: 1,
}


def config_digest(config: Mapping[str, Any]) -> str:
    """Digest of a model's ``config.json``: 16 hex digits, xxh3-64 of its canonical JSON.

    Canonical: keys sorted, no spaces, ASCII only. The workers compute it from the checkpoint and
    the router from the same file without torch, so that both sides of a handshake can compare.
    LocalProtocolError if ``config`` is not plain JSON data (NaN and infinities included).
    """
    try:
        text = json.dumps(
            config, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
        )
    except (TypeError, ValueError) as exc:
        raise LocalProtocolError(f"config digest: the config is not plain JSON: {exc}") from exc
    return xxhash.xxh3_64_hexdigest(text.encode("ascii"))


@dataclass(frozen=True, slots=True)
class Region:
    """One tensor of one layer: rows of ``num_heads * head_dim`` elements.

    Args:
        name: printable ASCII, distinct within the layer: "k", "v", "latent", "state".
        num_heads: 1..4095; 1 for a latent that all heads share.
        head_dim: elements per head, 1..4095.
        per: one row per "token" or one per "sequence".
    """

    name: str
    num_heads: int
    head_dim: int
    per: str = PER_TOKEN


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the KV cache.

    Args:
        name: printable ASCII, distinct; a WRITE names its layer by it, never by position.
        regions: 1..8, in the order in which they travel.
        window_tokens: attention sees this many last tokens, itself included; 0 for all. Only the
            last ``window_tokens`` tokens of a prompt are handed over.
    """

    name: str
    regions: tuple[Region, ...]
    window_tokens: int = 0

    def first_needed_token(self, num_tokens: int) -> int:
        """The first of ``num_tokens`` tokens whose rows the next token needs."""
        if all(region.per == PER_SEQUENCE for region in self.regions):
            return num_tokens - 1  # the state behind the last token is all there is
        return max(0, num_tokens - self.window_tokens) if self.window_tokens else 0


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Shape and names of one model's KV cache.

    Args:
        layers: 1..4095, in the order of the model.
        dtype: a key of ``DTYPE_NBYTES``.

    Raises LocalProtocolError naming the first field that breaks these rules.
    """

    layers: tuple[Layer, ...]
    dtype: str

    def __post_init__(self) -> None:
        _check_count("num_layers", len(self.layers), MAX_LAYERS)
        if self.dtype not in DTYPE_NBYTES:
            raise LocalProtocolError(
                f"geometry: dtype {self.dtype!r} is unknown; use one of {', '.join(DTYPE_NBYTES)}"
            )
        _check_names("layer_names", [layer.name for layer in self.layers])
        for layer in self.layers:
            _check_count(
                f"number of regions of {layer.name}", len(layer.regions), MAX_LAYER_REGIONS
            )
            _check_names(f"region names of {layer.name}", [region.name for region in layer.regions])
            if not 0 <= layer.window_tokens <= MAX_SEQ_LEN:
                raise LocalProtocolError(
                    f"geometry: window_tokens of {layer.name} is {layer.window_tokens}, outside "
                    f"0..{MAX_SEQ_LEN}"
                )
            for region in layer.regions:
                _check_count("num_kv_heads", region.num_heads, MAX_KV_HEADS)
                _check_count("head_dim", region.head_dim, MAX_HEAD_DIM)
                if region.per not in (PER_TOKEN, PER_SEQUENCE):
                    raise LocalProtocolError(
                        f"geometry: region {region.name} of {layer.name} is per {region.per!r}; "
                        f"it must be per {PER_TOKEN!r} or {PER_SEQUENCE!r}"
                    )

    @classmethod
    def uniform(
        cls,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: str,
        layer_names: Sequence[str],
        *,
        windows_tokens: Sequence[int] = (),
    ) -> "KvGeometry":
        """K and V of equal shape in each layer; errors as the class.

        ``windows_tokens``: per layer, see ``Layer``; empty for none.
        """
        _check_count("num_layers", num_layers, MAX_LAYERS)
        windows = windows_tokens or [0] * num_layers
        if len(layer_names) != num_layers or len(windows) != num_layers:
            raise LocalProtocolError(
                f"geometry: layer_names has {len(layer_names)} names and {len(windows)} windows "
                f"for {num_layers} layers; give each layer one name"
            )
        regions = (Region("k", num_kv_heads, head_dim), Region("v", num_kv_heads, head_dim))
        layers = tuple(
            Layer(name, regions, window) for name, window in zip(layer_names, windows, strict=True)
        )
        return cls(layers, dtype)

    @property
    def num_layers(self) -> int:
        """Layers with a KV cache."""
        return len(self.layers)

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The names, in the order of the model."""
        return tuple(layer.name for layer in self.layers)

    @property
    def num_regions(self) -> int:
        """Regions of all layers together: as many digests has a COMMIT."""
        return sum(len(layer.regions) for layer in self.layers)

    @property
    def element_nbytes(self) -> int:
        """Bytes of one element of the dtype."""
        return DTYPE_NBYTES[self.dtype]

    @property
    def num_kv_heads(self) -> int:
        """Heads of every region. LocalProtocolError if they differ."""
        return self._only("num_kv_heads", {region.num_heads for region in self._regions()})

    @property
    def head_dim(self) -> int:
        """Elements per head of every region. LocalProtocolError if they differ."""
        return self._only("head_dim", {region.head_dim for region in self._regions()})

    def row_nbytes(self, region: Region) -> int:
        """Bytes of one row (a token's or a sequence's) of a region in the geometry's dtype."""
        scales_nbytes = SCALE_NBYTES if self.dtype == SCALED_INT8 else 0
        return region.num_heads * (region.head_dim * self.element_nbytes + scales_nbytes)

    @property
    def kv_token_nbytes(self) -> int:
        """Bytes of one token over the per-token regions of all layers."""
        return sum(map(self.row_nbytes, (r for r in self._regions() if r.per == PER_TOKEN)))

    @property
    def kv_sequence_nbytes(self) -> int:
        """Bytes of one sequence over the per-sequence regions of all layers."""
        return sum(map(self.row_nbytes, (r for r in self._regions() if r.per == PER_SEQUENCE)))

    def region_nbytes(self, layer: int, num_tokens: int, *, is_last: bool) -> list[int]:
        """Bytes of each region in the body of a WRITE of ``num_tokens`` tokens of a layer.

        ``is_last``: the last token of the prompt is among them; rows per sequence travel then.
        """
        return [
            self.row_nbytes(region) * (num_tokens if region.per == PER_TOKEN else is_last)
            for region in self.layers[layer].regions
        ]

    def write_nbytes(self, layer: int, num_tokens: int, *, is_last: bool = False) -> int:
        """Body bytes of such a WRITE."""
        return sum(self.region_nbytes(layer, num_tokens, is_last=is_last))

    def prompt_nbytes(self, num_tokens: int) -> int:
        """Body bytes of all WRITEs of a prompt: each layer from its first needed token on."""
        return sum(
            self.write_nbytes(
                index, num_tokens - layer.first_needed_token(num_tokens), is_last=True
            )
            for index, layer in enumerate(self.layers)
        )

    def shape_word(self, layer: int, num_tokens: int) -> int:
        """The header's shape word of a WRITE: of the layer's first region.

        LocalProtocolError if ``num_tokens`` does not fit.
        """
        region = self.layers[layer].regions[0]
        return Shape(1, region.num_heads, region.head_dim, num_tokens).encode()

    def as_wire(self, dtype: str = "", num_heads: int = 0) -> "KvGeometry":
        """The same in another dtype ("": as it is), or with ``num_heads`` of the heads (0: all).

        This is what a peer with another dtype or another tensor-parallel degree sends.
        LocalProtocolError: unknown dtype; ``num_heads`` of regions that have fewer.
        """
        layers = self.layers
        if num_heads:
            for region in self._regions():
                if num_heads > region.num_heads:
                    raise LocalProtocolError(
                        f"geometry: {num_heads} heads asked for, region {region.name} has "
                        f"{region.num_heads}"
                    )
            layers = tuple(
                replace(
                    layer,
                    regions=tuple(replace(region, num_heads=num_heads) for region in layer.regions),
                )
                for layer in layers
            )
        return KvGeometry(layers, dtype or self.dtype)

    def facts(self) -> dict[str, str | int]:
        """What HELLO declares about the geometry; equal on both sides or the handshake fails.

        ``num_kv_heads`` and ``head_dim`` only where all regions agree; ``regions_digest`` covers
        every name, shape and window.
        """
        facts: dict[str, str | int] = {
            "num_layers": self.num_layers,
            "dtype": self.dtype,
            "layout": LAYOUT,
            "regions_digest": self.regions_digest(),
        }
        for name, values in (
            ("num_kv_heads", {region.num_heads for region in self._regions()}),
            ("head_dim", {region.head_dim for region in self._regions()}),
        ):
            if len(values) == 1:
                facts[name] = values.pop()
        return facts

    def regions_digest(self) -> str:
        """16 hex digits, xxh3-64 of the canonical JSON of all names, shapes and windows.

        ``[[layer name, window_tokens, [[region name, num_heads, head_dim, per], ...]], ...]``
        without spaces. Source: docs/wire.md section 5.2.
        """
        plain = [
            [
                layer.name,
                layer.window_tokens,
                [[r.name, r.num_heads, r.head_dim, r.per] for r in layer.regions],
            ]
            for layer in self.layers
        ]
        text = json.dumps(plain, separators=(",", ":"), ensure_ascii=True)
        return xxhash.xxh3_64_hexdigest(text.encode("ascii"))

    def _regions(self) -> list[Region]:
        return [region for layer in self.layers for region in layer.regions]

    def _only(self, name: str, values: set[int]) -> int:
        if len(values) != 1:
            raise LocalProtocolError(f"geometry: the regions have different {name}")
        return next(iter(values))


def _check_count(name: str, count: int, limit: int) -> None:
    if not 1 <= count <= limit:
        raise LocalProtocolError(
            f"geometry: {name} is {count}, outside 1..{limit}; "
            "the wire format cannot carry this model"
        )


def _check_names(what: str, names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        raise LocalProtocolError(
            f"geometry: {what} has {len(set(names))} distinct names for {len(names)}; "
            "give each one name"
        )
    for name in names:
        if not (1 <= len(name) <= MAX_LAYER_NAME_NBYTES and name.isascii() and name.isprintable()):
            raise LocalProtocolError(
                f"geometry: {what}: {name!r} is not 1..{MAX_LAYER_NAME_NBYTES} printable ASCII "
                "characters"
            )


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """Where each row of each region lies in one worker's KV pool.

    Args:
        geometry: the model's.
        num_blocks: blocks in the pool, at least 1.
        block_size: tokens per block, at least 1.

    Raises LocalProtocolError naming the first field that breaks these rules.
    """

    geometry: KvGeometry
    num_blocks: int
    block_size: int
    # Where each region begins, flat over layers, and behind the last one the end.
    _starts: tuple[int, ...] = field(init=False, repr=False)
    _first_regions: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size"):
            if getattr(self, name) < 1:
                raise LocalProtocolError(
                    f"pool layout: {name} is {getattr(self, name)}; it must be at least 1"
                )
        layers = self.geometry.layers
        sizes = (
            self.geometry.row_nbytes(region)
            * (self.num_slots if region.per == PER_TOKEN else self.num_blocks)
            for layer in layers
            for region in layer.regions
        )
        object.__setattr__(self, "_starts", tuple(accumulate(sizes, initial=0)))
        counts = (len(layer.regions) for layer in layers)
        object.__setattr__(self, "_first_regions", tuple(accumulate(counts, initial=0)))

    @property
    def num_slots(self) -> int:
        """Token positions in the pool."""
        return self.num_blocks * self.block_size

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return self._starts[-1]

    def start(self, layer: int, region: int) -> int:
        """Byte offset of a region; the indices are below their counts, unchecked."""
        return self._starts[self._first_regions[layer] + region]

    def pieces(
        self,
        layer: int,
        block_table: Sequence[int],
        first_token: int,
        num_tokens: int,
        *,
        is_last: bool = False,
    ) -> list[list[tuple[int, int]]]:
        """(byte offset, nbytes) pieces of a token range of one layer, per region in token order.

        Together they have the sizes of ``KvGeometry.region_nbytes``. LocalProtocolError if the
        range reaches outside the block table.
        """
        runs = slot_runs(block_table, first_token, num_tokens, self.block_size)
        pieces: list[list[tuple[int, int]]] = []
        for index, region in enumerate(self.geometry.layers[layer].regions):
            base = self.start(layer, index)
            nbytes = self.geometry.row_nbytes(region)
            if region.per == PER_TOKEN:
                pieces.append([(base + slot * nbytes, count * nbytes) for slot, count in runs])
            elif is_last:
                pieces.append([(base + block_table[0] * nbytes, nbytes)])
            else:
                pieces.append([])
        return pieces


def slot_runs(
    block_table: Sequence[int], first_token: int, num_tokens: int, block_size: int
) -> list[tuple[int, int]]:
    """Slots of tokens ``first_token .. first_token + num_tokens - 1``, as (slot, num_tokens) runs.

    Neighbouring blocks are merged, so a block table in ascending order gives one run. In token
    order; the run lengths add up to ``num_tokens``. LocalProtocolError if the range is negative
    or reaches beyond the block table.
    """
    end_token = first_token + num_tokens
    if first_token < 0 or num_tokens < 0 or end_token > len(block_table) * block_size:
        raise LocalProtocolError(
            f"tokens {first_token}..{end_token} are outside a block table of "
            f"{len(block_table)} blocks of {block_size} tokens"
        )
    if not num_tokens:
        return []
    first_block = first_token // block_size
    block_ids = list(block_table[first_block : -(-end_token // block_size)])
    runs: list[tuple[int, int]] = []
    token, start = first_token, 0
    while start < len(block_ids):
        end = _neighbours_end(block_ids, start)
        run = min((first_block + end) * block_size, end_token) - token
        runs.append((block_ids[start] * block_size + token % block_size, run))
        token, start = token + run, end
    return runs


def _neighbours_end(block_ids: list[int], start: int) -> int:
    """Index behind the blocks from ``start`` on of which each follows the one before it.

    Gallops, so that a long run costs a few comparisons of lists and no loop over its blocks.
    """
    shift = block_ids[start] - start
    end, step = start + 1, 1
    while step and end < len(block_ids):
        until = min(end + step, len(block_ids))
        if block_ids[end:until] == list(range(shift + end, shift + until)):
            end, step = until, 2 * step
        else:
            step //= 2
    return end
