"""apply and rollback when something goes wrong, and in a real chroot."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ops.node.apply import apply_plan, check_can_apply
from ops.node.change import CommandChange, FileChange, ValueChange
from ops.node.errors import NodeError
from ops.node.facts import LiveFacts
from ops.node.finding import Verdict
from ops.node.journal import JOURNAL_FILE, parse_journal
from ops.node.plan import Plan, plan_of
from ops.node.rollback import roll_back
from ops.node.root_folder import RootFolder
from ops.node.verify import verify
from ops.node_command import node_group
from tests.ops.node import fact_trees as trees
from tests.ops.node.fact_trees import tree_digest, write_tree

NEW = FileChange("/etc/new/a.conf", "a\n", "new", mode=0o600)
OLD = FileChange("/etc/default/locale", "LANG=C.UTF-8\n", "old")
VALUE = ValueChange("/proc/sys/net/core/rmem_max", "268435456", "value")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    write_tree(folder, trees.STOCK_TREE)
    return folder


def nothing(_: str) -> None:
    """A report that nobody reads."""


def apply(root: Path, *changes: FileChange | ValueChange | CommandChange) -> list[str]:
    said: list[str] = []
    apply_plan(RootFolder(root), Plan(changes), said.append)
    return said


def test_modes_of_new_files_do_not_depend_on_the_umask(root: Path) -> None:
    before = os.umask(0o077)
    try:
        apply(root, NEW, OLD)
    finally:
        os.umask(before)
    assert (root / "etc/new/a.conf").stat().st_mode & 0o777 == 0o600
    assert (root / "etc/new").stat().st_mode & 0o777 == 0o755
    assert (root / "etc/default/locale").stat().st_mode & 0o777 == 0o640
    assert (root / "var/lib/pdserve/node").stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_the_owner_is_kept_and_put_back(root: Path) -> None:
    os.chown(root / "etc/default/locale", 12, 34)
    before = tree_digest(root)
    apply(root, OLD)
    facts = (root / "etc/default/locale").stat()
    assert (facts.st_uid, facts.st_gid) == (12, 34)
    roll_back(RootFolder(root), nothing)
    assert tree_digest(root) == before


def test_extended_attributes_are_kept(root: Path) -> None:
    place = root / "etc/default/locale"
    try:
        os.setxattr(place, "user.label", b"theirs")
    except OSError:
        pytest.skip("this file system has no extended attributes")
    apply(root, OLD)
    assert os.getxattr(place, "user.label") == b"theirs"
    roll_back(RootFolder(root), nothing)
    assert os.getxattr(place, "user.label") == b"theirs"


def test_bytes_that_are_no_text_come_back(root: Path) -> None:
    (root / "etc/default/locale").write_bytes(b"LANG=\xff\xfe\0")
    (root / "proc/sys/net/core/rmem_max").write_bytes(b"\xff\n")
    before = tree_digest(root)
    apply(root, OLD, VALUE)
    roll_back(RootFolder(root), nothing)
    assert tree_digest(root) == before


def test_a_failed_change_takes_back_those_before_it(root: Path) -> None:
    before = tree_digest(root)
    gone = ValueChange("/proc/sys/none", "1", "there is no such value")
    said: list[str] = []
    with pytest.raises(NodeError, match=r"all is as it was: .*sys/none"):
        apply_plan(RootFolder(root), Plan((NEW, OLD, VALUE, gone)), said.append)
    assert said[-3:] == [
        "put back /etc/default/locale",
        "remove /etc/new/a.conf",
        "remove the folder /etc/new",
    ]
    assert tree_digest(root) == before


def test_a_second_apply_that_fails_leaves_the_first(root: Path) -> None:
    before = tree_digest(root)
    apply(root, NEW)
    once = {path: said for path, said in tree_digest(root).items() if "pdserve/node" not in path}
    with pytest.raises(NodeError):
        apply(root, OLD, ValueChange("/proc/sys/none", "1", "there is no such value"))
    again = {path: said for path, said in tree_digest(root).items() if "pdserve/node" not in path}
    assert again == once
    # It is no interrupted one, so a third may follow.
    check_can_apply(RootFolder(root), LiveFacts(root, runs_commands=False), Plan((OLD,)))
    roll_back(RootFolder(root), nothing)
    assert tree_digest(root) == before


def test_a_value_that_the_kernel_does_not_take_is_an_error(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree_digest(root)
    monkeypatch.setattr("ops.node.apply.write_value", lambda *_: None)
    with pytest.raises(NodeError, match=r"shows '212992' after '268435456' was written"):
        apply(root, VALUE)
    assert tree_digest(root) == before


def test_ctrl_c_takes_everything_back(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = tree_digest(root)
    monkeypatch.setattr("ops.node.apply.write_value", interrupt)
    with pytest.raises(KeyboardInterrupt):
        apply(root, NEW, VALUE)
    assert tree_digest(root) == before


@pytest.mark.parametrize("turn", range(12))
def test_a_full_disk_takes_everything_back(
    turn: int, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write to the disk in its turn fails once; the journal stays readable."""
    before = tree_digest(root)
    fsync, calls = os.fsync, [0]

    def full(descriptor: int) -> None:
        calls[0] += 1
        if calls[0] == turn + 1:
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NodeError, match="No space left"):
        apply(root, NEW, OLD, VALUE)
    monkeypatch.undo()
    # A failure while the journal itself is made leaves what rollback removes.
    roll_back(RootFolder(root), nothing)
    assert tree_digest(root) == before


