"""What all tests share: where the default model is, and tiny models made on the spot."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from ops.model_cache import default_model_dir as cached_model_dir
from tests.no_pickle import GUARD

# Before any test module is loaded. ``test_no_pickle`` also reads what was loaded before.
GUARD.install()

# No test asserts a time. The ordinary run repeats itself exactly; the long mode explores.
settings.register_profile("ordinary", deadline=None, derandomize=True)
settings.register_profile("long", deadline=None, max_examples=2000)
settings.load_profile("long" if os.environ.get("PD_LONG_TESTS") == "1" else "ordinary")


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """Folder of the default model. Its absence is a failure with an instruction, not a skip."""
    folder = Path(os.environ.get("PD_TEST_MODEL") or cached_model_dir())
    if not (folder / "model.safetensors").is_file():
        pytest.fail(
            f"The default model is not in {folder}; run `pdctl model fetch`, or deselect the tests "
            "that need it with -m 'not model'."
        )
    return folder


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny model by family."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            # Here, since it loads torch: most tests need none, and there are slow machines.
            from tests.tiny_models import make_tiny_model

            made[family] = make_tiny_model(family, tmp_path_factory.mktemp("models") / family)
        return made[family]

    return get


@pytest.fixture(autouse=True)
def no_unsafe_deserialiser() -> Iterator[None]:
    """Fails the test in which a module of ours used pickle, also if the error was swallowed."""
    yield
    assert GUARD.take() == []
