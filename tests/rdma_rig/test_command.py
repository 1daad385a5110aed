"""``python -m tests.rdma``: what runs, what is counted, and the one line."""

import subprocess
import sys
from pathlib import Path

import pytest

import tests.rdma.__main__ as command
from tests.rdma.rig.errors import RigUnavailable
from tests.rdma.rig.guest import Ending

_CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_signal_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.signal, "signal", lambda number, handler: None)


@pytest.fixture
def no_rig(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that cannot have the rig."""

    def prepare(*arguments: object) -> None:
        raise RigUnavailable("this is a toaster")

    monkeypatch.setattr(command, "prepare", prepare)
    monkeypatch.delenv(command.RIG_VARIABLE, raising=False)


def test_the_marked_tests_run_and_the_long_ones_on_demand() -> None:
    ordinary = command.pytest_command([], {})
    assert ordinary[:5] == [sys.executable, "-m", "pytest", "-m", "rdma and not long"]
    assert ordinary[-1] == "tests/rdma"
    assert command.pytest_command([], {"PD_LONG_TESTS": "1"})[4] == "rdma"


def test_named_tests_run_alone(tmp_path: Path) -> None:
    named = f"{tmp_path}::test_x"
    assert command.pytest_command(["-x", named], {})[-2:] == ["-x", named]
    assert command.pytest_command(["-k", "name"], {})[-3:] == ["-k", "name", "tests/rdma"]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("tests/a.py::b\n\n3 tests collected in 0.01s\n", 3),
        ("1 test collected in 0.01s", 1),
        ("9/12 tests collected (3 deselected) in 0.10s", 9),
        ("no tests collected (3 deselected) in 0.10s", 0),
        ("no tests collected in 0.01s", 0),
    ],
)
def test_the_count_is_read_from_pytest(text: str, number: int) -> None:
    assert command.parse_count(text) == number


def test_marked_tests_are_counted_and_broken_modules_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # They take most of the time.
    module = tmp_path / "test_it.py"
    module.write_text("def test_a(): pass\ndef test_b(): pass\n", encoding="utf-8")
    pytest_here = [sys.executable, "-m", "pytest", "-c", "/dev/null", str(module)]
    assert command.count_tests(pytest_here) == 2
    assert command.count_tests([*pytest_here, "-k", "nothing"]) == 0
    module.write_text("import absent_module\n", encoding="utf-8")
    with pytest.raises(command.CollectionFailed, match="absent_module"):
        command.count_tests(pytest_here)


def test_without_the_rig_one_line_says_so(
    no_rig: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "count_tests", lambda words: 12)
    assert command.main([]) == 0
    assert capsys.readouterr().out == ("12 RDMA tests did NOT run, because this is a toaster.\n")


def test_a_rig_that_is_required_is_a_failure_without(
    no_rig: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "count_tests", lambda words: 1)
    monkeypatch.setenv(command.RIG_VARIABLE, "required")
    assert command.main([]) == 1
    assert capsys.readouterr().out.startswith("1 RDMA test did NOT run")


def test_tests_that_cannot_be_counted_are_a_failure(
    no_rig: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(words: object) -> int:
        raise command.CollectionFailed("ImportError: no")

    monkeypatch.setattr(command, "count_tests", fail)
    assert command.main([]) == 1
    assert "ImportError: no" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        (Ending(0, 0.6, ""), "of which boot 0.6 s"),
        (Ending(1, 0.6, ""), "of which boot 0.6 s"),
        (Ending(124, 0.6, ""), "stopped after 1800 s"),
        (Ending(125, None, "Kernel panic"), "its kernel last said:\nKernel panic"),
    ],
)
def test_the_status_of_the_guest_is_ours(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ending: Ending,
    words: str,
) -> None:
    class Rig:
        def run(self, arguments: object, output: object, *, timeout_s: float) -> Ending:
            return ending

    monkeypatch.setattr(command, "prepare", lambda host, env, say: Rig())
    monkeypatch.delenv("PD_LONG_TESTS", raising=False)
    assert command.main([]) == ending.status
    assert words in capsys.readouterr().err


def test_an_ordinary_run_leaves_the_marked_tests_out() -> None:
    def collect(*arguments: str) -> str:
        return subprocess.run(
            [*(sys.executable, "-m", "pytest", "--collect-only", "-q"), *arguments, "tests/rdma"],
            cwd=_CHECKOUT,
            capture_output=True,
            encoding="utf-8",
            check=False,
        ).stdout

    # As ``ops.checks`` calls it.
    ordinary = collect("-m", "not long")
    assert "no tests collected" in ordinary
    assert "deselected" in ordinary
    assert command.parse_count(collect("-m", "rdma")) > 0
