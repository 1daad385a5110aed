"""The verbs from outside, in throw-away roots."""

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ops.node.facts import CommandOutput, LiveFacts, RecordedFacts, RecordingFacts, read_dump
from ops.node_command import node_group
from ops.pdctl import main
from tests.ops.node import fact_trees as trees
from tests.ops.node.fact_trees import tree_digest, write_tree

RMEM = "proc/sys/net/core/rmem_max"
JOURNAL = "var/lib/pdserve/node/journal.jsonl"
Verb = Callable[..., Result]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    write_tree(folder, trees.STOCK_TREE)
    return folder


@pytest.fixture
def verb(root: Path) -> Verb:
    """Runs a verb on the root."""

    def run(name: str, *arguments: str, **options: object) -> Result:
        return CliRunner().invoke(node_group, [name, "--root", str(root), *arguments], **options)

    return run


def message(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence of an error, as a person sees it."""
    with pytest.raises(SystemExit) as caught:
        main(["node", *arguments])
    assert caught.value.code == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_apply_verify_rollback_leaves_the_tree_byte_for_byte(root: Path, verb: Verb) -> None:
    before = tree_digest(root)
    plan = verb("plan")
    assert tree_digest(root) == before
    assert plan.exit_code == 0
    assert "+LANG=en_US.UTF-8" in plan.output
    assert f"/{RMEM}: 212992 -> 268435456" in plan.output
    assert "--- /dev/null\n+++ /etc/sysctl.d/90-pdserve.conf" in plan.output
    assert verb("verify").exit_code == 1

    applied = verb("apply", "--yes")
    assert applied.exit_code == 0, applied.output
    assert "left for you: systemctl daemon-reexec" in applied.output
    assert (root / RMEM).read_text(encoding="utf-8") == "268435456"
    default = root / "etc/default/locale"
    assert default.stat().st_mode & 0o777 == 0o640
    assert "LANG=en_US.UTF-8" in default.read_text(encoding="utf-8")
    verified = verb("verify")
    assert verified.exit_code == 0, verified.output
    assert f"OK      verify /{RMEM}: 268435456" in verified.output
    assert "Cure: systemctl daemon-reexec" in verified.output

    rolled_back = verb("rollback", "--yes")
    assert rolled_back.exit_code == 0
    assert "put back /etc/default/locale" in rolled_back.output
    assert "remove the folder /etc/systemd/system.conf.d" in rolled_back.output
    assert tree_digest(root) == before


def test_applying_twice_changes_nothing(root: Path, verb: Verb) -> None:
    assert verb("apply", "--yes").exit_code == 0
    once = tree_digest(root)
    again = verb("apply", "--yes")
    assert (again.exit_code, again.output) == (0, "nothing to change\n")
    assert verb("plan").output == "nothing to change\n"
    assert tree_digest(root) == once


def test_rolling_back_twice_is_fine(root: Path, verb: Verb) -> None:
    before = tree_digest(root)
    verb("apply", "--yes")
    verb("rollback", "--yes")
    again = verb("rollback", "--yes")
    assert (again.exit_code, again.output) == (0, "nothing to take back\n")
    assert tree_digest(root) == before


def test_a_second_apply_is_taken_back_with_the_first(root: Path, verb: Verb) -> None:
    before = tree_digest(root)
    verb("apply", "--yes")
    # What a new version of the tool, or a new network card, would bring.
    (root / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert verb("verify").exit_code == 1
    second = verb("apply", "--yes")
    assert "made /etc/modules-load.d/pdserve.conf" in second.output
    assert verb("rollback", "--yes").exit_code == 0
    shutil.rmtree(root / "sys")
    assert tree_digest(root) == before


def test_what_somebody_changed_since_is_not_overwritten(
    root: Path, verb: Verb, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree_digest(root)
    verb("apply", "--yes")
    default = root / "etc/default/locale"
    default.write_text("LANG=de_DE.UTF-8\n", encoding="utf-8")
    (root / RMEM).write_text("7\n", encoding="utf-8")
    edited = tree_digest(root)
    said = message(capsys, "rollback", "--yes", "--root", str(root))
    assert f"/{RMEM}" in said
    assert "/etc/default/locale" in said
    assert "--force" in said
    assert tree_digest(root) == edited
    assert verb("rollback", "--yes", "--force").exit_code == 0
    assert tree_digest(root) == before


def test_verify_names_what_does_not_hold_any_more(root: Path, verb: Verb) -> None:
    verb("apply", "--yes")
    (root / RMEM).write_text("212992\n", encoding="utf-8")
    (root / "etc/sysctl.d/90-pdserve.conf").unlink()
    result = verb("verify", "--json")
    assert result.exit_code == 1
    failed = {
        item["subject"]: item["measured"]
        for item in json.loads(result.output)["findings"]
        if item["verdict"] == "FAIL"
    }
    assert failed == {f"/{RMEM}": "212992", "/etc/sysctl.d/90-pdserve.conf": "no such file"}


def test_a_folder_that_others_use_stays(root: Path, verb: Verb) -> None:
    verb("apply", "--yes")
    theirs = root / "etc/systemd/system.conf.d/theirs.conf"
    theirs.write_text("[Manager]\n", encoding="utf-8")
    (root / "var/lib/pdserve/theirs").mkdir()
    result = verb("rollback", "--yes")
    assert result.exit_code == 0
    assert "system.conf.d stays" in result.output
    assert theirs.exists()
    assert os.listdir(root / "var/lib/pdserve") == ["theirs"]


def test_links_lead_to_the_file_and_never_out_of_the_root(
    root: Path, verb: Verb, tmp_path: Path
) -> None:
    outside = tmp_path / "locale.conf"
    outside.write_text("LANG=C\n", encoding="utf-8")
    default = root / "etc/default/locale"
    default.unlink()
    # As that machine reads it, this is /locale.conf of its own.
    default.symlink_to("/../../locale.conf")
    (root / "locale.conf").write_text("LANG=C\n", encoding="utf-8")
    (root / "etc/locale.conf").symlink_to(os.path.relpath("/locale.conf", "/etc"))
    before = tree_digest(root)
    assert verb("apply", "--yes").exit_code == 0
    assert default.is_symlink()
    assert (root / "locale.conf").read_text(encoding="utf-8") == "LANG=en_US.UTF-8\n"
    assert outside.read_text(encoding="utf-8") == "LANG=C\n"
    assert verb("rollback", "--yes").exit_code == 0
    assert tree_digest(root) == before


@pytest.mark.parametrize("name", ["apply", "rollback"])
def test_without_a_terminal_yes_must_be_said(
    name: str,
    root: Path,
    verb: Verb,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if name == "rollback":
        verb("apply", "--yes")
    before = tree_digest(root)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert "--yes" in message(capsys, name, "--root", str(root))
    assert tree_digest(root) == before


@pytest.mark.parametrize(("answer", "is_changed"), [("n\n", False), ("y\n", True)])
def test_with_a_terminal_it_asks(
    answer: str, is_changed: bool, root: Path, program_env: dict[str, str]
) -> None:
    before = tree_digest(root)
    terminal, inside = os.openpty()
    try:
        os.write(terminal, answer.encode())
        result = subprocess.run(
            [sys.executable, "-m", "ops.pdctl", "node", "apply", "--root", str(root)],
            stdin=inside,
            capture_output=True,
            encoding="utf-8",
            env=program_env,
            timeout=50,
            check=False,
        )
    finally:
        os.close(terminal)
        os.close(inside)
    assert "changes in" in result.stdout
    assert result.returncode == (0 if is_changed else 1)
    assert (tree_digest(root) != before) is is_changed


def test_an_unknown_distribution_is_checked_and_not_changed(
    root: Path, verb: Verb, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "etc/os-release").write_text(trees.ALPINE, encoding="utf-8")
    before = tree_digest(root)
    assert "sysctl net.core.rmem_max" in verb("check").output
    assert "apply refuses here" in verb("plan").output
    assert "alpine 3.19.1" in message(capsys, "apply", "--yes", "--root", str(root))
    assert tree_digest(root) == before


def test_this_machine_is_changed_only_by_root(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(
        "ops.node_command.all_changes", lambda _: [trees.file_change("/etc/pdserve-test", "x\n")]
    )
    monkeypatch.setattr(
        "ops.node_command.LiveFacts",
        lambda *_, **__: trees.facts({"/etc/os-release": trees.DEBIAN_12}),
    )
    assert "needs root" in message(capsys, "apply", "--yes")
    assert "needs root" in message(capsys, "rollback", "--yes")
    assert not Path("/etc/pdserve-test").exists()


def test_a_folder_that_cannot_be_written_is_found_before_anything_is_changed(
    root: Path, program_env: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    if os.geteuid() != 0:
        (root / "etc/sysctl.d").chmod(0o555)
        before = tree_digest(root)
        assert "cannot be written" in message(capsys, "apply", "--yes", "--root", str(root))
        assert tree_digest(root) == before
        return
    # Root may write everywhere but on a file system that is read-only.
    before = tree_digest(root)
    etc = root / "etc"
    program = f"{sys.executable} -m ops.pdctl node apply --yes --root {root}"
    result = subprocess.run(
        [
            *("unshare", "--mount", "sh", "-c"),
            f"mount --bind {etc} {etc} && mount -o remount,bind,ro {etc} || exit 77; {program}",
        ],
        capture_output=True,
        encoding="utf-8",
        env=program_env,
        timeout=50,
        check=False,
    )
    if result.returncode == 77 or "unshare" in result.stderr:
        pytest.skip("mounts cannot be made here")
    assert result.returncode == 1
    assert "read-only file system" in result.stderr
    assert result.stderr.count("\n") == 1
    assert tree_digest(root) == before


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe", "cannot be read"),
        (b"{", "is not JSON"),
        (b"[]", "is no dump"),
        (b'{"dump_version": 99}', "version 99"),
        (b'{"dump_version": 1, "files": 3}', "damaged dump"),
    ],
)
@pytest.mark.parametrize("name", ["check", "plan", "verify"])
def test_an_unreadable_dump(
    name: str, content: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump = tmp_path / "dump.json"
    dump.write_bytes(content)
    assert words in message(capsys, name, "--from", str(dump))


def test_a_dump_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot be read" in message(capsys, "check", "--from", str(tmp_path / "none"))


def test_a_dump_and_a_root_at_once(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("check", "--from", str(tmp_path / "x"), "--root", str(root))
    assert "not both" in message(capsys, *arguments)


def test_a_dump_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot be written" in message(capsys, "dump", "--output", str(tmp_path / "no" / "x"))


@pytest.mark.parametrize("name", ["check", "plan", "verify"])
def test_a_dump_says_what_the_machine_says(
    name: str, root: Path, verb: Verb, tmp_path: Path
) -> None:
    dump = tmp_path / "dump.json"
    for _ in range(2):
        assert verb("dump", "--output", str(dump)).exit_code == 0
        assert dump.stat().st_mode & 0o777 == 0o600
        shown = CliRunner().invoke(node_group, [name, "--from", str(dump)])
        live = verb(name)
        assert (shown.exit_code, shown.output) == (live.exit_code, live.output)
        # And once more after the changes.
        verb("apply", "--yes")


def test_the_dump_of_this_machine_says_what_it_says(tmp_path: Path) -> None:
    result = CliRunner().invoke(node_group, ["dump"])
    assert result.exit_code == 0
    dump = tmp_path / "dump.json"
    dump.write_text(result.stdout, encoding="utf-8")
    live = CliRunner().invoke(node_group, ["check", "--json"])
    shown = CliRunner().invoke(node_group, ["check", "--json", "--from", str(dump)])
    assert (shown.exit_code, shown.output) == (live.exit_code, live.output)
    report = json.loads(live.output)
    assert report["counts"]["FAIL"] == sum(
        finding["verdict"] == "FAIL" for finding in report["findings"]
    )
    assert live.exit_code == (1 if report["counts"]["FAIL"] else 0)


def test_a_dump_holds_no_secrets() -> None:
    secret = "LANG=C.UTF-8\0API_KEY=hunter2\0PYTHONUTF8=1\0"
    command = "systemctl show-environment"
    source = RecordedFacts(
        files={"/proc/1/environ": secret},
        commands={command: CommandOutput(0, secret.replace("\0", "\n"), "")},
    )
    facts = RecordingFacts(source)
    assert facts.text("/proc/1/environ") == secret
    assert "hunter2" in facts.run(*command.split()).stdout
    assert "hunter2" not in facts.as_json()
    assert facts.as_json().count("PYTHONUTF8=1") == 2


def test_check_prints_a_line_a_finding_and_fails_on_a_fail(verb: Verb) -> None:
    result = verb("check")
    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert lines[-1].endswith("UNKNOWN")
    wanted = "(wanted at least 268435456)"
    assert f"FAIL    sysctl net.core.rmem_max: 212992 {wanted}: A socket" in result.output
    assert all(line.split()[0] in ("OK", "WARN", "FAIL", "UNKNOWN") for line in lines[:-1])


def test_check_of_a_good_machine_ends_with_0(verb: Verb) -> None:
    verb("apply", "--yes")
    result = verb("check")
    assert result.exit_code == 0, result.output


def test_the_node_tool_runs_in_the_encoding_that_it_is_to_find(
    root: Path, program_env: dict[str, str]
) -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    (root / "etc/default/locale").write_text("LANG=“x”\n", encoding="utf-8")
    for name, code in (("check", 1), ("plan", 0)):
        result = subprocess.run(
            [sys.executable, "-m", "ops.pdctl", "node", name, "--root", str(root)],
            capture_output=True,
            encoding="utf-8",
            env={**program_env, **plain},
            timeout=50,
            check=False,
        )
        assert result.returncode == code, result.stderr
        assert "“x”" in result.stdout or "\\u201cx\\u201d" in result.stdout


def test_the_other_verbs_still_refuse_that_encoding(program_env: dict[str, str]) -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    result = subprocess.run(
        [sys.executable, "-m", "ops.pdctl", "status"],
        capture_output=True,
        encoding="utf-8",
        env={**program_env, **plain},
        timeout=50,
        check=False,
    )
    assert result.returncode == 1
    assert "not UTF-8" in result.stderr


def test_a_dump_of_a_root_does_not_ask_this_machine(verb: Verb, tmp_path: Path) -> None:
    dump = tmp_path / "dump.json"
    verb("dump", "--output", str(dump))
    assert json.loads(dump.read_text(encoding="utf-8"))["commands"] == {}
    assert read_dump(dump).text("/etc/os-release") == trees.DEBIAN_12


def test_facts_of_a_root_follow_links_inside_it(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write_tree(root, {"/usr/lib/os-release": trees.ROCKY_9})
    (root / "etc").mkdir()
    (root / "etc/os-release").symlink_to("/usr/lib/os-release")
    (root / "etc/circle").symlink_to("circle")
    facts = LiveFacts(root, runs_commands=False)
    assert facts.text("/etc/os-release") == trees.ROCKY_9
    assert facts.link("/etc/os-release") == "/usr/lib/os-release"
    assert facts.text("/etc/circle") is None
