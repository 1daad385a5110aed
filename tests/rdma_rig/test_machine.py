from pathlib import Path

import pytest

from tests.rdma.rig import kernel, machine, packages
from tests.rdma.rig.errors import RigUnavailable
from tests.rdma.rig.guest import Ending, Guest
from tests.rdma.rig.host import Host
from tests.rdma.rig.machine import Rig, guest_env, prepare
from tests.rdma.rig.packages import PackageEntry

_HOST = Host("Linux", "x86_64", "debian", "cpython", True, True, 8 << 30)


def _say(line: str) -> None:
    raise AssertionError(line)


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A cache of its own on a machine that has all commands."""
    monkeypatch.setattr(kernel, "tools_missing", list)
    return {"PD_CACHE_DIR": str(tmp_path / "cache")}


def test_an_obstacle_leaves_no_trace(tmp_path: Path) -> None:
    host = Host("Darwin", "arm64", "", "cpython", False, False, 0)
    with pytest.raises(RigUnavailable, match="this is Darwin"):
        prepare(host, {"PD_CACHE_DIR": str(tmp_path / "cache")}, _say)
    assert not (tmp_path / "cache").exists()


def test_missing_commands_are_named(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "tools_missing", lambda: ["taskset", "strip"])
    with pytest.raises(RigUnavailable, match="commands are missing: taskset, strip"):
        prepare(_HOST, env, _say)


def test_nothing_is_installed_for_another_python(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "missing", lambda names: list(names))
    entry = PackageEntry("1", "python3 (<< 3.3), python3 (>= 3.2~)")
    monkeypatch.setattr(packages, "find_entry", lambda name: entry)
    with pytest.raises(RigUnavailable, match=r"pyverbs is for Python 3\.2 and this is 3\."):
        prepare(_HOST, env, _say)


@pytest.mark.parametrize(
    ("ending", "said", "words"),
    [
        (Ending(125, None, "booting\nptrace: not permitted"), b"", "ptrace: not permitted"),
        (Ending(125, None, "booting"), b"rig: no soft RoCE\n", "rig: no soft RoCE"),
        (Ending(125, None, ""), b"", "it said nothing"),
    ],
)
def test_a_guest_that_does_not_start_is_told(
    env: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ending: Ending,
    said: bytes,
    words: str,
) -> None:
    def run(self: Rig, arguments: object, output: object, **wishes: object) -> Ending:
        output.write(said)  # type: ignore[attr-defined]
        return ending

    monkeypatch.setattr(packages, "missing", lambda names: [])
    monkeypatch.setattr(machine.binding, "link_alone", lambda folder, suffix: folder)
    monkeypatch.setattr(kernel, "obtain", lambda cache, say: tmp_path / "kernel")
    monkeypatch.setattr(Rig, "run", run)
    with pytest.raises(RigUnavailable, match=rf"does not start here \({words}\)"):
        prepare(_HOST, env, _say)


def test_the_guest_has_little_of_our_environment() -> None:
    env = guest_env(
        {"PD_LONG_TESTS": "1", "SECRET": "x", "PYTHONPATH": "/checkout", "HOME": "/home/me"},
        Path("/cache/pyverbs"),
        Path("/venv/bin"),
    )
    assert env["PD_LONG_TESTS"] == "1"
    assert "SECRET" not in env
    assert env["PYTHONPATH"] == "/cache/pyverbs:/checkout"
    assert env["PATH"].split(":")[0] == "/venv/bin"
    assert env["HOME"] == "/home/me"
    assert guest_env({}, Path("/p"), Path("/b"))["PYTHONPATH"] == "/p"


def test_a_rig_runs_in_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def run(self: Guest, command: object, output: object, **wishes: object) -> Ending:
        seen.append(command)
        return Ending(0, 0.5, "")

    monkeypatch.setattr(Guest, "run", run)
    monkeypatch.chdir(tmp_path)
    ending = Rig(Guest(tmp_path, 1 << 30), tmp_path / "p").run(["true"], None, timeout_s=1)  # type: ignore[arg-type]
    assert ending.status == 0
    assert seen[0].folder == tmp_path  # type: ignore[attr-defined]
