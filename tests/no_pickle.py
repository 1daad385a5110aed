"""No module of ours imports or uses a deserialiser that runs code; a use fails the test.

An audit hook of the interpreter looks at two moments:

    exec                a module of ours is loaded: its code must import none of ``UNSAFE`` and
                        must not name ``torch.load``, in no function either
    pickle.find_class   something is unpickled: the caller, behind the libraries of that business,
                        must not be a module of ours

Third-party modules may do what they like. An audit hook cannot be removed, so it is installed once
for the whole test run.
"""

import dis
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = (
    "kvproto",
    "kvengine",
    "svckit",
    "prefill_svc",
    "decode_svc",
    "router_svc",
    "ops",
)
UNSAFE: Final = frozenset(
    {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "dbm"}
)
# Modules through which a call goes on its way to ``find_class``.
_CARRIERS: Final = UNSAFE | {"copyreg", "torch", "numpy", "multiprocessing"}


class UnsafeDeserialiser(RuntimeError):
    """A module of ours imports or uses pickle or one of its relatives."""


class Guard:
    """What was found since the last ``take``."""

    def __init__(self) -> None:
        self._found: list[str] = []
        self._is_installed = False

    def install(self) -> None:
        """Idempotent."""
        if not self._is_installed:
            self._is_installed = True
            sys.addaudithook(self._audit)

    def take(self) -> list[str]:
        """Findings so far, each reported once: the exception may have been swallowed."""
        found, self._found = self._found, []
        return found

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "exec":
            code = arguments[0]
            if isinstance(code, CodeType) and is_ours(code.co_filename):
                for use in unsafe_uses(code):
                    self._report(f"{code.co_filename}: {use}")
        elif event == "pickle.find_class":
            caller = _caller(sys._getframe(1))
            if caller is not None and is_our_module(caller.f_globals.get("__name__", "")):
                where = f"{caller.f_code.co_filename}:{caller.f_lineno}"
                self._report(f"{where}: unpickles {'.'.join(map(str, arguments))}")

    def _report(self, finding: str) -> None:
        self._found.append(finding)
        raise UnsafeDeserialiser(finding)


def is_our_module(name: str) -> bool:
    """A module of one of our packages, by its name."""
    return name.split(".")[0] in PACKAGES


def is_ours(filename: str) -> bool:
    """A source file of one of our packages."""
    try:
        return Path(filename).relative_to(ROOT).parts[0] in PACKAGES
    except ValueError:
        return False


def unsafe_uses(code: CodeType) -> Iterator[str]:
    """Imports of ``UNSAFE`` and mentions of ``torch.load``, in functions and classes as well."""
    before = ""
    for instruction in dis.get_instructions(code):
        name = instruction.argval if isinstance(instruction.argval, str) else ""
        if instruction.opname == "IMPORT_NAME" and name.split(".")[0] in UNSAFE:
            yield f"imports {name}"
        if instruction.opname in {"LOAD_ATTR", "LOAD_METHOD"} and (before, name) == (
            "torch",
            "load",
        ):
            yield "uses torch.load"
        if instruction.opname == "IMPORT_FROM" and (before, name) == ("torch", "load"):
            yield "imports torch.load"
        before = name or before
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from unsafe_uses(constant)


def _caller(frame: FrameType | None) -> FrameType | None:
    """The first frame that is not of a library on the way to the unpickler."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").split(".")[0] not in _CARRIERS:
            return frame
        frame = frame.f_back
    return None


GUARD: Final = Guard()
