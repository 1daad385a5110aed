"""The runbooks as scripts: they parse, are clean, and end soon and clearly whatever is missing."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.ops.runbook_tree import RUNBOOKS, Tree

SCRIPTS = sorted(path.name for path in RUNBOOKS.glob("*.sh") if path.name != "journal.sh")
CHANGING = sorted({*SCRIPTS} - {"mtu.sh"})
# CentOS 7 has bash 4.2; these came later and would fail there at run time only.
NEWER_THAN_BASH_4_2 = (
    "declare -n",
    "local -n",
    "@Q}",
    "@A}",
    "wait -n",
    "mapfile -d",
    "readarray -d",
)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_each_concern_has_a_runbook() -> None:
    assert [
        *("flow-control.sh", "locale.sh", "modprobe.sh", "mtu.sh", "packages.sh"),
        *("rdma.sh", "sysctl.sh", "system.sh"),
    ] == SCRIPTS


@pytest.mark.parametrize("name", [*SCRIPTS, "journal.sh"])
def test_bash_can_parse_it(name: str) -> None:
    ended = subprocess.run(["bash", "-n", RUNBOOKS / name], capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize("name", [*SCRIPTS, "journal.sh"])
def test_it_uses_nothing_newer_than_bash_4_2(name: str) -> None:
    text = (RUNBOOKS / name).read_text(encoding="ascii")
    assert [word for word in NEWER_THAN_BASH_4_2 if word in text] == []


def test_shellcheck_has_nothing_to_say() -> None:
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed; it comes with the dev extra")
    ended = subprocess.run(
        [shellcheck, "-x", *sorted(RUNBOOKS.glob("*.sh"))],
        cwd=RUNBOOKS.parent.parent,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert ended.stdout + ended.stderr == ""


@pytest.mark.parametrize("name", SCRIPTS)
def test_they_can_be_started_by_name_and_set_out_strict(name: str) -> None:
    path = RUNBOOKS / name
    assert os.access(path, os.X_OK)
    lines = path.read_text(encoding="ascii").splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -eu" in lines
    assert f"#   {name} check" in "\n".join(lines), "the usage is not at the top"


@pytest.mark.parametrize("name", SCRIPTS)
def test_check_in_an_empty_root_without_tools_says_what_it_cannot_see(
    tree: Tree, name: str
) -> None:
    verdicts = tree.findings(name)
    assert "FAIL" not in verdicts.values()
    assert "UNKNOWN" in verdicts.values()


@pytest.mark.parametrize("name", SCRIPTS)
def test_check_of_this_machine_ends_without_an_error_of_its_own(tree: Tree, name: str) -> None:
    ended = subprocess.run(
        [tree.bin / "bash", RUNBOOKS / name, "check"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=10,  # what a person is asked to wait at most
        env={"PATH": str(tree.bin)},
        check=False,
    )
    assert ended.stderr == ""
    assert ended.returncode in (0, 1)
    assert ended.stdout.strip()


def test_a_tool_that_hangs_does_not_hang_the_check(tree: Tree) -> None:
    tree.tool("timedatectl", "exec sleep 60")
    assert tree.findings("system.sh")["clock sync"] == "UNKNOWN"


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("arguments", [(), ("repair",), ("check", "plan"), ("check", "--all")])
def test_wrong_usage_shows_the_right_one(tree: Tree, name: str, arguments: tuple[str, ...]) -> None:
    before = tree.snapshot()
    ended = tree.run(name, *arguments)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"usage: {name} check")
    assert tree.snapshot() == before


def test_a_root_that_is_no_folder_is_named(tree: Tree) -> None:
    ended = tree.run("sysctl.sh", "check", root=tree.path / "nowhere")
    assert ended.returncode == 1
    assert "nowhere is not a folder" in ended.stderr


@pytest.mark.parametrize("name", CHANGING)
def test_rollback_without_an_apply_has_nothing_to_do(tree: Tree, name: str) -> None:
    before = tree.snapshot()
    ended = tree.run(name, "rollback", "--yes")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "nothing to roll back" in ended.stdout
    assert tree.snapshot() == before


@pytest.mark.parametrize("name", CHANGING)
def test_plan_changes_nothing(tree: Tree, name: str) -> None:
    before = tree.snapshot()
    tree.run(name, "plan")
    assert tree.snapshot() == before
