"""The distribution's pyverbs on the path of another Python of the same version, alone."""

import re
from pathlib import Path
from typing import Final

from tests.rdma.rig.errors import RigUnavailable
from tests.rdma.rig.packages import PackageEntry

INSTALLED: Final = Path("/usr/lib/python3/dist-packages/pyverbs")


def python_version(entry: PackageEntry) -> str | None:
    """The Python a package of modules was built for, as "3.11"; None if it does not say."""
    # "python3 (<< 3.12), python3 (>= 3.11~)"
    found = re.search(r"\bpython3 \(>= (\d+\.\d+)", entry.depends)
    return found[1] if found else None


def link_alone(folder: Path, suffix: str, source: Path = INSTALLED) -> Path:
    """Make ``folder`` hold nothing but a link to the installed pyverbs, and return it.

    The other packages beside it must not hide those of the virtual environment. ``suffix`` is the
    first of the interpreter's names of extension modules.

    RigUnavailable: pyverbs is not installed, or for another Python.
    """
    if not (source / "__init__.py").is_file():
        raise RigUnavailable(f"python3-pyverbs put no pyverbs into {source.parent}")
    if not (source / f"device{suffix}").is_file():
        found = ", ".join(sorted(path.name for path in source.glob("device.*"))) or "none"
        raise RigUnavailable(
            "the distribution's pyverbs is for another Python: its modules end like "
            f"{found}, those of this one with {suffix}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "pyverbs"
    if not link.is_symlink() or link.readlink() != source:
        link.unlink(missing_ok=True)
        link.symlink_to(source)
    return folder
