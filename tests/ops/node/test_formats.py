import pytest

from ops.node.formats.locale import (
    is_utf8,
    normalised,
    parse_locale_names,
    parse_variables,
    with_variable,
    without_variable,
)
from ops.node.formats.modinfo import (
    ModuleOption,
    parse_modinfo,
    parse_module_names,
    parse_options,
)
from ops.node.formats.os_release import Distribution, parse_os_release, read_distribution
from ops.node.formats.sysctl import Setting, dotted, parse_settings, value_path
from tests.ops.node import fact_trees as trees


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (trees.UBUNTU_22, Distribution("ubuntu", "22.04", "debian")),
        (trees.UBUNTU_24, Distribution("ubuntu", "24.04", "debian")),
        (trees.DEBIAN_12, Distribution("debian", "12", "debian")),
        (trees.CENTOS_7, Distribution("centos", "7", "rhel")),
        (trees.RHEL_8, Distribution("rhel", "8.9", "rhel")),
        (trees.ROCKY_9, Distribution("rocky", "9.3", "rhel")),
        (trees.ALPINE, Distribution("alpine", "3.19.1", "")),
        # One that is like Debian, in single quotes; and a line that is none.
        ("ID='mint'\nID_LIKE='ubuntu debian'\nnonsense", Distribution("mint", "", "debian")),
        ("", Distribution("", "", "")),
    ],
)
def test_os_release(text: str, expected: Distribution) -> None:
    assert parse_os_release(text) == expected


def test_distribution_is_read_from_either_place() -> None:
    assert read_distribution(trees.facts({"/usr/lib/os-release": trees.ROCKY_9})).major == 9
    assert read_distribution(trees.facts()).label == "an unknown distribution"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (trees.DEBIAN_12, "apt-get install a"),
        (trees.CENTOS_7, "yum install b"),
        (trees.ROCKY_9, "dnf install b"),
        (trees.ALPINE, "install a (Debian's name) or b (Red Hat's)"),
    ],
)
def test_install_line(text: str, expected: str) -> None:
    assert parse_os_release(text).install_line("a", "b") == expected


def test_sysctl_output_of_two_versions() -> None:
    debian = {setting.key: setting.value for setting in parse_settings(trees.SYSCTL_DEBIAN_12)}
    assert debian["net.ipv4.tcp_rmem"] == "4096 131072 33554432"
    assert len(debian) == 8
    centos = {setting.key: setting.value for setting in parse_settings(trees.SYSCTL_CENTOS_7)}
    assert centos["kernel.domainname"] == "(none)"
    assert centos["net.ipv4.conf.eth0/100.rp_filter"] == "1"
    assert len(centos) == 8


def test_sysctl_file() -> None:
    text = "# a\n; b\n\nnet/core/rmem_max=1\n -vm.x = 2 \nno assignment\nnet.ipv4.conf.*.y = 3\n"
    assert parse_settings(text) == (
        Setting("net.core.rmem_max", "1", 4),
        Setting("vm.x", "2", 5),
        Setting("net.ipv4.conf.*.y", "3", 7),
    )


def test_a_dot_in_the_name_of_an_interface() -> None:
    assert dotted("net/ipv4/neigh/eth0.5/mtu") == "net.ipv4.neigh.eth0/5.mtu"
    assert value_path("net.ipv4.neigh.eth0/5.mtu") == "/proc/sys/net/ipv4/neigh/eth0.5/mtu"
    assert dotted("plain") == "plain"


@pytest.mark.parametrize(
    ("text", "parameters"),
    [
        (trees.MODINFO_DEBIAN_12, ("debug_mask", "prof_sel")),
        (trees.MODINFO_OFED, ("num_of_groups", "debug_mask", "prof_sel", "probe_vf")),
        (trees.MODINFO_EL_8, ("debug_mask", "prof_sel")),
        ("parm:           dyndbg\nparm: array of (array of int)\n", ("dyndbg",)),
        ("modinfo: ERROR: Module mlx5_core not found.\n", ()),
    ],
)
def test_modinfo(text: str, parameters: tuple[str, ...]) -> None:
    assert parse_modinfo(text).parameters == parameters


def test_modinfo_says_where_the_driver_is_from() -> None:
    info = parse_modinfo(trees.MODINFO_OFED)
    assert (info.name, info.version) == ("mlx5_core", "24.01-0.3.3")
    assert parse_modinfo(trees.MODINFO_DEBIAN_12).version == ""


def test_options_of_modprobe_d() -> None:
    text = (
        "# options mlx5_core x=1\noptions mlx5-core prof_sel=3 \\\n  probe_vf # why\n"
        "blacklist mlx5_core\noptions short\n"
    )
    assert parse_options(text) == (
        ModuleOption("mlx5_core", "prof_sel", "3"),
        ModuleOption("mlx5_core", "probe_vf", "1"),
    )


def test_modules_to_load() -> None:
    assert parse_module_names(["# a\nib-uverbs\n", "; b\n\nrdma_ucm\n"]) == {
        "ib_uverbs",
        "rdma_ucm",
    }


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (trees.LOCALE_A_DEBIAN_12, "C.utf8"),
        ("C\nC.UTF-8\nPOSIX\n", "C.utf8"),
        (trees.LOCALE_A_CENTOS_7, "en_US.utf8"),
        (trees.LOCALE_A_CENTOS_7, "zh_CN.gbk"),
        ("ca_ES.utf8@valencia\n", "ca_ES.utf8@valencia"),
    ],
)
def test_locale_names(text: str, name: str) -> None:
    assert name in parse_locale_names(text)


@pytest.mark.parametrize("name", ["en_US.UTF-8", "en_US.utf8", "en_US.UTF8", "ca_ES.UTF-8@euro"])
def test_is_utf8(name: str) -> None:
    assert is_utf8(name)


@pytest.mark.parametrize("name", ["", "C", "POSIX", "en_US", "zh_CN.GBK", "de_DE@euro"])
def test_is_not_utf8(name: str) -> None:
    assert not is_utf8(name)


def test_normalised_keeps_what_is_no_charset() -> None:
    assert normalised("de_DE.ISO-8859-15@euro") == "de_DE.iso885915@euro"


def test_variables_of_locale_and_of_its_files() -> None:
    output = 'LANG=en_US.UTF-8\nLC_CTYPE="en_US.UTF-8"\nLC_ALL=\nlocale: Cannot set LC_CTYPE\n'
    assert parse_variables(output) == {
        "LANG": "en_US.UTF-8",
        "LC_CTYPE": "en_US.UTF-8",
        "LC_ALL": "",
    }
    assert parse_variables("export LANG='C.UTF-8'\n# LANG=x\n") == {"LANG": "C.UTF-8"}


def test_a_variable_is_set_in_its_place_and_once() -> None:
    text = "# LANG=old\nLANG=a\nLC_TIME=x\nLANG=b\n"
    assert with_variable(text, "LANG", "C.UTF-8") == "# LANG=old\nLANG=C.UTF-8\nLC_TIME=x\n"
    assert with_variable("X=1", "LANG", "C.UTF-8") == "X=1\nLANG=C.UTF-8\n"
    assert without_variable("# LC_ALL=C\nLC_ALL=C\nLANG=a\n", "LC_ALL") == "# LC_ALL=C\nLANG=a\n"
