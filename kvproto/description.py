"""A geometry as it travels in DESCRIPTION and lies in KV files, and back."""

from collections.abc import Sequence

from kvproto.errors import LocalProtocolError, Malformed
from kvproto.geometry import KvGeometry, Layer, Region
from kvproto.messages import Description, LayerRecord, RegionRecord


def layer_records(geometry: KvGeometry) -> list[LayerRecord]:
    """The layers of a geometry, in the order of the model."""
    return [
        LayerRecord(
            layer.name,
            [RegionRecord(r.name, r.num_heads, r.head_dim, r.per) for r in layer.regions],
            layer.window_tokens,
        )
        for layer in geometry.layers
    ]


def described_geometry(layers: Sequence[LayerRecord], dtype: str) -> KvGeometry:
    """The geometry that a peer or a file describes.

    Malformed("layers") if no model can look like this: no layer, a name twice, no region, an
    unknown dtype.
    """
    try:
        return KvGeometry(
            tuple(
                Layer(
                    record.name,
                    tuple(Region(r.name, r.num_heads, r.head_dim, r.per) for r in record.regions),
                    record.window_tokens,
                )
                for record in layers
            ),
            dtype,
        )
    except LocalProtocolError as exc:
        raise Malformed("layers", f"describe no KV cache: {exc}") from exc


def describe(geometry: KvGeometry, *, model: str, max_model_len: int) -> Description:
    """The DESCRIPTION of a worker's KV."""
    return Description(model, max_model_len, geometry.dtype, layer_records(geometry))
