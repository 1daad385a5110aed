"""What the router must know of the model: read from its folder, no weights, no torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvproto.errors import LocalProtocolError
from kvproto.geometry import config_digest
from svckit.errors import ServiceError


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The one model this router serves.

    `max_model_len` is the context in tokens, prompt and output together. `config_digest` is what
    every worker must declare too. `created_at_unix_s` is the folder's config time, for
    GET /v1/models.
    """

    name: str
    config_digest: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    created_at_unix_s: int


def load_served_model(model_dir: Path, *, name: str = "") -> ServedModel:
    """Read ``config.json`` and ``generation_config.json`` of `model_dir`.

    `name` defaults to the folder's name. Raises ServiceError, checked in this order: folder or
    config.json missing or not JSON, max_position_embeddings, vocab_size, end-of-sequence ids.
    """
    config_path = model_dir / "config.json"
    config = _read_json(config_path)
    generation_path = model_dir / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    try:
        digest = config_digest(config)
    except LocalProtocolError as exc:
        raise ServiceError(f"Cannot use {config_path}: {exc}") from exc
    return ServedModel(
        name=name or model_dir.resolve().name,
        config_digest=digest,
        max_model_len=_positive(config, "max_position_embeddings", config_path),
        vocab_size=_positive(config, "vocab_size", config_path),
        # generation_config.json wins: chat models end turns with more ids than config.json names.
        eos_token_ids=_eos_token_ids(generation) or _eos_token_ids(config),
        created_at_unix_s=int(config_path.stat().st_mtime),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ServiceError(
            f"Cannot read {path}: {exc}. Give --model a folder with config.json and tokenizer.json."
        ) from exc
    if not isinstance(value, dict):
        raise ServiceError(f"{path} does not hold a JSON object. Convert the model again.")
    return value


def _positive(config: dict[str, Any], key: str, path: Path) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ServiceError(f"{path} has no positive integer {key!r}. Convert the model again.")
    return value


def _eos_token_ids(config: dict[str, Any]) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and item >= 0 for item in ids):
        raise ServiceError(f"eos_token_id {value!r} is not a token id or a list of them.")
    return tuple(ids)
