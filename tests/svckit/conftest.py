"""Programs that the tests write and start: signals and exits need a process of their own."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import svckit

DEADLINE_S = 30
SOURCE_ROOT = Path(svckit.__file__).parent.parent

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start_program(tmp_path: Path) -> Iterator[Start]:
    """Start a Python program given as text; whatever is left is killed after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(
        source: str, *args: str, env: dict[str, str] | None = None, pass_fds: tuple[int, ...] = ()
    ) -> subprocess.Popen[str]:
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PD_")}
        paths = os.pathsep.join([str(SOURCE_ROOT), str(tmp_path)])
        process = subprocess.Popen(
            [sys.executable, str(path), *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**kept, "PYTHONPATH": paths, "PYTHONUTF8": "1", **(env or {})},
            pass_fds=pass_fds,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=DEADLINE_S)
