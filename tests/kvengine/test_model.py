import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvengine.checkpoint import weights_digest
from kvengine.engine import Engine
from kvengine.errors import ModelLoadError
from kvengine.model import load_model
from kvproto.geometry import config_digest

Edit = Callable[..., Path]


@pytest.fixture
def edited(tmp_path: Path, model_dirs: dict[str, Path]) -> Edit:
    """Copy a tiny model and change its config.json."""

    def edit(family: str = "llama", **changes: Any) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(model_dirs[family], folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
        return folder

    return edit


def test_facts_of_a_model(model_dirs: dict[str, Path]) -> None:
    _, facts = load_model(model_dirs["qwen3"], "float32")
    assert facts.name == "qwen3"
    assert (facts.geometry.num_layers, facts.geometry.num_kv_heads) == (3, 2)
    assert (facts.geometry.head_dim, facts.geometry.dtype) == (16, "float32")
    assert facts.geometry.layer_names[2] == "model.layers.2.self_attn"
    assert (facts.vocab_size, facts.max_model_len, facts.eos_token_ids) == (211, 512, (1,))
    config = json.loads((model_dirs["qwen3"] / "config.json").read_text(encoding="utf-8"))
    assert facts.facts() == {
        **facts.geometry.facts(),
        "weights_digest": weights_digest(model_dirs["qwen3"]),
        "config_digest": config_digest(config),
    }
    assert facts.limited(100).max_model_len == 100
    assert facts.limited(1000).max_model_len == 512


def test_several_end_tokens(edited: Edit) -> None:
    folder = edited()
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [5, 9]}), encoding="utf-8")
    assert load_model(folder, "float32")[1].eos_token_ids == (5, 9)


def test_layer_names_do_not_depend_on_fast_layers(load_engine: Callable[..., Engine]) -> None:
    fast, slow = load_engine(), load_engine(use_fast_layers=False)
    assert fast.facts == slow.facts


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        load_model(tmp_path / "nowhere", "float32")


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="has no config"):
        load_model(tmp_path, "float32")


def test_a_folder_without_weights(edited: Edit) -> None:
    folder = edited()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="safetensors"):
        load_model(folder, "float32")


def test_a_broken_config(edited: Edit) -> None:
    folder = edited()
    (folder / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelLoadError, match="cannot be read as JSON"):
        load_model(folder, "float32")


def test_an_unknown_architecture(edited: Edit) -> None:
    with pytest.raises(ModelLoadError, match="does not know the architecture"):
        load_model(edited(model_type="no_such_model"), "float32")


def test_weights_that_do_not_fit_the_config(edited: Edit) -> None:
    with pytest.raises(ModelLoadError, match="do not fit"):
        load_model(edited(num_hidden_layers=4), "float32")


@pytest.mark.parametrize(
    ("family", "changes", "feature"),
    [
        ("gemma3", {"attn_logit_softcapping": 50.0}, "softcapping"),
        ("gemma3", {"use_bidirectional_attention": True}, "bidirectional"),
        ("qwen3", {"layer_types": ["linear_attention"] * 3}, "linear_attention"),
    ],
)
def test_unsupported_attention_is_named(
    family: str, changes: dict[str, Any], feature: str, edited: Edit
) -> None:
    with pytest.raises(ModelLoadError, match=feature):
        load_model(edited(family, **changes), "float32")


def test_a_tokenizer_larger_than_the_model(edited: Edit) -> None:
    folder = edited()
    tokenizer = {
        "model": {"vocab": {"a": 0, "b": 210}},
        "added_tokens": [{"id": 211, "content": "<x>"}],
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(ModelLoadError, match="token ids up to 211"):
        load_model(folder, "float32")
    del tokenizer["added_tokens"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    load_model(folder, "float32")
