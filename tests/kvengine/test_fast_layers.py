from pathlib import Path
from typing import Any

import pytest
import torch

from kvengine import fast_layers
from kvengine.fast_layers import drops_rows, make_fast
from kvengine.fused_layer import FusedDecoderLayer
from kvengine.model import load_model
from kvengine.packed_linear import PackedLinear, can_pack
from tests.kvengine.families import CONFIGS, FUSED_FAMILIES


@pytest.mark.parametrize("family", CONFIGS)
def test_known_families_are_fused_and_others_packed(
    family: str, model_dirs: dict[str, Path]
) -> None:
    model, facts = load_model(model_dirs[family], "float32")
    assert make_fast(model, facts.geometry) == []
    kinds = {type(layer) for layer in model.base_model.layers}
    assert (kinds == {FusedDecoderLayer}) == (family in FUSED_FAMILIES)
    assert drops_rows(model) == (family in FUSED_FAMILIES)
    left = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert left == []
    assert isinstance(model.get_output_embeddings(), PackedLinear)


def test_a_tied_head_is_packed_beside_the_embeddings(model_dirs: dict[str, Path]) -> None:
    model, facts = load_model(model_dirs["llama"], "float32")
    weight = model.get_input_embeddings().weight.clone()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    make_fast(model, facts.geometry)
    head = model.get_output_embeddings()
    assert isinstance(head, PackedLinear)
    assert torch.equal(model.get_input_embeddings().weight, weight)
    x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(head(x), x @ weight.t(), rtol=1e-5, atol=1e-4)


def test_the_original_weights_are_dropped(model_dirs: dict[str, Path]) -> None:
    model, facts = load_model(model_dirs["qwen2"], "float32")
    make_fast(model, facts.geometry)
    names = [name for name, _ in model.named_parameters()]
    assert names == ["model.embed_tokens.weight", "model.norm.weight"]


def test_a_layer_that_computes_something_else_is_kept(
    model_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(FusedDecoderLayer):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.scaling *= 1.5

    monkeypatch.setattr(fast_layers, "FusedDecoderLayer", Wrong)
    model, facts = load_model(model_dirs["llama"], "float32")
    fallbacks = make_fast(model, facts.geometry)
    assert len(fallbacks) == 3
    assert "Layer 0 keeps transformers' code" in fallbacks[0]
    assert not any(isinstance(m, FusedDecoderLayer) for m in model.modules())
    assert not drops_rows(model)


def test_other_dtypes_keep_their_layers(model_dirs: dict[str, Path]) -> None:
    model, facts = load_model(model_dirs["llama"], "bfloat16")
    assert not can_pack(torch.bfloat16)
    assert make_fast(model, facts.geometry) == []
    assert any(isinstance(m, torch.nn.Linear) for m in model.modules())


@pytest.mark.parametrize("has_row_copy", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("num_rows", [1, 7, 130])
@pytest.mark.parametrize("width", [48, 256])
def test_packed_linear_and_its_addition(
    has_row_copy: bool, has_bias: bool, num_rows: int, width: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(width, 32, generator=generator)
    bias = torch.randn(width, generator=generator) if has_bias else None
    x = torch.randn(num_rows, 32, generator=generator)
    other = torch.randn(num_rows, width, generator=generator)
    expected = torch.nn.functional.linear(x, weight, bias)
    linear = PackedLinear(weight, bias, has_row_copy=has_row_copy)
    torch.testing.assert_close(linear(x), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(linear.plus(x, other), expected + other, rtol=1e-5, atol=1e-4)
