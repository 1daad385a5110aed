import pytest

from ops.node.change import FileChange
from ops.node.checks import modprobe
from ops.node.facts import CommandOutput
from ops.node.finding import Verdict
from tests.ops.node import fact_trees as trees
from tests.ops.node.fact_trees import found, said, verdict_of

MODINFO = {"modinfo mlx5_core": said(trees.MODINFO_DEBIAN_12)}
DEVICE = ("mlx5_0",)
LOADED = ("ib_uverbs", "mlx5_core", "rdma_ucm")
LISTED = {modprobe.MODULES_FILE: "ib_uverbs\nrdma_ucm\n"}


def test_a_good_machine() -> None:
    facts = trees.facts(
        {"/etc/os-release": trees.DEBIAN_12},
        LISTED,
        commands=MODINFO,
        folders={"/sys/class/infiniband": DEVICE, "/sys/module": LOADED},
    )
    findings = modprobe.check(facts)
    assert verdict_of(findings, "ib_uverbs") is Verdict.OK
    assert verdict_of(findings, "rdma_ucm") is Verdict.OK
    assert verdict_of(findings, "at boot") is Verdict.OK
    assert not any(finding.verdict in (Verdict.FAIL, Verdict.WARN) for finding in findings)
    assert modprobe.changes(facts) == []


@pytest.mark.parametrize(
    ("release", "install"),
    [
        (trees.UBUNTU_24, "apt-get install rdma-core"),
        (trees.CENTOS_7, "yum install rdma-core"),
        (trees.ROCKY_9, "dnf install rdma-core"),
    ],
)
def test_hardware_without_its_modules(release: str, install: str) -> None:
    facts = trees.facts(
        {"/etc/os-release": release, "/proc/modules": "mlx5_core 1 0 - Live 0x0\n"},
        commands=MODINFO,
    )
    finding = found(modprobe.check(facts), "ib_uverbs")
    assert finding.verdict is Verdict.FAIL
    assert install in finding.cure
    assert verdict_of(modprobe.check(facts), "at boot") is Verdict.WARN
    (change,) = modprobe.changes(facts)
    assert isinstance(change, FileChange)
    assert change.path == modprobe.MODULES_FILE
    assert change.text.endswith("ib_uverbs\nrdma_ucm\n")
    assert "reboot" in change.needs
    assert modprobe.changes(trees.facts({change.path: change.text}, commands=MODINFO)) == []


def test_a_machine_without_rdma_is_unknown_and_left_alone() -> None:
    facts = trees.facts({"/etc/os-release": trees.DEBIAN_12})
    findings = modprobe.check(facts)
    assert {finding.verdict for finding in findings} == {Verdict.UNKNOWN}
    assert modprobe.changes(facts) == []


def test_lists_of_rdma_core_count() -> None:
    facts = trees.facts(
        {"/etc/rdma/modules/rdma.conf": "# a\nib_uverbs\nrdma_ucm\n"},
        folders={"/sys/class/infiniband": DEVICE},
    )
    assert verdict_of(modprobe.check(facts), "at boot") is Verdict.OK


@pytest.mark.parametrize("option", ["log_sz_xrq", "log_sz_sq"])
@pytest.mark.parametrize(
    "output", [trees.MODINFO_DEBIAN_12, trees.MODINFO_OFED, trees.MODINFO_EL_8]
)
def test_options_of_the_notes_are_looked_up(option: str, output: str) -> None:
    facts = trees.facts(commands={"modinfo mlx5_core": said(output)})
    finding = found(modprobe.check(facts), f"mlx5_core {option}")
    assert finding.verdict is Verdict.UNKNOWN
    assert "debug_mask, prof_sel" in finding.measured


def test_a_driver_that_has_the_option_of_the_notes() -> None:
    output = trees.MODINFO_OFED + "parm:           log_sz_sq:size of the send queue (uint)\n"
    findings = modprobe.check(trees.facts(commands={"modinfo mlx5_core": said(output)}))
    assert verdict_of(findings, "mlx5_core log_sz_sq") is Verdict.OK
    assert verdict_of(findings, "mlx5_core log_sz_xrq") is Verdict.UNKNOWN


