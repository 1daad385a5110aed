"""The command: ``python -m router_svc``."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "router_svc", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_failed_start_is_one_sentence(tmp_path: Path) -> None:
    done = run("--model", str(tmp_path), "--listen-port", "0", "--control-port", "0")
    assert done.returncode == 1
    assert "config.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_names_the_settings() -> None:
    done = run("--help")
    assert done.returncode == 0
    for flag in ("--api-key-file", "--control-port", "--resume-timeout-s", "--model"):
        assert flag in done.stdout
    assert "--admin-port" not in done.stdout
