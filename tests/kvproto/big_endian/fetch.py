"""Makes the rig: ``python -m tests.kvproto.big_endian.fetch``. About 60 MB, no root needed.

Debian's own tools fetch Debian's s390x packages from the sources this machine is set up with, but
with lists, cache and package status of their own, so the machine stays as it is. They are
unpacked, not installed.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.kvproto.big_endian.rig import QEMU_NAMES, Rig, RigUnusable, find_qemu, rig_folder

ARCHITECTURE: Final = "s390x"
PACKAGES: Final = ("python3-minimal", "libpython3-stdlib", "python3-msgpack", "python3-xxhash")
# In newer releases qemu-user has the static programs.
QEMU_PACKAGES: Final = ("qemu-user-static", "qemu-user")
_TOOLS: Final = ("apt-get", "dpkg", "dpkg-deb", "tar")
_TIMEOUT_S: Final = 600.0


class FetchFailed(Exception):
    """The rig could not be made; the text says at which step and what to do."""


def main() -> int:
    """Make the rig if it is not there, check it, and say so."""
    folder = rig_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            _report(f"The rig is ready: {_make(folder).check()}, in {folder}.")
        except (FetchFailed, RigUnusable) as exc:
            sys.stderr.write(f"Error: {exc}\n")
            return 1
    return 0


def _make(folder: Path) -> Rig:
    root = folder / "root"
    qemu = find_qemu(folder)
    if root.is_dir() and qemu is not None:
        return Rig(qemu, root)
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise FetchFailed(f"{', '.join(missing)} not found: this works on Debian and its kin only.")
    # In the folder itself, so that what is complete can be moved to its place.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
        apt = Apt(Path(scratch))
        _report(f"Reading the list of {ARCHITECTURE} packages ...")
        apt.run("update")
        if not root.is_dir():
            _report(f"Fetching Python for {ARCHITECTURE} ...")
            apt.run("install", "--download-only", "--no-install-recommends", "--yes", *PACKAGES)
            unpacked = Path(scratch) / "root"
            debs = sorted((apt.cache / "archives").glob("*.deb"))
            _report(f"Unpacking {len(debs)} packages ...")
            for deb in debs:
                _run(["dpkg-deb", "--extract", str(deb), str(unpacked)])
            unpacked.rename(root)
        if qemu is None:
            qemu = _fetch_qemu(apt, folder)
    return Rig(qemu, root)


def _fetch_qemu(apt: "Apt", folder: Path) -> Path:
    host = _run(["dpkg", "--print-architecture"]).strip()
    for package in QEMU_PACKAGES:
        _report(f"Fetching {package} ...")
        apt.run("download", f"{package}:{host}")
        [deb] = apt.folder.glob(f"{package}_*.deb")
        names = _run(["dpkg-deb", "--contents", str(deb)]).split()
        for name in QEMU_NAMES:
            if f"./usr/bin/{name}" in names:
                _run(["dpkg-deb", "--extract", str(deb), str(apt.folder / package)])
                return (apt.folder / package / "usr" / "bin" / name).rename(folder / name)
    raise FetchFailed(f"Neither of {', '.join(QEMU_PACKAGES)} has {' or '.join(QEMU_NAMES)}.")


class Apt:
    """apt with lists, cache and status of its own in ``folder``, for two architectures."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        (folder / "lists" / "partial").mkdir(parents=True)
        (self.cache / "archives" / "partial").mkdir(parents=True)
        (folder / "status").touch()
        host = _run(["dpkg", "--print-architecture"]).strip()
        # Read before the machine's own settings, which still name its proxy and its sources.
        (folder / "apt.conf").write_text(
            f"""\
APT::Architecture "{ARCHITECTURE}";
APT::Architectures {{ "{ARCHITECTURE}"; "{host}"; }};
Acquire::Languages "none";
APT::Sandbox::User "";
Debug::NoLocking "true";
Dir::State "{folder}";
Dir::State::lists "{folder}/lists";
Dir::State::status "{folder}/status";
Dir::Cache "{self.cache}";
""",
            encoding="utf-8",
        )
        # Read behind them: what they would do to the machine after a fetch is not wanted.
        (folder / "last.conf").write_text(
            "#clear APT::Update::Post-Invoke;\n"
            "#clear APT::Update::Post-Invoke-Success;\n"
            "#clear DPkg::Post-Invoke;\n",
            encoding="utf-8",
        )

    def run(self, *arguments: str) -> None:
        """Run apt-get; FetchFailed with its last words."""
        _run(
            ["apt-get", "-qq", "-c", str(self.folder / "last.conf"), *arguments],
            cwd=self.folder,
            environ={"APT_CONFIG": str(self.folder / "apt.conf")},
        )


def _run(
    command: Sequence[str], *, cwd: Path | None = None, environ: dict[str, str] | None = None
) -> str:
    try:
        answer = subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, "LC_ALL": "C.UTF-8", **(environ or {})},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise FetchFailed(f"{command[0]} took more than {_TIMEOUT_S:g} s; try again.") from None
    if answer.returncode:
        words = (answer.stderr or answer.stdout).strip().splitlines()[-3:]
        raise FetchFailed(
            f"`{' '.join(command)}` failed: {' '.join(words)}. The package sources of this machine "
            f"must offer {ARCHITECTURE}, as Debian's main archive does."
        )
    return answer.stdout


def _report(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
