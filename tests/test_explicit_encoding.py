"""Every text of ours names its encoding: the locale of a service is not ours to trust."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.no_pickle import PACKAGES, ROOT

SOURCES = [
    path for package in (*PACKAGES, "bench") for path in sorted((ROOT / package).rglob("*.py"))
]
# Modules whose open() is another thing, or binary unless "t" is asked for.
OTHER_OPENS = frozenset({"os", "tarfile", "zipfile", "webbrowser", "shelve", "wave"})
BINARY_OPENS = frozenset({"gzip", "bz2", "lzma"})
# Where the mode and the encoding stand among the arguments, if given without a name.
OPENS = {"open": (1, 3), "fdopen": (1, 3)}
METHOD_OPEN = (0, 2)
TEXTS = {"read_text": 0, "write_text": 1, "TextIOWrapper": 1, "FileHandler": 2, "makefile": 2}
TEMPORARY = frozenset({"NamedTemporaryFile", "TemporaryFile", "SpooledTemporaryFile"})
PROCESSES = frozenset({"run", "Popen", "call", "check_call", "check_output", "getoutput"})


def implicit_encodings(tree: ast.AST) -> Iterator[str]:
    """Calls that read or write text in the locale's encoding, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := _implicit(node)):
            yield f"line {node.lineno}: {name} without an encoding"


def _implicit(call: ast.Call) -> str:
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    owner = function.value if isinstance(function, ast.Attribute) else None
    owner_name = getattr(owner, "id", "")
    if "encoding" in named:
        return ""
    if name in TEXTS:
        is_binary = name == "makefile" and "b" in _mode(call, named, 0, "r")
        return "" if is_binary or len(call.args) > TEXTS[name] else name
    if name in TEMPORARY:
        return "" if "b" in _mode(call, named, 0, "w+b") else name
    if name in OPENS:
        if name == "open" and owner_name in OTHER_OPENS:
            return ""
        is_method = owner is not None and owner_name not in {"io", "os", *BINARY_OPENS}
        if is_method and not _is_mode(call):
            return ""
        mode_at, encoding_at = METHOD_OPEN if is_method else OPENS[name]
        mode = _mode(call, named, mode_at, "rb" if owner_name in BINARY_OPENS else "r")
        is_binary = "b" in mode or (owner_name in BINARY_OPENS and "t" not in mode)
        return "" if is_binary or len(call.args) > encoding_at else name
    if name in PROCESSES:
        texts = [named.get("text"), named.get("universal_newlines")]
        is_text = any(isinstance(item, ast.Constant) and item.value is True for item in texts)
        return name if is_text or name == "getoutput" else ""
    return ""


def _is_mode(call: ast.Call) -> bool:
    """False for an open() of others: that of a path takes a mode first, or nothing."""
    if not call.args:
        return True
    first = call.args[0]
    return isinstance(first, ast.Constant) and str(first.value)[:1] in set("rwax")


def _mode(call: ast.Call, named: dict[str | None, ast.expr], at: int, default: str) -> str:
    given = named.get("mode", call.args[at] if len(call.args) > at else None)
    if isinstance(given, ast.Constant) and isinstance(given.value, str):
        return given.value
    # A mode that is worked out is taken for text, so that it is looked at.
    return default if given is None else "r"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_of_ours_leaves_the_encoding_to_the_locale(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert list(implicit_encodings(tree)) == []


@pytest.mark.parametrize(
    "source",
    [
        "open('x')",
        "open('x', 'w')",
        "open('x', mode='a')",
        "open('x', mode)",
        "io.open('x')",
        "path.open()",
        "path.open('w')",
        "Path('x').open('r', -1)",
        "os.fdopen(3)",
        "os.fdopen(3, 'w')",
        "gzip.open('x', 'rt')",
        "path.read_text()",
        "path.write_text('x')",
        "io.TextIOWrapper(raw)",
        "logging.FileHandler('x')",
        "sock.makefile()",
        "tempfile.NamedTemporaryFile('w')",
        "subprocess.run(['x'], text=True)",
        "subprocess.Popen(['x'], universal_newlines=True)",
        "subprocess.getoutput('x')",
        "def f():\n    with open('x') as file:\n        pass",
    ],
)
def test_the_check_finds(source: str) -> None:
    assert len(list(implicit_encodings(ast.parse(source)))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "open('x', 'rb')",
        "open('x', encoding='utf-8')",
        "open('x', 'w', 1, 'utf-8')",
        "os.open('x', os.O_RDONLY)",
        "path.open('rb')",
        "path.open(encoding='utf-8')",
        "path.read_text('utf-8')",
        "path.read_text(encoding='utf-8')",
        "path.write_text('x', 'utf-8')",
        "os.fdopen(3, 'wb')",
        "gzip.open('x')",
        "tempfile.NamedTemporaryFile()",
        "subprocess.run(['x'])",
        "subprocess.run(['x'], encoding='utf-8')",
        "sock.makefile('rb')",
        "read_bytes()",
        "KvFile.open(path)",
    ],
)
def test_the_check_is_content_with(source: str) -> None:
    assert list(implicit_encodings(ast.parse(source))) == []
