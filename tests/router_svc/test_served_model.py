"""What is read from a model folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvproto.geometry import config_digest
from router_svc.served_model import ServedModel, load_served_model
from svckit.errors import ServiceError

CONFIG: dict[str, Any] = {"max_position_embeddings": 64, "vocab_size": 10, "eos_token_id": 2}


def write(folder: Path, config: object, generation: object = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if generation is not None:
        path = folder / "generation_config.json"
        path.write_text(json.dumps(generation), encoding="utf-8")
    return folder


def test_facts(tmp_path: Path) -> None:
    folder = tmp_path / "small-chat"
    folder.mkdir()
    model = load_served_model(write(folder, CONFIG))
    assert model == ServedModel(
        name="small-chat",
        config_digest=config_digest(CONFIG),
        max_model_len=64,
        vocab_size=10,
        eos_token_ids=(2,),
        created_at_unix_s=int((folder / "config.json").stat().st_mtime),
    )
    assert load_served_model(folder, name="org/other").name == "org/other"


@pytest.mark.parametrize(
    ("generation", "eos_token_ids"),
    [({"eos_token_id": [3, 4]}, (3, 4)), ({"eos_token_id": 5}, (5,)), ({}, (2,)), (None, (2,))],
)
def test_generation_config_wins(
    tmp_path: Path, generation: object, eos_token_ids: tuple[int, ...]
) -> None:
    assert load_served_model(write(tmp_path, CONFIG, generation)).eos_token_ids == eos_token_ids


def test_no_eos_at_all(tmp_path: Path) -> None:
    assert load_served_model(write(tmp_path, CONFIG | {"eos_token_id": None})).eos_token_ids == ()


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ([], "JSON object"),
        ({"vocab_size": 10}, "max_position_embeddings"),
        (CONFIG | {"vocab_size": 0}, "vocab_size"),
        (CONFIG | {"vocab_size": True}, "vocab_size"),
        (CONFIG | {"eos_token_id": "x"}, "eos_token_id"),
        (CONFIG | {"rope": float("nan")}, "plain JSON"),
    ],
)
def test_refusals(tmp_path: Path, config: object, text: str) -> None:
    with pytest.raises(ServiceError, match=text):
        load_served_model(write(tmp_path, config))


def test_missing_or_broken_file(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="--model"):
        load_served_model(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff")
    with pytest.raises(ServiceError, match=r"config\.json"):
        load_served_model(tmp_path)