def test_a_rollback_that_fails_can_be_run_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    before = tree_digest(root)
    apply(root, NEW, OLD, VALUE)
    with monkeypatch.context() as patched:
        patched.setattr("ops.node.rollback.put_copy", refuse)
        with pytest.raises(NodeError, match=r"Read-only.* run it again"):
            roll_back(RootFolder(root), nothing)
    roll_back(RootFolder(root), nothing)
    assert tree_digest(root) == before


def test_something_in_the_way_of_a_file(root: Path) -> None:
    (root / "etc/new/a.conf").mkdir(parents=True)
    before = tree_digest(root)
    with pytest.raises(NodeError, match="is not a plain file"):
        apply(root, NEW)
    assert tree_digest(root) == before


def test_links_in_a_circle(root: Path) -> None:
    (root / "etc/new").symlink_to("new2")
    (root / "etc/new2").symlink_to("new")
    with pytest.raises(NodeError, match="circles"):
        check_can_apply(RootFolder(root), LiveFacts(root, runs_commands=False), Plan((NEW,)))


def test_two_at_once(root: Path) -> None:
    before = tree_digest(root)
    with RootFolder(root).locked():
        with pytest.raises(NodeError, match="another apply or rollback"):
            apply(root, NEW)
        with pytest.raises(NodeError, match="another apply or rollback"):
            roll_back(RootFolder(root), nothing)
    assert tree_digest(root) == before


class Here(RootFolder):
    """A root whose commands run without chroot."""

    @property
    def is_this_machine(self) -> bool:
        return True


