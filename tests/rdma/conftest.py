"""What the tests that need RDMA devices share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rdma.network import Network

_DEVICES = Path("/sys/class/infiniband")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests out unless -m asks for them; ``ops.checks`` has a step for them."""
    if "rdma" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("rdma")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session", autouse=True)
def _devices() -> None:
    """Outside the rig these tests fail with an instruction; they are not skipped as if green."""
    if not all((_DEVICES / name).exists() for name in ("rxe0", "rxe1")):
        pytest.fail("The RDMA devices rxe0 and rxe1 are not here; run `python -m tests.rdma`.")


@pytest.fixture
def network() -> Iterator[Network]:
    """The wire between rxe0 and rxe1, sound again after the test."""
    wire = Network()
    try:
        yield wire
    finally:
        wire.heal()
