import ast
import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ops import bootstrap

SCRIPT = Path(bootstrap.__file__)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text("[project]\n", encoding="utf-8")
    (tmp_path / "constraints.txt").write_text("a==1\n", encoding="utf-8")
    (tmp_path / ".cache").mkdir()
    return tmp_path


def test_digest_changes_with_each_input(root: Path) -> None:
    digests = {bootstrap.inputs_digest(root, "3.11.7")}
    digests.add(bootstrap.inputs_digest(root, "3.12.0"))
    (root / "constraints.txt").write_text("a==2\n", encoding="utf-8")
    digests.add(bootstrap.inputs_digest(root, "3.11.7"))
    (root / "pyproject.toml").write_text("[project]\nname = 'x'\n", encoding="utf-8")
    digests.add(bootstrap.inputs_digest(root, "3.11.7"))
    assert len(digests) == 4
    assert bootstrap.inputs_digest(root, "3.11.7") in digests


def test_stamp_covers_the_extras_it_was_made_with(root: Path) -> None:
    stamp = root / "stamp.json"
    assert not bootstrap.is_installed(stamp, "d", ("router",))
    bootstrap.write_stamp(stamp, "d", ("router", "worker"))
    assert bootstrap.is_installed(stamp, "d", ("router",))
    assert not bootstrap.is_installed(stamp, "other", ("router",))
    assert not bootstrap.is_installed(stamp, "d", ("router", "dev"))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"digest": "d"}', '{"digest": "d", "ext'])
def test_a_damaged_stamp_means_not_installed(root: Path, content: str) -> None:
    stamp = root / "stamp.json"
    stamp.write_text(content, encoding="utf-8")
    assert not bootstrap.is_installed(stamp, "d", ())


def fake_venv(root: Path, *, pip: str) -> Path:
    """An environment whose python answers the version check and runs ``pip`` otherwise."""
    folder = root / ".venv" / "bin"
    folder.mkdir(parents=True)
    python = folder / "python"
    version = str(sys.version_info[:2])
    python.write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then echo "{version}"; exit; fi\n'
        f'echo "$@" >> "{root}/pip-runs"\n{pip}\n',
        encoding="utf-8",
    )
    python.chmod(0o755)
    return folder


def num_pip_runs(root: Path) -> int:
    path = root / "pip-runs"
    return len(path.read_text("utf-8").splitlines()) if path.exists() else 0


def test_installs_once_then_skips(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = fake_venv(root, pip="echo Downloading a-1.whl")
    log = root / ".cache" / "b.log"
    assert bootstrap.install(root, ("router",), log) == folder
    assert "Downloading a-1.whl" in capfd.readouterr().err
    assert bootstrap.install(root, ("router",), log) == folder
    assert num_pip_runs(root) == 1
    arguments = (root / "pip-runs").read_text("utf-8")
    assert f"-c {root}/constraints.txt -e {root}[router]" in arguments
    assert capfd.readouterr().err == ""


def test_changed_pins_or_more_extras_install_again(root: Path) -> None:
    fake_venv(root, pip="")
    log = root / ".cache" / "b.log"
    bootstrap.install(root, ("router",), log)
    bootstrap.install(root, ("router", "dev"), log)
    (root / "constraints.txt").write_text("a==2\n", encoding="utf-8")
    bootstrap.install(root, ("router",), log)
    assert num_pip_runs(root) == 3


def test_failure_is_one_sentence_and_leaves_no_stamp(root: Path) -> None:
    fake_venv(root, pip='echo Collecting a; echo "ERROR: No matching distribution."; exit 1')
    log = root / ".cache" / "b.log"
    for _ in range(2):
        with pytest.raises(bootstrap.BootstrapError) as caught:
            bootstrap.install(root, ("router",), log)
        assert str(caught.value) == (
            f"Installing the packages failed (No matching distribution); the full log is {log}."
        )
    assert num_pip_runs(root) == 2
    assert "Collecting a" in log.read_text("utf-8")


def test_half_an_environment_is_made_again(root: Path) -> None:
    folder = fake_venv(root, pip="")
    (folder / "python").write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    bootstrap.make_venv(root / ".venv", root / ".cache" / "b.log")
    assert bootstrap.is_working(folder / "python")


def test_a_second_start_waits_for_the_first(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fake_venv(root, pip="")
    log = root / ".cache" / "b.log"
    held = os.open(root / ".cache" / "bootstrap.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    second = threading.Thread(target=bootstrap.install, args=(root, ("router",), log))
    second.start()
    while "waiting for it" not in (seen := capfd.readouterr().err):
        assert seen == ""
    assert num_pip_runs(root) == 0
    os.close(held)
    second.join(timeout=40)
    assert num_pip_runs(root) == 1


def run_script(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (root / "ops").mkdir(exist_ok=True)
    (root / "ops" / "bootstrap.py").write_bytes(SCRIPT.read_bytes())
    return subprocess.run(
        # -I: proves that nothing of this environment is needed.
        [sys.executable, "-I", str(root / "ops" / "bootstrap.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


@pytest.mark.parametrize(("verb", "program"), [("demo", "pdctl"), ("test", "python")])
def test_becomes_the_program_with_the_arguments(root: Path, verb: str, program: str) -> None:
    folder = fake_venv(root, pip='echo "ran: $@"')
    (folder / "pdctl").write_text('#!/bin/sh\necho "ran: $@"\nexit 7\n', encoding="utf-8")
    (folder / "pdctl").chmod(0o755)
    result = run_script(root, verb, "-k", "two words")
    expected = {"pdctl": "ran: demo -k two words", "python": "ran: -m ops.checks -k two words"}
    assert result.stdout.splitlines()[-1] == expected[program]
    assert result.returncode == (7 if verb == "demo" else 0)


def test_failed_installation_is_one_sentence(root: Path) -> None:
    fake_venv(root, pip="echo ERROR: no network; exit 1")
    result = run_script(root, "demo")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith("Installing the packages failed (no network)")


@pytest.mark.parametrize("arguments", [(), ("deploy",)])
def test_unknown_verb_shows_the_usage(root: Path, arguments: tuple[str, ...]) -> None:
    result = run_script(root, *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("usage: python3 ops/bootstrap.py demo")


def test_an_old_python_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2, "final", 0))
    assert bootstrap.main(["demo"]) == 1
    assert capsys.readouterr().err == "Python 3.11 or newer is needed, this is 3.9.2.\n"


def test_an_old_python_can_read_the_file() -> None:
    # 3.7 is the oldest that knows "from __future__ import annotations".
    ast.parse(SCRIPT.read_text(encoding="utf-8"), feature_version=(3, 7))


def test_only_the_standard_library_is_imported() -> None:
    code = (
        "import runpy, sys, json; sys.argv = ['x'];"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='loaded');"
        "print(json.dumps(sorted({n.partition('.')[0] for n in sys.modules})))"
    )
    output = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    ).stdout
    names = [name for name in json.loads(output) if not name.startswith("_")]
    assert set(names) <= set(sys.stdlib_module_names)
