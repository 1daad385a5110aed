"""apply, verify and rollback in a throw-away root: nothing is left, whenever it was killed."""

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.ops.runbook_tree import CENTOS_7, DEBIAN, ROCKY_9, RUNBOOKS, UBUNTU, Tree

SYSCTL_FILE = "/etc/sysctl.d/90-pdserve.conf"
LIMITS_FILE = "/etc/security/limits.d/90-pdserve-memlock.conf"
# Stands in for mv or rm: ends the runbook, as `kill -9` would, at the nth call, before or after it.
KILLER = """
count=$(cat "$COUNT_FILE" 2>/dev/null || echo 0)
count=$((count + 1))
echo "$count" >"$COUNT_FILE"
if [ "$count" = "$KILL_AT" ] && [ "$KILL_WHEN" = before ]; then kill -9 "$PPID"; exit 1; fi
REAL "$@"
code=$?
if [ "$count" = "$KILL_AT" ] && [ "$KILL_WHEN" = after ]; then kill -9 "$PPID"; fi
exit $code
"""


def sysctl_tree(path: Path) -> Tree:
    tree = Tree(path)
    tree.write("/etc/os-release", DEBIAN)
    tree.write("/proc/sys/net/core/rmem_max", "212992\n")
    tree.write("/proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t6291456\n")
    tree.write("/proc/sys/vm/max_map_count", "1048576\n")
    tree.write(SYSCTL_FILE, "# an older one\nnet.core.rmem_max = 1\n", mode=0o640)
    return tree


def locale_tree(path: Path) -> Tree:
    tree = Tree(path)
    tree.write("/etc/os-release", UBUNTU)
    tree.write("/etc/locale.gen", "# en_GB.UTF-8 UTF-8\n# en_US.UTF-8 UTF-8\n")
    tree.write("/etc/default/locale", "LANG=zh_CN.GBK\nLC_TIME=C\n")
    tree.write("/etc/systemd/system.conf", "[Manager]\n")
    tree.write("/usr/lib/locale/locale-archive", "old archive")
    tree.tool(
        "locale",
        f"echo C.utf8; grep -q new {tree.root}/usr/lib/locale/locale-archive && "
        "echo en_US.utf8; exit 0",
    )
    tree.tool(
        "chroot",
        'root=$1; shift; [ "$1" = locale-gen ] || exit 9\n'
        'printf new >"$root/usr/lib/locale/locale-archive"',
    )
    return tree


def modprobe_tree(path: Path) -> Tree:
    tree = Tree(path)
    tree.write("/sys/class/infiniband/mlx5_0/fw_ver", "22.35.1012\n")
    return tree


def rdma_tree(path: Path) -> Tree:
    tree = modprobe_tree(path)
    tree.write("/proc/self/limits", "Max locked memory    65536    65536    bytes\n")
    return tree


def flow_control_tree(path: Path) -> Tree:
    tree = modprobe_tree(path)
    tree.write("/sys/class/infiniband/mlx5_0/device/net/ens1/mtu", "9000\n")
    tree.write("/sys/class/net/ens1/ecn/roce_np/enable/3", "0\n")
    tree.write("/sys/class/net/ens1/ecn/roce_rp/enable/3", "1\n")
    return tree


def system_tree(path: Path) -> Tree:
    tree = Tree(path)
    tree.write(
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
        "always within_size advise [never] deny force\n",
    )
    return tree


def packages_tree(path: Path) -> Tree:
    """A package manager that keeps its list in the root."""
    tree = Tree(path)
    tree.write("/etc/os-release", DEBIAN)
    tree.write("/var/lib/dpkg/list", "ethtool\nkmod\n")
    tree.tool(
        "dpkg-query",
        f"for name; do :; done\n[ -e {tree.root}/var/lib/dpkg/list ] &&"
        f' grep -qx "$name" {tree.root}/var/lib/dpkg/list && '
        "echo install ok installed",
    )
    tree.tool("chroot", 'shift; exec "$@"')
    tree.tool(
        "apt-get",
        f"""list={tree.root}/var/lib/dpkg/list
verb=$1; shift
for name; do
    case $name in -*) continue ;; esac
    if [ $verb = install ]; then echo "$name" >>$list
    else grep -vx "$name" $list >$list.new; mv $list.new $list; fi
done""",
    )
    return tree


