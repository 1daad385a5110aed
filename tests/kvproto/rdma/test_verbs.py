"""Without pyverbs everything imports, and asking for RDMA says what is missing."""

import errno
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvproto.errors import CarrierLost, CarrierUnavailable
from kvproto.rdma import verbs
from kvproto.rdma.verbs import Verbs, error_number, in_use_for, load, needed_for

ROOT = Path(__file__).parents[3]


class VerbsError(Exception):
    """As pyverbs raises it."""

    def __init__(self, text: str, error_code: object = None) -> None:
        super().__init__(text)
        if error_code is not None:
            self.error_code = error_code


@pytest.fixture
def library() -> Verbs:
    return cast("Verbs", SimpleNamespace(error=VerbsError))


@pytest.fixture
def without_pyverbs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a host that does not have it, whatever this host has."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyverbs"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyverbs", None)


@pytest.mark.usefixtures("without_pyverbs")
def test_asking_for_rdma_without_pyverbs_names_the_packages() -> None:
    handlers = list(logging.getLogger().handlers)
    with pytest.raises(CarrierUnavailable) as excinfo:
        load()
    sentence = str(excinfo.value)
    assert "RDMA needs pyverbs" in sentence
    assert "python3-pyverbs" in sentence
    assert "pdserve[rdma]" in sentence
    assert isinstance(excinfo.value.__cause__, ImportError)
    assert logging.getLogger().handlers == handlers


def test_everything_of_ours_imports_without_pyverbs() -> None:
    program = """
import importlib, pathlib, sys
sys.modules["pyverbs"] = None
import decode_svc, kvproto, prefill_svc
for package in (kvproto, decode_svc, prefill_svc):
    folder = pathlib.Path(package.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        name = ".".join(path.relative_to(folder.parent).with_suffix("").parts)
        if not name.endswith("__main__"):
            importlib.import_module(name.removesuffix(".__init__"))
"""
    finished = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (VerbsError("Failed to open. "), "Failed to open"),
        (VerbsError("x", errno.EBUSY), "Device or resource busy (errno 16)"),
        (VerbsError("x", errno.ENODEV), "No such device (errno 19): the device is gone"),
        (VerbsError("x", errno.EACCES), "Permission denied (errno 13): this user may not open it"),
        (VerbsError("x", errno.EPERM), "not permitted (errno 1): this user may not open it"),
        (VerbsError("x", errno.ENOMEM), "LimitMEMLOCK=infinity"),
    ],
)
def test_what_pyverbs_raises_becomes_ours_at_the_border(
    library: Verbs, error: VerbsError, reason: str
) -> None:
    with pytest.raises(CarrierUnavailable) as opening, needed_for(library, "open it"):
        raise error
    assert str(opening.value).startswith("cannot open it: ")
    assert reason in str(opening.value)
    assert str(opening.value).endswith("; pdctl node check (check rdma) looks into it")
    with pytest.raises(CarrierLost) as using, in_use_for(library, "post"):
        raise error
    assert str(using.value).startswith("cannot post: ")
    assert reason in str(using.value)


def test_other_errors_pass_the_border_unchanged(library: Verbs) -> None:
    for border in (needed_for, in_use_for):
        with pytest.raises(ZeroDivisionError), border(library, "divide"):
            raise ZeroDivisionError
        with border(library, "do nothing"):
            pass


@pytest.mark.parametrize(
    ("code", "number"), [(None, 0), (-1, 0), ("13", 0), (0, 0), (errno.ENODEV, errno.ENODEV)]
)
def test_the_number_of_an_error(code: object, number: int) -> None:
    assert error_number(VerbsError("x", code)) == number


def test_a_device_whose_descriptor_is_not_found_is_closed_again() -> None:
    """Without /proc, or while another thread opens one."""
    closed = []
    made = SimpleNamespace(close=lambda: closed.append(True))
    library = cast("Any", SimpleNamespace(context=lambda name: made))
    with pytest.raises(CarrierUnavailable, match="brought 0 event descriptors instead of one"):
        Verbs.open_context(library, "rxe0")
    assert closed == [True]


def test_descriptors_of_other_things_are_not_counted() -> None:
    assert verbs._event_descriptors() == set()
