"""The guard bites, and there is nothing for it to bite."""

import importlib.util
import pickle
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.no_pickle import GUARD, PACKAGES, ROOT, UnsafeDeserialiser, unsafe_uses

SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
PICKLED = pickle.dumps(Path("x"))


def as_ours(source: str, name: str = "kvproto.imaginary") -> ModuleType:
    """A module of that source, loaded as if it lay in our package."""
    filename = ROOT / "kvproto" / "imaginary.py"
    module = ModuleType(name)
    exec(compile(source, str(filename), "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_of_ours_has_an_unsafe_use(path):
    code = compile(path.read_text("utf-8"), str(path), "exec")
    assert list(unsafe_uses(code)) == []


@pytest.mark.parametrize(
    ("source", "finding"),
    [
        ("import pickle", "imports pickle"),
        ("import _pickle", "imports _pickle"),
        ("from pickle import loads", "imports pickle"),
        ("import dill as innocent", "imports dill"),
        ("def f():\n    import shelve", "imports shelve"),
        ("class C:\n    def f(self):\n        import marshal", "imports marshal"),
        ("import os, pickle", "imports pickle"),
        ("def f(torch):\n    return torch.load('x')", "uses torch.load"),
        ("import torch\nload = torch.load", "uses torch.load"),
        ("from torch import load", "imports torch.load"),
    ],
)
def test_the_guard_bites_when_a_module_is_loaded(source, finding):
    with pytest.raises(UnsafeDeserialiser, match=finding):
        as_ours(source)
    assert [finding in found for found in GUARD.take()] == [True]


def test_the_guard_bites_when_something_is_unpickled():
    """However the unpickler came into our hands."""
    module = as_ours("def use(loads, data):\n    return loads(data)")
    for loads in (pickle.loads, pickle._loads):
        with pytest.raises(UnsafeDeserialiser, match=r"imaginary\.py:2: unpickles pathlib"):
            module.use(loads, PICKLED)
    assert len(GUARD.take()) == 2


def test_a_swallowed_finding_is_kept():
    module = as_ours(
        "def use(loads, data):\n    try:\n        loads(data)\n    except Exception:\n        pass"
    )
    assert module.use(pickle.loads, PICKLED) is None
    assert len(GUARD.take()) == 1


def test_others_may_use_pickle():
    assert pickle.loads(PICKLED) == Path("x")
    name = "third_party_of_these_tests"
    module = ModuleType(name)
    exec("import pickle\ndef use(data):\n    return pickle.loads(data)", module.__dict__)
    assert module.use(PICKLED) == Path("x")
    assert GUARD.take() == []


def test_torch_itself_is_left_alone():
    if "torch" not in sys.modules and importlib.util.find_spec("torch") is None:
        return
    import torch

    # What torch does inside when it copies is its own business.
    assert torch.nn.Linear(1, 1).__reduce_ex__(4)
    assert GUARD.take() == []


def test_words_that_only_look_like_it_are_fine():
    module = as_ours("def load(torch):\n    return torch.loaded, 'pickle'\nunpickled = 1")
    assert module.unpickled == 1
    assert GUARD.take() == []
