"""The shape word of the header: four counts in 64 bits.

    layers:12 | kv_heads:12 | head_dim:12 | seq_len:28      layers in the most significant bits

28 bits of sequence reach 268 million tokens. 0 in frames that carry no tensor.
Source: docs/wire.md section 2.
"""

from typing import Final, NamedTuple

from kvproto.errors import LocalProtocolError

MAX_LAYERS: Final = (1 << 12) - 1
MAX_KV_HEADS: Final = (1 << 12) - 1
MAX_HEAD_DIM: Final = (1 << 12) - 1
MAX_SEQ_LEN: Final = (1 << 28) - 1


class Shape(NamedTuple):
    """What the tensor bytes of one frame are: counts, not bytes."""

    layers: int
    kv_heads: int
    head_dim: int
    seq_len: int

    def encode(self) -> int:
        """Pack into the shape word; LocalProtocolError if a count does not fit its bits."""
        limits = (MAX_LAYERS, MAX_KV_HEADS, MAX_HEAD_DIM, MAX_SEQ_LEN)
        for name, value, limit in zip(self._fields, self, limits, strict=True):
            if not 0 <= value <= limit:
                raise LocalProtocolError(
                    f"shape word: {name} is {value}, outside 0..{limit}; this model or sequence "
                    "does not fit the wire format"
                )
        return self.layers << 52 | self.kv_heads << 40 | self.head_dim << 28 | self.seq_len

    @classmethod
    def decode(cls, word: int) -> "Shape":
        """Unpack a shape word, an unsigned 64-bit integer. Every word is a valid shape."""
        return cls(
            word >> 52 & MAX_LAYERS,
            word >> 40 & MAX_KV_HEADS,
            word >> 28 & MAX_HEAD_DIM,
            word & MAX_SEQ_LEN,
        )
