"""What the KV cache of a model looks like, and where each token of it lies in a pool.

A *region* is the K or the V of one layer: region 0 is K, region 1 is V. A *slot* is one token
position of the pool, ``block_id * block_size + offset``. A pool is one buffer:

    pool[layer][region][slot]  ->  token_nbytes bytes, shape [num_kv_heads, head_dim]

so a run of neighbouring slots is one contiguous piece of memory, and merging neighbouring blocks
makes few large pieces. The geometry is agreed in the handshake; the block size is not, because
coordinates on the wire are logical (layer name, region, token index).

Pure arithmetic: no buffer is touched here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import xxhash

from kvproto.errors import LocalProtocolError
from kvproto.shape import MAX_HEAD_DIM, MAX_KV_HEADS, MAX_LAYERS, Shape

KEY_REGION: Final = 0
VALUE_REGION: Final = 1
NUM_REGIONS: Final = 2
LAYOUT: Final = "layer/region/token/head"
MAX_LAYER_NAME_NBYTES: Final = 128
# The names torch uses, without "torch.". Sizes in bytes of one element.
DTYPE_NBYTES: Final[Mapping[str, int]] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
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
class KvGeometry:
    """Shape and names of one model's KV cache.

    Args:
        num_layers: layers with a KV cache, 1..4095.
        num_kv_heads: K and V heads per layer, 1..4095.
        head_dim: elements per head, 1..4095.
        dtype: a key of ``DTYPE_NBYTES``.
        layer_names: one distinct name per layer, 1..128 bytes of printable ASCII; a WRITE names
            its layer by it, never by position.

    Raises LocalProtocolError naming the first field that breaks these rules.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    layer_names: tuple[str, ...]

    def __post_init__(self) -> None:
        for name, limit in (
            ("num_layers", MAX_LAYERS),
            ("num_kv_heads", MAX_KV_HEADS),
            ("head_dim", MAX_HEAD_DIM),
        ):
            if not 1 <= getattr(self, name) <= limit:
                raise LocalProtocolError(
                    f"geometry: {name} is {getattr(self, name)}, outside 1..{limit}; "
                    "the wire format cannot carry this model"
                )
        if self.dtype not in DTYPE_NBYTES:
            raise LocalProtocolError(
                f"geometry: dtype {self.dtype!r} is unknown; use one of {', '.join(DTYPE_NBYTES)}"
            )
        if len(self.layer_names) != self.num_layers or len(set(self.layer_names)) != len(
            self.layer_names
        ):
            raise LocalProtocolError(
                f"geometry: layer_names has {len(set(self.layer_names))} distinct names for "
                f"{self.num_layers} layers; give each layer one name"
            )
        for layer_name in self.layer_names:
            if not (
                1 <= len(layer_name) <= MAX_LAYER_NAME_NBYTES
                and layer_name.isascii()
                and layer_name.isprintable()
            ):
                raise LocalProtocolError(
                    f"geometry: layer name {layer_name!r} is not 1..{MAX_LAYER_NAME_NBYTES} "
                    "printable ASCII characters"
                )

    @property
    def element_nbytes(self) -> int:
        """Bytes of one element of the dtype."""
        return DTYPE_NBYTES[self.dtype]

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token in one region of one layer."""
        return self.num_kv_heads * self.head_dim * self.element_nbytes

    @property
    def kv_token_nbytes(self) -> int:
        """Bytes of one token over K and V of all layers."""
        return NUM_REGIONS * self.num_layers * self.token_nbytes

    def write_nbytes(self, num_tokens: int) -> int:
        """Body bytes of a WRITE of ``num_tokens``: K then V of one layer."""
        return NUM_REGIONS * num_tokens * self.token_nbytes

    def shape_word(self, seq_len: int, *, layers: int | None = None) -> int:
        """The header's shape word for ``seq_len`` tokens of ``layers`` layers (default: all).

        LocalProtocolError if ``seq_len`` or ``layers`` does not fit.
        """
        num_layers = self.num_layers if layers is None else layers
        return Shape(num_layers, self.num_kv_heads, self.head_dim, seq_len).encode()

    def facts(self) -> dict[str, str | int]:
        """What HELLO declares about the geometry; equal on both sides or the handshake fails."""
        return {
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "dtype": self.dtype,
            "layout": LAYOUT,
        }


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """Where each token of each region lies in one worker's KV pool.

    Args:
        geometry: the model's.
        num_blocks: blocks in the pool, at least 1.
        block_size: tokens per block, at least 1.

    Raises LocalProtocolError naming the first field that breaks these rules.
    """

    geometry: KvGeometry
    num_blocks: int
    block_size: int

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size"):
            if getattr(self, name) < 1:
                raise LocalProtocolError(
                    f"pool layout: {name} is {getattr(self, name)}; it must be at least 1"
                )

    @property
    def num_slots(self) -> int:
        """Token positions in the pool."""
        return self.num_blocks * self.block_size

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_slots * self.geometry.kv_token_nbytes

    def offset(self, layer: int, region: int, slot: int) -> int:
        """Byte offset of one token; the arguments are indices below their counts, unchecked."""
        index = (layer * NUM_REGIONS + region) * self.num_slots + slot
        return index * self.geometry.token_nbytes

    def spans(
        self, layer: int, region: int, runs: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """(byte offset, nbytes) of each slot run (see ``slot_runs``) in one region."""
        token_nbytes = self.geometry.token_nbytes
        base = self.offset(layer, region, 0)
        return [
            (base + slot * token_nbytes, num_tokens * token_nbytes) for slot, num_tokens in runs
        ]


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
    runs: list[tuple[int, int]] = []
    token = first_token
    while token < end_token:
        offset = token % block_size
        run = min(block_size - offset, end_token - token)
        slot = block_table[token // block_size] * block_size + offset
        if runs and runs[-1][0] + runs[-1][1] == slot:
            runs[-1] = (runs[-1][0], runs[-1][1] + run)
        else:
            runs.append((slot, run))
        token += run
    return runs