def test_nobody_rolls_back_under_the_hands_of_a_command_that_outlives_us(
    root: Path, program_env: dict[str, str]
) -> None:
    """apply is killed, its command goes on: the lock is the command's until it ends."""
    before = tree_digest(root)
    started, gate = root / "started", root / "gate"
    for pipe in (started, gate):
        os.mkfifo(pipe)
    script = f"echo > {started}; read word < {gate}; echo late > {root}/etc/locale.gen"
    program = (
        "from tests.ops.node.test_apply import *\n"
        f"change = CommandChange(('sh', '-c', {script!r}), ('/etc/locale.gen',), 'x')\n"
        f"apply_plan(Here(Path({str(root)!r})), Plan((change,)), nothing)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=program_env, cwd=program_env["PYTHONPATH"]
    )
    started.read_bytes()
    process.kill()
    process.wait(timeout=30)
    with pytest.raises(NodeError, match="another apply or rollback"):
        roll_back(RootFolder(root), nothing)
    gate.write_text("on\n", encoding="utf-8")
    descriptor = os.open(root, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.close(descriptor)
    for pipe in (started, gate):
        pipe.unlink()
    assert (root / "etc/locale.gen").read_text(encoding="utf-8") == "late\n"
    roll_back(RootFolder(root), nothing)
    assert tree_digest(root) == before


def interrupted(root: Path) -> None:
    """A journal whose last apply did not come to its end."""
    apply(root, OLD)
    journal = root / JOURNAL_FILE.lstrip("/")
    lines = journal.read_text(encoding="utf-8").splitlines(keepends=True)
    assert json.loads(lines[-1])["kind"] == "applied"
    journal.write_text("".join(lines[:-1]), encoding="utf-8")


def test_after_an_interrupted_apply_comes_a_rollback(root: Path) -> None:
    before = tree_digest(root)
    interrupted(root)
    facts = LiveFacts(root, runs_commands=False)
    with pytest.raises(NodeError, match="first run: pdctl node rollback"):
        check_can_apply(RootFolder(root), facts, Plan((NEW,)))
    (finding,) = (item for item in verify(facts) if item.subject == "journal")
    assert finding.verdict is Verdict.FAIL
    roll_back(RootFolder(root), nothing)
    assert tree_digest(root) == before


def test_a_torn_last_line_was_never_carried_out(root: Path) -> None:
    journal = root / JOURNAL_FILE.lstrip("/")
    before = tree_digest(root)
    apply(root, OLD)
    content = journal.read_bytes()
    applied = tree_digest(root)
    start = content.rfind(b"\n", 0, -1) + 1
    for end in range(start, len(content)):
        text = parse_journal(content[:end].decode(), "here")
        assert (len(text.steps), text.is_applied) == (1, False)
    journal.write_bytes(content[: start + 9])
    assert tree_digest(root) != applied
    roll_back(RootFolder(root), nothing)
    assert tree_digest(root) == before


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"kind": "journal", "version": 9, "made_folders": []}', "version 9"),
        ('{"kind": "sideways", "number": 1}', "damaged"),
        ('{"kind": "file", "number": 1}', "damaged"),
        ("not json", "damaged"),
        ("[]", "damaged"),
    ],
)
def test_a_damaged_journal_is_said_and_nothing_is_touched(
    line: str, words: str, root: Path
) -> None:
    apply(root, OLD)
    (root / JOURNAL_FILE.lstrip("/")).write_text(f"{line}\n", encoding="utf-8")
    before = tree_digest(root)
    with pytest.raises(NodeError, match=words):
        roll_back(RootFolder(root), nothing)
    findings = verify(LiveFacts(root, runs_commands=False))
    assert any(item.subject == "journal" and words in item.reason for item in findings)
    assert tree_digest(root) == before


@pytest.mark.parametrize("is_gone", [True, False])
def test_an_original_that_is_damaged_or_gone(is_gone: bool, root: Path) -> None:
    apply(root, OLD, VALUE)
    (original,) = (root / "var/lib/pdserve/node/originals").iterdir()
    if is_gone:
        original.unlink()
    else:
        original.write_bytes(b"else")
    before = tree_digest(root)
    with pytest.raises(NodeError, match="is not what was saved there"):
        roll_back(RootFolder(root), nothing)
    assert tree_digest(root) == before


def test_a_folder_of_the_journal_that_is_not_ours(root: Path) -> None:
    (root / "var/lib/pdserve/node").mkdir(parents=True)
    before = tree_digest(root)
    with pytest.raises(NodeError, match="holds no journal"):
        apply(root, OLD)
    assert tree_digest(root) == before


def test_a_value_that_is_gone_with_its_device(root: Path) -> None:
    apply(root, OLD, VALUE)
    (root / "proc/sys/net/core/rmem_max").unlink()
    said: list[str] = []
    roll_back(RootFolder(root), said.append)
    assert "/proc/sys/net/core/rmem_max is gone, so is its value" in said


def test_two_checks_that_want_different_things_are_a_defect() -> None:
    other = FileChange(OLD.path, "LANG=x\n", "other")
    with pytest.raises(NodeError, match="report this as a defect"):
        plan_of(trees.facts(), [OLD, other])


def test_what_is_in_force_is_no_part_of_the_plan() -> None:
    facts = trees.facts({OLD.path: OLD.text, VALUE.path: "268435456\n", "/sys/choice": "a [b] c\n"})
    choice = ValueChange("/sys/choice", "b", "one of three")
    assert plan_of(facts, [OLD, VALUE, choice]).is_empty
    assert plan_of(trees.facts(), [OLD, OLD]).changes == (OLD,)


