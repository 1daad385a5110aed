"""apply and rollback are killed at every step, for real, and the tree comes back byte for byte."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops.node.fact_trees import write_tree

TREE = {
    "/etc/default/locale": "LANG=zh_CN.GBK\n",
    "/etc/locale.gen": "# nothing\n",
    "/usr/lib/kept": "theirs\n",
    "/proc/sys/net/core/rmem_max": "212992\n",
    "/sys/kernel/mm/choice": "always [madvise] never\n",
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("what", "least", "folder"),
    [
        pytest.param("apply", 60, "/var/lib/pdserve/models", marks=pytest.mark.long),
        ("apply", 60, "/var/lib"),
        pytest.param("apply", 60, "/etc", marks=pytest.mark.long),
        ("rollback", 40, "/var/lib"),
    ],
)
def test_killed_at_every_step(
    what: str, least: int, folder: str, tmp_path: Path, program_env: dict[str, str]
) -> None:
    """With the folders of the journal there in part, up to its parent, and not at all."""
    write_tree(tmp_path, TREE)
    (tmp_path / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
    result = subprocess.run(
        [sys.executable, "-m", "tests.ops.node.kill_everywhere", what, str(tmp_path)],
        capture_output=True,
        encoding="utf-8",
        env=program_env,
        cwd=program_env["PYTHONPATH"],
        timeout=55,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert int(result.stdout) >= least