def test_an_option_that_the_driver_has_not_is_named() -> None:
    facts = trees.facts(
        {"/etc/modprobe.d/mlx5.conf": "options mlx5_core log_sz_sq=12 prof_sel=3\n"},
        {"/sys/module/mlx5_core/parameters/prof_sel": "2\n"},
        commands=MODINFO,
    )
    findings = modprobe.check(facts)
    unknown = found(findings, "mlx5_core log_sz_sq=12")
    assert (unknown.verdict, unknown.wanted) == (Verdict.WARN, "one of: debug_mask, prof_sel")
    other = found(findings, "mlx5_core prof_sel=3")
    assert (other.verdict, other.measured) == (Verdict.WARN, "2")
    assert "initramfs" in other.cure


@pytest.mark.parametrize(("running", "written"), [("2", "2"), ("Y", "1"), ("N", "n")])
def test_an_option_in_force(running: str, written: str) -> None:
    output = trees.MODINFO_OFED
    facts = trees.facts(
        {"/usr/lib/modprobe.d/a.conf": f"options mlx5_core probe_vf={written}\n"},
        {"/sys/module/mlx5_core/parameters/probe_vf": running},
        commands={"modinfo mlx5_core": said(output)},
    )
    assert verdict_of(modprobe.check(facts), f"mlx5_core probe_vf={written}") is Verdict.OK


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (CommandOutput(127, "", ""), "modinfo is not installed"),
        (CommandOutput(1, "", "modinfo: ERROR: Module mlx5_core not found."), "not found"),
    ],
)
def test_without_modinfo_options_are_unknown(output: CommandOutput, words: str) -> None:
    facts = trees.facts(folders={"/sys/module": LOADED}, commands={"modinfo mlx5_core": output})
    finding = found(modprobe.check(facts), "mlx5_core")
    assert finding.verdict is Verdict.UNKNOWN
    assert words in finding.reason


@pytest.mark.parametrize(
    ("release", "output", "verdict"),
    [
        (trees.CENTOS_7, said("enabled\n"), Verdict.OK),
        (trees.CENTOS_7, said("disabled\n", 1), Verdict.WARN),
        (trees.CENTOS_7, CommandOutput(1, "", "Failed to get unit file state"), Verdict.WARN),
        (trees.RHEL_8, said("static\n"), Verdict.OK),
        (trees.RHEL_8, said("disabled\n", 1), Verdict.WARN),
        (trees.ROCKY_9, CommandOutput(1, "", "Failed to get unit file state"), Verdict.OK),
        (trees.ROCKY_9, said("not-found\n", 4), Verdict.OK),
        (trees.ROCKY_9, CommandOutput(127, "", ""), Verdict.UNKNOWN),
    ],
)
def test_the_rdma_service_of_red_hat(release: str, output: CommandOutput, verdict: Verdict) -> None:
    facts = trees.facts(
        {"/etc/os-release": release},
        folders={"/sys/class/infiniband": DEVICE},
        commands={"systemctl is-enabled rdma": output},
    )
    assert verdict_of(modprobe.check(facts), "rdma service") is verdict


def test_debian_has_no_such_service() -> None:
    facts = trees.facts(
        {"/etc/os-release": trees.DEBIAN_12}, folders={"/sys/class/infiniband": DEVICE}
    )
    assert all(finding.subject != "rdma service" for finding in modprobe.check(facts))


@pytest.mark.parametrize(
    ("loaded", "modinfo", "verdict", "cure"),
    [
        (("rdma_rxe",), CommandOutput(127, "", ""), Verdict.WARN, "rdma link add"),
        ((), said("parm: x:y (int)\n"), Verdict.UNKNOWN, "modprobe rdma_rxe; rdma link add"),
        ((), CommandOutput(1, "", "not found"), Verdict.UNKNOWN, ""),
    ],
)
def test_soft_roce_for_a_laptop(
    loaded: tuple[str, ...], modinfo: CommandOutput, verdict: Verdict, cure: str
) -> None:
    facts = trees.facts(folders={"/sys/module": loaded}, commands={"modinfo rdma_rxe": modinfo})
    finding = found(modprobe.check(facts), "soft-RoCE")
    assert finding.verdict is verdict
    assert finding.cure.startswith(cure)
