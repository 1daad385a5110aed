"""A geometry travels and comes back as it was."""

import pytest

from kvproto.description import described_geometry, layer_records
from kvproto.errors import Malformed
from kvproto.geometry import KvGeometry, Layer, Region
from kvproto.messages import LayerRecord, RegionRecord


def test_a_geometry_comes_back_as_it_was():
    geometry = KvGeometry(
        (
            Layer("layers.0", (Region("k", 8, 128), Region("v", 8, 64)), 32),
            Layer("layers.1", (Region("latent", 1, 576),)),
            Layer("layers.2", (Region("state", 4, 16, "sequence"),)),
        ),
        "bfloat16",
    )
    assert described_geometry(layer_records(geometry), "bfloat16") == geometry


@pytest.mark.parametrize(
    ("layers", "dtype", "words"),
    [
        ([], "float32", "num_layers is 0"),
        ([LayerRecord("a", [])], "float32", "number of regions of a is 0"),
        ([LayerRecord("a", [RegionRecord("k", 1, 1, "token")])], "int4", "dtype 'int4' is unknown"),
    ],
)
def test_what_no_model_looks_like_is_malformed(layers, dtype, words):
    with pytest.raises(Malformed, match=f"layers: describe no KV cache: .*{words}"):
        described_geometry(layers, dtype)