TREES = {
    "sysctl.sh": sysctl_tree,
    "locale.sh": locale_tree,
    "modprobe.sh": modprobe_tree,
    "rdma.sh": rdma_tree,
    "flow-control.sh": flow_control_tree,
    "system.sh": system_tree,
    "packages.sh": packages_tree,
}


@pytest.mark.parametrize("name", TREES)
def test_apply_verify_rollback_leaves_the_tree_byte_for_byte(tmp_path: Path, name: str) -> None:
    tree = TREES[name](tmp_path)
    before = tree.snapshot()
    assert tree.run(name, "verify").returncode == 1
    applied = tree.run(name, "apply", "--yes")
    assert (applied.returncode, applied.stderr) == (0, ""), applied
    after = tree.snapshot()
    assert after != before
    verified = tree.run(name, "verify")
    assert verified.returncode == 0, verified.stdout
    assert "FAIL" not in verified.stdout
    rolled_back = tree.run(name, "rollback", "--yes")
    assert (rolled_back.returncode, rolled_back.stderr) == (0, "")
    assert tree.snapshot() == before


@pytest.mark.parametrize("name", TREES)
def test_applying_twice_changes_nothing(tmp_path: Path, name: str) -> None:
    tree = TREES[name](tmp_path)
    before = tree.snapshot()
    tree.run(name, "apply", "--yes")
    after = tree.snapshot()
    again = tree.run(name, "apply", "--yes")
    assert (again.returncode, again.stderr) == (0, "")
    assert "nothing to change" in again.stdout
    assert tree.snapshot() == after
    assert "nothing to change" in tree.run(name, "plan").stdout
    tree.run(name, "rollback", "--yes")
    assert tree.snapshot() == before


def _killed_at(tree: Tree, name: str, verb: str, call: int, when: str) -> bool:
    """Run ``verb`` and end it at the nth mv or rm; False if it ended by itself before that."""
    count = tree.path / "count"
    count.unlink(missing_ok=True)
    for tool in ("mv", "rm"):
        real = os.path.realpath(tree.bin / tool)
        tree.tool(tool, KILLER.replace("REAL", real))
    tree.variables |= {"COUNT_FILE": str(count), "KILL_AT": str(call), "KILL_WHEN": when}
    ended = tree.run(name, verb, "--yes")
    for tool in ("mv", "rm"):
        (tree.bin / tool).unlink()
        (tree.bin / tool).symlink_to(f"/bin/{tool}")
    assert ended.returncode in (0, -9), ended
    return ended.returncode == -9


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["sysctl.sh", "locale.sh", "system.sh"])
def test_rollback_after_an_apply_that_was_killed_at_any_step(
    tmp_path: Path, name: str, when: str
) -> None:
    tree = TREES[name](tmp_path)
    before = tree.snapshot()
    call = 0
    while True:
        call += 1
        was_killed = _killed_at(tree, name, "apply", call, when)
        ended = tree.run(name, "rollback", "--yes")
        assert (ended.returncode, ended.stderr) == (0, ""), f"call {call}"
        assert tree.snapshot() == before, f"killed {when} call {call}"
        if not was_killed:
            break
    assert call > 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_rollback_that_was_killed_can_be_run_again(tmp_path: Path, when: str) -> None:
    tree = sysctl_tree(tmp_path)
    before = tree.snapshot()
    tree.run("sysctl.sh", "apply", "--yes")
    applied = tree.path / "applied"
    shutil.copytree(tree.root, applied, symlinks=True)
    call = 0
    while True:
        call += 1
        was_killed = _killed_at(tree, "sysctl.sh", "rollback", call, when)
        ended = tree.run("sysctl.sh", "rollback", "--yes")
        assert (ended.returncode, ended.stderr) == (0, ""), f"call {call}"
        assert tree.snapshot() == before, f"killed {when} call {call}"
        if not was_killed:
            break
        shutil.rmtree(tree.root)
        shutil.copytree(applied, tree.root, symlinks=True)
    assert call > 2


def test_an_apply_that_was_killed_can_go_on(tmp_path: Path) -> None:
    tree = locale_tree(tmp_path)
    before = tree.snapshot()
    assert _killed_at(tree, "locale.sh", "apply", 4, "after")
    assert tree.run("locale.sh", "apply", "--yes").returncode == 0
    assert tree.run("locale.sh", "verify").returncode == 0
    tree.run("locale.sh", "rollback", "--yes")
    assert tree.snapshot() == before


