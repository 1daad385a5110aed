"""A big-endian Python on this machine: s390x packages of Debian in a folder, run by qemu.

Nothing is installed. ``python -m tests.kvproto.big_endian.fetch`` makes the folder.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ops.cache_folder import cache_folder

FETCH_COMMAND: Final = "python -m tests.kvproto.big_endian.fetch"
QEMU_NAMES: Final = ("qemu-s390x-static", "qemu-s390x")
REPOSITORY: Final = Path(__file__).resolve().parents[3]
_CHECK: Final = "import sys, asyncio, msgpack, xxhash; print(sys.byteorder, *sys.version_info[:2])"
_CHECK_TIMEOUT_S: Final = 60.0


class RigUnusable(Exception):
    """No rig, or one that does not run; the text says why and which command makes one."""


def rig_folder() -> Path:
    """Where the rig is kept, whether it is there or not."""
    return cache_folder(os.environ) / "s390x"


@dataclass(frozen=True, slots=True)
class Rig:
    """What it takes to run big-endian Python.

    Args:
        qemu: user-mode emulator of s390x.
        root: folder with the unpacked packages.
    """

    qemu: Path
    root: Path

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command that runs big-endian Python with these arguments."""
        python = self.root / "usr" / "bin" / "python3"
        return [str(self.qemu), "-L", str(self.root), str(python), *arguments]

    def environ(self) -> dict[str, str]:
        """Its environment: this repository's modules, and nothing of this machine's Python."""
        return {"PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "1"}

    def check(self) -> str:
        """Run it, and return its byte order and version; RigUnusable if it is of no use."""
        try:
            answer = subprocess.run(
                self.command(["-c", _CHECK]),
                env=self.environ(),
                capture_output=True,
                text=True,
                timeout=_CHECK_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as exc:
            raise RigUnusable(f"{self.qemu} cannot run: {exc}; try {FETCH_COMMAND}") from exc
        order, *version = answer.stdout.split() or [""]
        if answer.returncode or order != "big" or [int(part) for part in version] < [3, 11]:
            said = answer.stderr.strip().rpartition("\n")[2] or answer.stdout.strip()
            raise RigUnusable(
                f"the rig in {self.root.parent} does not run a big-endian Python 3.11 or newer "
                f"({said}); remove that folder and run {FETCH_COMMAND}"
            )
        return answer.stdout.strip()


def find_rig() -> Rig:
    """The rig of this machine, not yet checked. RigUnusable says which command makes it."""
    folder = rig_folder()
    root = folder / "root"
    if not root.is_dir():
        raise RigUnusable(f"no big-endian Python in {folder}; make it with: {FETCH_COMMAND}")
    qemu = find_qemu(folder)
    if qemu is None:
        raise RigUnusable(f"{QEMU_NAMES[0]} is neither in {folder} nor installed; {FETCH_COMMAND}")
    return Rig(qemu, root)


def find_qemu(folder: Path) -> Path | None:
    """The emulator: that of the rig, or an installed one."""
    for name in QEMU_NAMES:
        if (folder / name).is_file():
            return folder / name
    found = [path for name in QEMU_NAMES if (path := shutil.which(name))]
    return Path(found[0]) if found else None
