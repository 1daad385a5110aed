"""Tiny models on disk, and engines over them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvengine.engine import Engine
from tests.kvengine.families import CONFIGS, write_tiny_model


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: write_tiny_model(family, root / family) for family in CONFIGS}


@pytest.fixture(scope="session")
def load_engine(model_dirs: dict[str, Path]) -> Callable[..., Engine]:
    def load(family: str = "llama", **options: object) -> Engine:
        settings = {"num_threads": 1, "kv_pool_nbytes": 1 << 20, "block_size": 8} | options
        return Engine.load(model_dirs[family], **settings)  # type: ignore[arg-type]

    return load