def test_what_apply_writes(tmp_path: Path) -> None:
    tree = locale_tree(tmp_path)
    tree.run("locale.sh", "apply", "--yes")
    assert tree.text("/etc/locale.gen") == "# en_GB.UTF-8 UTF-8\nen_US.UTF-8 UTF-8\n"
    assert tree.text("/etc/default/locale") == "LANG=en_US.UTF-8\nLC_TIME=C\n"
    drop_in = tree.text("/etc/systemd/system.conf.d/90-pdserve.conf")
    assert drop_in.endswith("[Manager]\nDefaultEnvironment=PYTHONUTF8=1\n")


def test_a_larger_value_is_left_alone_and_its_file_keeps_its_mode(tmp_path: Path) -> None:
    tree = sysctl_tree(tmp_path)
    tree.run("sysctl.sh", "apply", "--yes")
    assert tree.text("/proc/sys/net/core/rmem_max") == "268435456\n"
    assert tree.text("/proc/sys/net/ipv4/tcp_rmem") == "4096 131072 268435456\n"
    assert tree.text("/proc/sys/vm/max_map_count") == "1048576\n"
    assert (tree.root / SYSCTL_FILE[1:]).stat().st_mode & 0o777 == 0o640


def test_a_setting_that_another_file_has_right_is_not_written_again(tmp_path: Path) -> None:
    tree = sysctl_tree(tmp_path)
    tree.write("/etc/sysctl.d/50-ours.conf", "net/core/wmem_max=536870912\n")
    tree.run("sysctl.sh", "apply", "--yes")
    assert "wmem_max" not in tree.text(SYSCTL_FILE)
    assert "net.core.rmem_max = 268435456\n" in tree.text(SYSCTL_FILE)


@pytest.mark.parametrize("answer", ["", "n\n", "no\n", "Y es\n"])
def test_apply_asks_and_takes_only_a_yes(tmp_path: Path, answer: str) -> None:
    tree = sysctl_tree(tmp_path)
    before = tree.snapshot()
    ended = tree.run("sysctl.sh", "apply", answer=answer)
    assert ended.returncode == 1
    assert "Nothing was changed" in ended.stderr
    assert tree.snapshot() == before


def test_apply_and_rollback_with_a_yes(tmp_path: Path) -> None:
    tree = sysctl_tree(tmp_path)
    before = tree.snapshot()
    assert tree.run("sysctl.sh", "apply", answer="y\n").returncode == 0
    refused = tree.run("sysctl.sh", "rollback", answer="n\n")
    assert refused.returncode == 1
    assert tree.run("sysctl.sh", "rollback", answer="yes\n").returncode == 0
    assert tree.snapshot() == before


def test_the_plan_is_a_diff_of_the_file_and_of_the_values(tmp_path: Path) -> None:
    plan = sysctl_tree(tmp_path).run("sysctl.sh", "plan").stdout
    assert "--- /etc/sysctl.d/90-pdserve.conf\n" in plan
    assert "-net.core.rmem_max = 1\n" in plan
    assert "+net.core.rmem_max = 268435456\n" in plan
    assert "/proc/sys/net/core/rmem_max: 212992 -> 268435456\n" in plan


def test_rollback_does_not_overwrite_what_a_person_edited_since(tmp_path: Path) -> None:
    tree = sysctl_tree(tmp_path)
    before = tree.snapshot()
    tree.run("sysctl.sh", "apply", "--yes")
    tree.write(SYSCTL_FILE, "# edited\n", mode=0o640)
    refused = tree.run("sysctl.sh", "rollback", "--yes")
    assert refused.returncode == 1
    assert f"somebody has edited {SYSCTL_FILE}" in refused.stderr
    assert tree.text(SYSCTL_FILE) == "# edited\n"
    assert tree.run("sysctl.sh", "rollback", "--yes", "--force").returncode == 0
    assert tree.snapshot() == before


def test_a_link_is_followed_inside_the_root_and_stays_a_link(tmp_path: Path) -> None:
    tree = sysctl_tree(tmp_path)
    (tree.root / SYSCTL_FILE[1:]).unlink()
    tree.write("/srv/sysctl/pdserve", "# kept elsewhere\n")
    tree.link(SYSCTL_FILE, "/srv/sysctl/pdserve")
    before = tree.snapshot()
    assert tree.run("sysctl.sh", "apply", "--yes").returncode == 0
    assert (tree.root / SYSCTL_FILE[1:]).is_symlink()
    assert "268435456" in tree.text("/srv/sysctl/pdserve")
    tree.run("sysctl.sh", "rollback", "--yes")
    assert tree.snapshot() == before