def test_verify_tells_a_reboot_from_none(root: Path) -> None:
    change = FileChange(OLD.path, "LANG=en_US.UTF-8\n", "x", needs="a reboot")
    apply(root, change)

    def of_file() -> Verdict:
        findings = verify(LiveFacts(root, runs_commands=False))
        return next(item.verdict for item in findings if item.subject == OLD.path)

    assert of_file() is Verdict.WARN
    boot_id = root / "proc/sys/kernel/random/boot_id"
    boot_id.write_text("another\n", encoding="utf-8")
    assert of_file() is Verdict.OK
    (root / OLD.path.lstrip("/")).write_text("LANG=C.UTF-8\n", encoding="utf-8")
    assert of_file() is Verdict.WARN


def test_a_command_of_this_machine(tmp_path: Path) -> None:
    """RootFolder("/") starts it as it is; no such tool, an error, and a good end."""
    here = RootFolder()
    assert here.is_this_machine
    here.run(("sh", "-c", "exit 0"))
    with pytest.raises(NodeError, match="ended with 3: why"):
        here.run(("sh", "-c", "echo why; exit 3"))
    with pytest.raises(NodeError, match="cannot be run"):
        here.run(("pdserve-no-such-tool",))


def test_a_command_that_fails_takes_back_what_was_before_it(root: Path) -> None:
    """The tree has no shell, and a plain user may not even change the root."""
    before = tree_digest(root)
    command = CommandChange(("locale-gen",), ("/usr/lib/locale/locale-archive",), "command")
    with pytest.raises(NodeError, match=r"chroot .* All is as it was"):
        apply(root, OLD, command)
    assert tree_digest(root) == before


def test_in_a_real_chroot(root: Path) -> None:
    """A stand-in of locale-gen, run by a real shell in the changed root."""
    if os.geteuid() != 0:
        pytest.skip("only root may chroot")
    if not _copy_shell(root):
        pytest.skip("there is no shell to copy")
    shutil.rmtree(root / "usr/lib/locale/en_US.utf8")
    tool = root / "usr/sbin/locale-gen"
    tool.parent.mkdir(parents=True)
    tool.write_text(
        "#!/bin/sh\nset -e\nread line </etc/locale.gen\n"
        'echo "made of $line" >/usr/lib/locale/locale-archive\n',
        encoding="utf-8",
    )
    tool.chmod(0o755)
    can_chroot = subprocess.run(
        ["chroot", str(root), "/bin/sh", "-c", "exit 0"], capture_output=True, check=False
    )
    if can_chroot.returncode != 0:
        pytest.skip(f"chroot does not work here: {can_chroot.stderr.decode()}")
    (root / "etc/locale.gen").write_text("# en_US.UTF-8 UTF-8\n", encoding="utf-8")
    before = tree_digest(root)

    def node(*arguments: str) -> str:
        result = CliRunner().invoke(node_group, [*arguments, "--root", str(root)])
        assert result.exit_code == 0, result.output
        return result.output

    assert "run: locale-gen (writes /usr/lib/locale/locale-archive)" in node("plan")
    assert "ran locale-gen" in node("apply", "--yes")
    archive = root / "usr/lib/locale/locale-archive"
    assert archive.read_text(encoding="utf-8") == "made of en_US.UTF-8 UTF-8\n"
    assert node("apply", "--yes") == "nothing to change\n"
    node("verify")
    assert "put back what locale-gen wrote" in node("rollback", "--yes")
    assert tree_digest(root) == before


def _copy_shell(root: Path) -> bool:
    """/bin/sh and the libraries that it is linked with; False if they cannot be found."""
    shell = shutil.which("sh")
    ldd = shutil.which("ldd")
    if shell is None or ldd is None or sys.platform != "linux":
        return False
    listed = subprocess.run([ldd, shell], capture_output=True, encoding="utf-8", check=False)
    words = [word for word in listed.stdout.split() if word.startswith("/")]
    (root / "bin").mkdir()
    shutil.copy(shell, root / "bin/sh")
    for library in words:
        target = root / library.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)
    return bool(words)
