"""What the package imports: no torch, no pickle, no I/O in the core."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvproto

FOLDER = Path(kvproto.__file__).parent
MODULES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
CLIENT = sorted(path.stem for path in (FOLDER / "client").glob("*.py") if path.stem != "__init__")
RDMA = sorted(path.stem for path in (FOLDER / "rdma").glob("*.py") if path.stem != "__init__")
CARRIERS = {"tcp", "tcp_driver", "tcp_peer", "tcp_server", "tcp_link", "tls_stream", "announce"}
# Memory shared on one host, and the proof of a path.
MAPPED = {"region", "socket_directory", "mapped", "mapped_host", "probe"}
# KV as arrays, and as files.
ARRAYS = {"convert", "kv_cache"}
FILES = {"kv_file"}
CORE = sorted(set(MODULES) - CARRIERS - MAPPED - ARRAYS - FILES)
UNSAFE = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "dbm", "copyreg"}


def run_python(program: str) -> None:
    """A fresh interpreter that imports this checkout."""
    finished = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(FOLDER.parent), "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr


def test_no_module_of_ours_imports_unsafe_deserialisers():
    run_python(
        f"""
import builtins, importlib
genuine = builtins.__import__
def guarded(name, globals=None, *args, **kwargs):
    importer = (globals or {{}}).get("__name__", "")
    if importer.split(".")[0] == "kvproto" and name.split(".")[0] in {UNSAFE!r}:
        raise AssertionError(f"{{importer}} imports {{name}}")
    return genuine(name, globals, *args, **kwargs)
builtins.__import__ = guarded
for module in {MODULES!r}:
    importlib.import_module("kvproto." + module)
"""
    )


def test_the_guard_of_the_test_above_works():
    with pytest.raises(AssertionError, match="kvproto imports pickle"):
        run_python(
            f"""
import builtins
genuine = builtins.__import__
def guarded(name, globals=None, *args, **kwargs):
    importer = (globals or {{}}).get("__name__", "")
    if importer.split(".")[0] == "kvproto" and name.split(".")[0] in {UNSAFE!r}:
        raise AssertionError(f"{{importer}} imports {{name}}")
    return genuine(name, globals, *args, **kwargs)
builtins.__import__ = guarded
exec("import pickle", {{"__name__": "kvproto"}})
"""
        )


def test_decoding_works_while_every_import_of_pickle_fails():
    run_python(
        """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in {"pickle", "_pickle", "shelve", "dill"}:
            raise AssertionError(f"somebody imports {name}")
sys.meta_path.insert(0, Refuse())
sys.modules.pop("pickle", None)
from kvproto.frame import decode_frame, encode_frame
from kvproto.header import ByteOrder, Kind
from kvproto.messages import Generate, decode_fields, encode_fields
message = Generate("s", [1], 1, 1, 0.0, 1.0, 0, 0, [], False, [], 1.0)
frame = decode_frame(
    b"".join(encode_frame(Kind.GENERATE, encode_fields(message, 1), order=ByteOrder(1))),
    max_payload_nbytes=10_000,
)
assert decode_fields(Kind.GENERATE, frame.fields, ByteOrder(1)) == message
"""
    )


def test_everything_imports_without_torch_and_numpy():
    run_python(
        f"""
import importlib, sys
for name in ("torch", "numpy", "transformers", "pyverbs"):
    sys.modules[name] = None
for module in {sorted(set(MODULES) - ARRAYS - FILES) + [f"rdma.{name}" for name in RDMA]!r}:
    importlib.import_module("kvproto." + module)
"""
    )


def test_arrays_and_files_import_without_torch():
    run_python(
        f"""
import importlib, sys
sys.modules["torch"] = sys.modules["transformers"] = None
for module in {sorted(ARRAYS | FILES)!r} + ["client"]:
    importlib.import_module("kvproto." + module)
"""
    )


def test_the_core_does_no_input_and_output():
    run_python(
        f"""
import importlib, sys
for name in ("asyncio", "socket", "selectors", "ssl", "threading"):
    assert name not in sys.modules or name == "threading", name
    sys.modules[name] = None if name != "threading" else sys.modules.get(name)
for module in {CORE!r}:
    importlib.import_module("kvproto." + module)
"""
    )


@pytest.mark.parametrize("module", MODULES)
def test_imports_are_at_the_top_and_from_the_allowed_list(module):
    allowed = {"kvproto", "msgpack", "xxhash", *sys.stdlib_module_names}
    if module in ARRAYS:
        allowed.add("numpy")
    if module not in CARRIERS | MAPPED | FILES:
        allowed -= {"asyncio", "socket", "time", "random", "secrets", "threading", "logging", "os"}
    tree = ast.parse((FOLDER / f"{module}.py").read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        assert node.col_offset == 0, f"{module}.py:{node.lineno}: an import inside a function"
        for name in names:
            assert name.split(".")[0] in allowed, f"{module}.py:{node.lineno}: {name}"
            assert name.split(".")[0] not in UNSAFE


@pytest.mark.parametrize("module", MODULES)
def test_every_struct_format_says_its_byte_order(module):
    tree = ast.parse((FOLDER / f"{module}.py").read_text("utf-8"))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "struct"
            and isinstance(node.args[0], ast.Constant)
        ):
            assert node.args[0].value[0] in "<>", f"{module}.py:{node.lineno}"


@pytest.mark.parametrize("module", RDMA)
def test_pyverbs_is_imported_when_rdma_is_asked_for_and_in_one_place(module):
    tree = ast.parse((FOLDER / "rdma" / f"{module}.py").read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            name = node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name
            root = name.split(".")[0]
            is_pyverbs = module == "verbs" and root == "pyverbs"
            assert is_pyverbs or root in {"kvproto", *sys.stdlib_module_names} - UNSAFE
            # In a function, so that importing the module needs no pyverbs.
            assert (node.col_offset > 0) is is_pyverbs, f"{module}.py:{node.lineno}"


@pytest.mark.parametrize("module", CLIENT)
def test_clients_import_the_standard_library_numpy_and_the_protocol(module):
    tree = ast.parse((FOLDER / "client" / f"{module}.py").read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            name = node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name
            assert node.col_offset == 0, f"{module}.py:{node.lineno}: an import inside a function"
            root = name.split(".")[0]
            assert root in {"kvproto", "numpy", *sys.stdlib_module_names} - UNSAFE


def test_the_tests_mirror_the_modules():
    tests = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
    assert set(MODULES) - tests == set()
    folder = Path(__file__).parent / "client"
    tests = {path.stem.removeprefix("test_") for path in folder.glob("test_*.py")}
    # These need a device: tests/rdma/test_clients.py.
    tests |= {"rdma_device", "rdma_receiver", "rdma_sender"}
    assert set(CLIENT) - tests == set()
