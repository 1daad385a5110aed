"""Documents that name code are checked against the code."""

import ast
import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_REFERENCE = re.compile(r"`((?:[a-z_]+/)+[A-Za-z_.]+\.[a-z]+)(?::([A-Za-z_]\w*))?`")
_PAGES = [
    "README.md",
    "docs/architecture.md",
    "docs/metrics.md",
    "docs/clients.md",
    "docs/doctor.md",
    "docs/operations.md",
    "docs/rdma.md",
]


def _names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize("page", _PAGES)
def test_every_path_and_name_exists(page: str) -> None:
    references = _REFERENCE.findall((_ROOT / page).read_text(encoding="utf-8"))
    assert references, f"{page} names no code"
    for path, name in references:
        assert (_ROOT / path).is_file(), f"{page} names {path}"
        if name:
            assert name in _names_in(_ROOT / path), f"{page} names {path}:{name}"


def test_the_check_can_fail() -> None:
    assert _REFERENCE.findall("see `kvproto/tcp.py:Nothing`") == [("kvproto/tcp.py", "Nothing")]
    assert "Nothing" not in _names_in(_ROOT / "kvproto/tcp.py")
