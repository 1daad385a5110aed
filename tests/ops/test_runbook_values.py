"""The runbooks and ``pdctl node`` want the same: what one applied, the other finds right."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from ops.node.change import Change, FileChange, ValueChange
from ops.node.checks import locale, modprobe, rdma, sysctl, system
from ops.node.facts import LiveFacts
from tests.ops.runbook_tree import CENTOS_7, DEBIAN, ROCKY_9, UBUNTU, Tree


def sysctl_tree(tree: Tree) -> None:
    tree.write("/etc/os-release", DEBIAN)
    tree.write("/usr/lib/sysctl.d/50-default.conf", "net.core.somaxconn = 8192\n")
    tree.write("/etc/sysctl.d/99-others.conf", "net.core.wmem_max = 1\n")
    for name, value in (
        ("net/core/rmem_max", "212992"),
        ("net/core/somaxconn", "8192"),
        ("net/ipv4/tcp_rmem", "4096\t131072\t6291456"),
        ("net/ipv4/tcp_slow_start_after_idle", "1"),
        ("net/ipv4/neigh/default/base_reachable_time_ms", "1"),
        ("net/ipv4/neigh/ens1.7/base_reachable_time_ms", "30000"),
        ("vm/max_map_count", "65530"),
    ):
        tree.write(f"/proc/sys/{name}", f"{value}\n")
    (tree.root / "sys/class/net/ens1.7").mkdir(parents=True)
    tree.link("/sys/class/net/ens1.7/device", "../../../0000:81:00.0")


def rdma_tree(tree: Tree) -> None:
    tree.write("/etc/os-release", ROCKY_9)
    port = "/sys/class/infiniband/mlx5_0/ports/1"
    tree.write(f"{port}/state", "4: ACTIVE\n")
    tree.write(f"{port}/link_layer", "Ethernet\n")
    tree.write(f"{port}/gids/0", "fe80:0000:0000:0000:0e42:a1ff:fe00:0001\n")
    tree.write(f"{port}/gid_attrs/types/0", "RoCE v2\n")
    tree.write(f"{port}/gid_attrs/ndevs/0", "ens1\n")
    tree.write(
        "/proc/self/limits",
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max locked memory         65536                65536                bytes     \n",
    )


def debian_locale_tree(tree: Tree) -> None:
    """Locales are folders here: without a tool to ask, both forms look at them."""
    tree.write("/etc/os-release", UBUNTU)
    tree.write("/usr/lib/locale/C.utf8/LC_CTYPE", "")
    tree.write("/etc/default/locale", "LC_ALL=zh_CN.GBK\nLANG=zh_CN.GBK\nLC_TIME=C\n")
    tree.write("/etc/systemd/system.conf", "[Manager]\n")


def centos_locale_tree(tree: Tree) -> None:
    tree.write("/etc/os-release", CENTOS_7)
    tree.write("/usr/lib/locale/locale-archive", "")
    tree.write("/etc/locale.conf", 'LANG="C"\n')
    tree.write("/etc/systemd/system.conf", "[Manager]\n")


def system_tree(tree: Tree) -> None:
    tree.write(
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
        "always within_size advise [never] deny force\n",
    )


CONCERNS: list[tuple[ModuleType, str, Callable[[Tree], None]]] = [
    (sysctl, "sysctl.sh", sysctl_tree),
    (modprobe, "modprobe.sh", rdma_tree),
    (rdma, "rdma.sh", rdma_tree),
    (system, "system.sh", system_tree),
    (locale, "locale.sh", debian_locale_tree),
    (locale, "locale.sh", centos_locale_tree),
]


def text_of(change: Change) -> str:
    """What its file holds afterwards."""
    assert isinstance(change, FileChange | ValueChange)
    return change.text if isinstance(change, FileChange) else f"{change.value}\n"


@pytest.mark.parametrize(("module", "runbook", "fill"), CONCERNS)
def test_a_runbook_writes_what_the_check_of_its_concern_would(
    tmp_path: Path, module: ModuleType, runbook: str, fill: Callable[[Tree], None]
) -> None:
    tree = Tree(tmp_path)
    fill(tree)
    facts = LiveFacts(tree.root, runs_commands=False)
    wanted = module.changes(facts)
    assert wanted, "this tree leaves nothing to change"
    assert all(isinstance(change, FileChange | ValueChange) for change in wanted)
    before = set(tree.snapshot())
    assert tree.run(runbook, "apply", "--yes").returncode == 0
    for change in wanted:
        assert tree.text(change.path) == text_of(change), change.path
    # A plain file cannot answer with a list, "always [advise] never", as the kernel does: then the
    # change is wanted again, and its text is there.
    left = [change for change in module.changes(facts) if tree.text(change.path) != text_of(change)]
    assert left == []
    made = {
        f"/{path}"
        for path in set(tree.snapshot()) - before
        if (tree.root / path).is_file() and not path.startswith("var/lib/pdserve-runbooks")
    }
    assert made <= {change.path for change in wanted}