def test_two_runs_at_once(tmp_path: Path) -> None:
    tree = sysctl_tree(tmp_path)
    tree.run("sysctl.sh", "apply", "--yes")
    (tree.root / SYSCTL_FILE[1:]).unlink()
    lock = tree.root / "var/lib/pdserve-runbooks/sysctl/lock"
    with lock.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ended = tree.run("sysctl.sh", "apply", "--yes")
    assert ended.returncode == 1
    assert "another run works on sysctl" in ended.stderr


def test_without_root_nothing_is_changed(tmp_path: Path) -> None:
    """On this machine, not in a tree: the question of who runs it comes before everything else."""
    tree = sysctl_tree(tmp_path)
    tree.tool("id", "echo 1000")
    ended = tree.run("sysctl.sh", "apply", "--yes", root=Path("/"))
    assert ended.returncode == 1
    assert "needs root; run it with sudo. Nothing was changed" in ended.stderr


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    tree = modprobe_tree(tmp_path)
    # A plain file in the place of a folder, because permissions do not count for root.
    tree.write("/etc/modules-load.d", "a file\n")
    before = tree.snapshot()
    ended = tree.run("modprobe.sh", "apply", "--yes")
    assert ended.returncode == 1
    assert "take it back with" in ended.stderr
    assert tree.run("modprobe.sh", "rollback", "--yes").returncode == 0
    assert tree.snapshot() == before


def test_a_read_only_etc_is_one_clear_line(tmp_path: Path) -> None:
    """A real read-only mount, in a mount namespace of its own."""
    unshare = shutil.which("unshare")
    tree = modprobe_tree(tmp_path)
    inner = (
        f"mount --bind {tree.root}/etc {tree.root}/etc && "
        f"mount -o remount,bind,ro {tree.root}/etc && "
        f"exec {tree.bin}/bash {RUNBOOKS}/modprobe.sh apply --yes"
    )
    if unshare is None:
        pytest.skip("unshare is not installed")
    probe = subprocess.run([unshare, "-rm", "true"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip("mount namespaces are not allowed here")
    before = tree.snapshot()
    ended = subprocess.run(
        [unshare, "-rm", "sh", "-c", inner],
        capture_output=True,
        encoding="utf-8",
        timeout=30,
        env={"PATH": os.environ["PATH"], "ROOT": str(tree.root)},
        check=False,
    )
    assert ended.returncode == 1
    assert "Read-only file system" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert tree.run("modprobe.sh", "rollback", "--yes").returncode == 0
    assert tree.snapshot() == before


@pytest.mark.parametrize("verb", ["plan", "apply", "verify"])
@pytest.mark.parametrize("name", ["packages.sh", "locale.sh"])
def test_an_unknown_distribution_is_named(tmp_path: Path, name: str, verb: str) -> None:
    tree = Tree(tmp_path)
    tree.write("/etc/os-release", "ID=solaris\n")
    before = tree.snapshot()
    ended = tree.run(name, verb, "--yes")
    assert ended.returncode == 1
    assert "solaris" in ended.stderr
    assert tree.snapshot() == before


@pytest.mark.parametrize(
    ("os_release", "wanted"), [(CENTOS_7, "en_US.utf8"), (ROCKY_9, "C.utf8")], ids=["7", "9"]
)
def test_safe_yum_gives_yum_a_locale_that_exists(
    tmp_path: Path, os_release: str, wanted: str
) -> None:
    """A yum that dies of non-ASCII texts unless its locale is UTF-8, as Python 2's does."""
    tree = Tree(tmp_path)
    tree.write("/etc/os-release", os_release)
    tree.printing("locale", f"C\nPOSIX\n{wanted}")
    tree.tool("chroot", 'shift; exec "$@"')
    tree.tool(
        "yum",
        'case $LC_ALL in *utf8) echo "$LANG $*" ;; *) echo UnicodeDecodeError; exit 1 ;; esac',
    )
    ended = tree.run("packages.sh", "yum", "install", "-y", "a b")
    assert (ended.returncode, ended.stdout) == (0, f"{wanted} install -y a b\n")


def test_safe_yum_without_a_utf8_locale_says_how_to_make_one(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.printing("locale", "C\nPOSIX")
    tree.tool("chroot", 'shift; exec "$@"')
    tree.tool("yum", "echo must not run")
    ended = tree.run("packages.sh", "yum", "makecache")
    assert ended.returncode == 1
    assert "localedef" in ended.stderr
    assert "must not run" not in ended.stdout
