"""The folder with the logs of one ``pdctl up``, and the file that says it is ready."""

import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ops.child import Child

_MAX_KEPT_RUNS: Final = 10


def make_run_folder(cache: Path) -> Path:
    """Make a new folder below ``cache``/runs and remove all but the newest ones."""
    runs = cache / "runs"
    # Named by time so that the names sort, with the pid for two starts in one second.
    folder = runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir(parents=True)
    for old in sorted(path for path in runs.iterdir() if path.is_dir())[:-_MAX_KEPT_RUNS]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def write_ready_file(path: Path, url: str, run_dir: Path, children: Sequence[Child]) -> None:
    """Write the JSON that scripts wait for, whole or not at all."""
    content: dict[str, Any] = {
        "url": url,
        "pid": os.getpid(),
        "run_dir": str(run_dir),
        "processes": [
            {
                "name": child.name,
                "pid": child.pid,
                "ready_url": child.spec.ready_url,
                "log": str(child.log_path),
            }
            for child in children
        ],
    }
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
