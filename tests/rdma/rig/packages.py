"""The distribution's packages that the rig needs: which are missing, and their installation."""

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.rdma.rig.errors import RigUnavailable

RUNTIME: Final = (
    "busybox-static",
    "ibverbs-providers",
    "ibverbs-utils",
    "iproute2",
    "perftest",
    "python3-pyverbs",
)
BUILD: Final = ("bc", "bison", "flex", "gcc", "libc6-dev", "make", "xz-utils")


@dataclass(frozen=True, slots=True)
class PackageEntry:
    """What apt would install under a name: its version and what it depends on."""

    version: str
    depends: str


def installed(names: Sequence[str]) -> frozenset[str]:
    """Those of ``names`` that are installed."""
    # Fails if any is unknown, and answers for the others all the same.
    result = subprocess.run(
        ["dpkg-query", "-W", "-f", "${db:Status-Status} ${Package}\\n", *names],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    return parse_installed(result.stdout)


def parse_installed(text: str) -> frozenset[str]:
    """The names in lines "installed NAME"."""
    lines = (line.split() for line in text.splitlines())
    return frozenset(words[1] for words in lines if len(words) == 2 and words[0] == "installed")


def missing(names: Sequence[str]) -> list[str]:
    """Those of ``names`` that are not installed, in their order."""
    present = installed(names)
    return [name for name in names if name not in present]


def install(names: Sequence[str], log: Path) -> None:
    """Install ``names`` with apt-get, whose output goes to ``log``.

    RigUnavailable: this user is not root; apt-get failed.
    """
    wanted = " ".join(names)
    if os.geteuid() != 0:
        raise RigUnavailable(
            f"packages are missing and only root can install them: apt-get install {wanted}"
        )
    run_apt(["apt-get", "-qq", "update"], log)
    run_apt(["apt-get", "-qq", "-y", "--no-install-recommends", "install", *names], log)


def run_apt(command: Sequence[str], log: Path, folder: Path | None = None) -> None:
    """Run one command of apt in ``folder``; RigUnavailable with its last line if it fails."""
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        returncode = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"},
            check=False,
        ).returncode
    if returncode != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        raise RigUnavailable(
            f"{' '.join(command[:1])} failed ({lines[-1].strip()}); its output is in {log}"
        )


def find_entry(name: str) -> PackageEntry | None:
    """What apt would install as ``name``; None if it knows no such package."""
    result = subprocess.run(
        ["apt-cache", "show", "--no-all-versions", name],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    return parse_entry(result.stdout)


def parse_entry(text: str) -> PackageEntry | None:
    """Read the fields of ``apt-cache show``; None if there is no version."""
    fields = dict(re.findall(r"^(Version|Depends): (.+)$", text, re.MULTILINE))
    if "Version" not in fields:
        return None
    return PackageEntry(fields["Version"], fields.get("Depends", ""))
