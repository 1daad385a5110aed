"""Everything the rig needs, found or installed or built, as one object that runs commands."""

import importlib.machinery
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Final

from ops.cache_folder import cache_folder
from tests.rdma.rig import binding, kernel, packages
from tests.rdma.rig.errors import RigUnavailable
from tests.rdma.rig.guest import Command, Ending, Guest
from tests.rdma.rig.host import Host, obstacle

MAX_GUEST_MEMORY_NBYTES: Final = 4 << 30
_TRIAL_TIMEOUT_S: Final = 60.0
_SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Rig:
    """A guest that starts, and the folder with the pyverbs that its Python gets."""

    guest: Guest
    pyverbs_folder: Path

    def run(
        self,
        arguments: Sequence[str],
        output: BinaryIO,
        *,
        timeout_s: float,
        shares: Sequence[Path] = (),
    ) -> Ending:
        """Run a command in this folder, with this environment and pyverbs on Python's path."""
        env = guest_env(os.environ, self.pyverbs_folder, Path(sys.executable).parent)
        command = Command(tuple(arguments), Path.cwd(), env)
        return self.guest.run(command, output, timeout_s=timeout_s, shares=shares)


def guest_env(env: Mapping[str, str], pyverbs_folder: Path, bin_folder: Path) -> dict[str, str]:
    """What a command in the guest has of our environment ``env``."""
    python_path = [str(pyverbs_folder), *filter(None, [env.get("PYTHONPATH")])]
    return {
        "HOME": env.get("HOME", "/root"),
        "LANG": env.get("LANG", "C.UTF-8"),
        # Not ours: each folder in which a program is looked for in vain costs 70 ms there.
        "PATH": f"{bin_folder}{os.pathsep}{_SYSTEM_PATH}",
        "TERM": "dumb",
        **{name: value for name, value in env.items() if name.startswith("PD_")},
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join(python_path),
        "PYTHONUTF8": "1",
    }


def prepare(host: Host, env: Mapping[str, str], say: Callable[[str], None]) -> Rig:
    """Install and build what is missing, start the guest once, and return it.

    RigUnavailable: the machine is of another kind; packages are missing and cannot be installed;
    pyverbs is for another Python; the kernel cannot be built, or does not start here.
    """
    if reason := obstacle(host):
        raise RigUnavailable(reason)
    if absent := kernel.tools_missing():
        raise RigUnavailable(f"commands are missing: {', '.join(absent)}")
    cache = cache_folder(env) / "rdma-rig"
    cache.mkdir(parents=True, exist_ok=True)
    _provide_runtime(cache, say)
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    pyverbs_folder = binding.link_alone(cache / f"pyverbs{suffix.removesuffix('.so')}", suffix)
    memory_nbytes = min(MAX_GUEST_MEMORY_NBYTES, host.guest_memory_nbytes)
    rig = Rig(Guest(kernel.obtain(cache, say), memory_nbytes), pyverbs_folder)
    _try(rig)
    return rig


def _provide_runtime(cache: Path, say: Callable[[str], None]) -> None:
    """Install the packages of the guest's programs, unless pyverbs would not serve anyway."""
    absent = packages.missing(packages.RUNTIME)
    if not absent:
        return
    log = cache / "packages.log"
    entry = packages.find_entry("python3-pyverbs")
    version = binding.python_version(entry) if entry else None
    ours = ".".join(map(str, sys.version_info[:2]))
    if version not in (None, ours):
        raise RigUnavailable(
            f"the distribution's pyverbs is for Python {version} and this is {ours}"
        )
    say(f"installing {' '.join(absent)}")
    packages.install(absent, log)


def _try(rig: Rig) -> None:
    """Start the guest for nothing: some containers forbid what User Mode Linux needs."""
    said = BytesIO()
    ending = rig.run(["true"], said, timeout_s=_TRIAL_TIMEOUT_S)
    if ending.status == 0:
        return
    text = said.getvalue().decode("utf-8", "replace").strip() or ending.kernel_log.strip()
    last = text.splitlines()[-1] if text else "it said nothing"
    raise RigUnavailable(f"the guest does not start here ({last})")
