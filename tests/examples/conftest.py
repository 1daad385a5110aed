"""The JavaScript implementation, called from Python. Skipped where Node is missing."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MIN_NODE_VERSION = 20
_HARNESS = Path(__file__).parent / "harness.mjs"

Harness = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


@pytest.fixture(scope="session")
def node() -> str:
    """Path of Node."""
    path = shutil.which("node")
    if path is None:
        pytest.skip(f"node is not installed; the JavaScript example needs {MIN_NODE_VERSION}")
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    if int(answer.stdout.strip().lstrip("v").partition(".")[0]) < MIN_NODE_VERSION:
        pytest.skip(f"node is {answer.stdout.strip()}; the example needs {MIN_NODE_VERSION}")
    return path


@pytest.fixture(scope="session")
def harness(node: str) -> Harness:
    """Runs tasks, see harness.mjs, and returns what each of them gave."""

    def run(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        answer = subprocess.run(
            [node, str(_HARNESS)],
            input=json.dumps(tasks, default=_plain),
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
        assert answer.returncode == 0, answer.stderr
        results: list[dict[str, Any]] = json.loads(answer.stdout, object_hook=_revive)
        return results

    return run


def _plain(value: object) -> dict[str, str]:
    assert isinstance(value, bytes), value
    return {"bytes": value.hex()}


def _revive(pairs: dict[str, Any]) -> Any:
    match pairs:
        case {"bytes": str(digits), **rest} if not rest:
            return bytes.fromhex(digits)
        case {"big": str(digits), **rest} if not rest:
            return int(digits)
    return pairs
