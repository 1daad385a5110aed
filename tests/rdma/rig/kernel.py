"""The guest's kernel: User Mode Linux with soft RoCE, built once from Debian's source.

Debian's own builds of User Mode Linux have no InfiniBand. The build takes about 8 minutes on two
cores; the result is kept in the cache under a name made of the source's version and the options.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.rdma.rig import packages
from tests.rdma.rig.errors import RigUnavailable
from tests.rdma.rig.packages import PackageEntry

CONFIG: Final = Path(__file__).with_name("kernel.config")
# Depends on the package with the version in its name, for example linux-source-6.1.
_SOURCE: Final = "linux-source"


def parse_options(text: str) -> tuple[str, ...]:
    """The lines NAME=VALUE of a configuration, in order, without comments."""
    return tuple(line for line in map(str.strip, text.splitlines()) if line[:1] not in ("", "#"))


def lost_options(wanted: tuple[str, ...], built_config: str) -> list[str]:
    """Those of ``wanted`` that the source did not accept."""
    built = set(built_config.splitlines())
    return [option for option in wanted if option not in built]


def kernel_name(options: tuple[str, ...], source_version: str) -> str:
    """The file name that one source and one configuration have in the cache."""
    return f"linux-uml-{source_version}-{_digest(options)}"


def find_source() -> tuple[str, PackageEntry] | None:
    """Name and entry of the kernel's source package; None if apt knows none."""
    meta = packages.find_entry(_SOURCE)
    found = re.search(rf"\b{_SOURCE}-[\d.]+", meta.depends) if meta else None
    entry = packages.find_entry(found[0]) if found else None
    return (found[0], entry) if found and entry else None


def find_any(cache: Path, options: tuple[str, ...]) -> Path | None:
    """The newest kernel in the cache with these options, of whatever source."""
    kernels = cache.glob(kernel_name(options, "*"))
    return max(kernels, key=lambda path: path.stat().st_mtime, default=None)


def _digest(options: tuple[str, ...]) -> str:
    return hashlib.sha256("\n".join(options).encode()).hexdigest()[:12]


def obtain(cache: Path, say: Callable[[str], None]) -> Path:
    """The kernel from the cache; it is built first if it is not there.

    RigUnavailable: apt knows no source; packages for the build are missing and cannot be
    installed; the download or the build failed.
    """
    options = parse_options(CONFIG.read_text(encoding="utf-8"))
    log = cache / "packages.log"
    source = find_source()
    if source is None:
        # Without apt's lists the version is unknown; a kernel that is there serves as well.
        if kernel := find_any(cache, options):
            return kernel
        if os.geteuid() == 0:
            packages.run_apt(["apt-get", "-qq", "update"], log)
            source = find_source()
    if source is None:
        raise RigUnavailable(f"apt knows no {_SOURCE}; run apt-get update as root")
    name, entry = source
    kernel = cache / kernel_name(options, entry.version)
    with _locked(cache / "kernel.lock", say):
        if not kernel.is_file():
            if absent := packages.missing(packages.BUILD):
                say(f"installing {' '.join(absent)}")
                packages.install(absent, log)
            for stale in cache.glob("build-*"):  # Of a run that was killed: we hold the lock.
                shutil.rmtree(stale)
            with tempfile.TemporaryDirectory(prefix="build-", dir=cache) as folder:
                _build(name, options, Path(folder), kernel, say)
    return kernel


def _build(
    source: str,
    options: tuple[str, ...],
    folder: Path,
    kernel: Path,
    say: Callable[[str], None],
) -> None:
    """Fetch ``source`` into ``folder``, build it there and put the result at ``kernel``."""
    log = kernel.parent / "kernel-build.log"
    log.write_text("", encoding="utf-8")
    say(f"fetching {source}")
    # The sandbox's user could not write into the folder.
    packages.run_apt(
        ["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", source], log, folder
    )
    (archive,) = folder.glob("*.deb")
    _run(["dpkg-deb", "-x", str(archive), str(folder)], log)
    _run(["tar", "-xJf", str(folder / f"usr/src/{source}.tar.xz"), "-C", str(folder)], log)
    tree = folder / source
    wanted = folder / "wanted"
    wanted.write_text("\n".join(options) + "\n", encoding="utf-8")
    say(f"building the guest's kernel, about 8 minutes on two cores; its output is in {log}")
    for goal in ("allnoconfig", "linux"):
        make = ["make", "-C", str(tree), "ARCH=um", f"-j{(os.cpu_count() or 1) + 1}", goal]
        _run(["nice", *make], log, KCONFIG_ALLCONFIG=str(wanted))
    if lost := lost_options(options, (tree / ".config").read_text(encoding="utf-8")):
        raise RigUnavailable(f"the source of {source} cannot have {' '.join(lost)}")
    _run(["strip", str(tree / "linux")], log)
    # Whole or not at all; the temporary folder is on the same file system.
    (tree / "linux").replace(kernel)


def _run(command: list[str], log: Path, **variables: str) -> None:
    """Run one step of the build; RigUnavailable with its last error if it fails."""
    with log.open("a", encoding="utf-8") as file:
        returncode = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, "LC_ALL": "C.UTF-8", **variables},
            check=False,
        ).returncode
    if returncode != 0:
        text = log.read_text(encoding="utf-8", errors="replace")
        found = re.search(r"^.*(?:\berror:|: Error |\*\*\* ).*$", text, re.MULTILINE)
        reason = found[0].strip() if found else f"{command[0]} ended with {returncode}"
        raise RigUnavailable(f"building the guest's kernel failed ({reason}); see {log}")


@contextmanager
def _locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Keep two runs from building at once."""
    with path.open("w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another run is building the guest's kernel; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def tools_missing() -> list[str]:
    """Commands of the base system that a build and a start need and that are not there."""
    wanted = ("dpkg-deb", "nice", "setsid", "tar", "taskset")
    return [tool for tool in wanted if not shutil.which(tool)]
