"""Which port and address are used, from made sysfs trees. No device is needed."""

import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvproto.errors import CarrierUnavailable
from kvproto.rdma.ports import (
    ROCE_V2,
    Gid,
    Port,
    choose_gid,
    choose_port,
    own_numa_node,
    read_ports,
)

ROCE_V1 = "IB/RoCE v1"
NONE = "0000:0000:0000:0000:0000:0000:0000:0000"
# As the kernel prints them.
LOCAL = "fe80:0000:0000:0000:5054:00ff:fe12:3456"
V4 = "0000:0000:0000:0000:0000:ffff:0a00:0007"
GLOBAL = "2001:0db8:0000:0000:0000:0000:0000:0007"


class Sysfs:
    """A made /sys/class/infiniband."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()

    def write(self, path: str, text: str | bytes) -> None:
        """One file, with a newline as the kernel has it."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else f"{text}\n".encode())

    def port(
        self,
        device: str = "mlx5_0",
        number: int = 1,
        *,
        state: str = "4: ACTIVE",
        link_layer: str = "Ethernet",
        numa_node: str = "0",
        gids: Mapping[int, tuple[str, str]] | None = None,
    ) -> None:
        """One port; ``gids`` by index: (address, kind)."""
        self.write(f"{device}/device/numa_node", numa_node)
        folder = f"{device}/ports/{number}"
        self.write(f"{folder}/state", state)
        self.write(f"{folder}/link_layer", link_layer)
        for index, (address, kind) in (gids if gids is not None else {0: (V4, ROCE_V2)}).items():
            self.write(f"{folder}/gids/{index}", address)
            if address != NONE:
                self.write(f"{folder}/gid_attrs/types/{index}", kind)
                self.write(f"{folder}/gid_attrs/ndevs/{index}", "eth0")

    def read(self) -> tuple[Port, ...]:
        return read_ports(self.root)


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path / "infiniband")


def address(text: str) -> ipaddress.IPv6Address:
    return ipaddress.IPv6Address(text)


def test_a_port_is_read_as_the_kernel_shows_it(sysfs: Sysfs) -> None:
    sysfs.port(
        "mlx5_1",
        2,
        numa_node="1",
        gids={0: (LOCAL, ROCE_V1), 1: (LOCAL, ROCE_V2), 10: (V4, ROCE_V2), 9: (NONE, "")},
    )
    [port] = sysfs.read()
    assert port == Port(
        device="mlx5_1",
        number=2,
        state="ACTIVE",
        link_layer="Ethernet",
        numa_node=1,
        gids=(
            Gid(0, address("fe80::5054:ff:fe12:3456"), ROCE_V1, "eth0"),
            Gid(1, address("fe80::5054:ff:fe12:3456"), ROCE_V2, "eth0"),
            Gid(10, address("::ffff:10.0.0.7"), ROCE_V2, "eth0"),
        ),
    )
    assert port.name == "mlx5_1:2"
    assert port.is_active


def test_ports_come_by_device_and_by_number(sysfs: Sysfs) -> None:
    for device, number in (("rxe1", 1), ("mlx5_0", 10), ("mlx5_0", 2)):
        sysfs.port(device, number)
    assert [port.name for port in sysfs.read()] == ["mlx5_0:2", "mlx5_0:10", "rxe1:1"]


def test_a_host_without_rdma_has_no_ports(sysfs: Sysfs, tmp_path: Path) -> None:
    assert sysfs.read() == ()
    assert read_ports(tmp_path / "there is no such folder") == ()


def test_what_is_missing_or_cannot_be_read_is_unknown(sysfs: Sysfs) -> None:
    (sysfs.root / "rxe0" / "ports" / "1").mkdir(parents=True)
    sysfs.write("rxe1/ports/1/link_layer", b"\xff\xfe")
    sysfs.write("rxe1/ports/1/state", "half a line")
    sysfs.write("rxe1/ports/1/gids/0", V4)  # without its attributes
    sysfs.write("rxe1/device/numa_node", "none")
    (sysfs.root / "rxe2").mkdir()
    bare, odd = sysfs.read()
    assert bare == Port("rxe0", 1, "", "", -1, ())
    assert odd == Port("rxe1", 1, "", "", -1, (Gid(0, address("::ffff:10.0.0.7"), "", ""),))
    assert not odd.roce_v2_gids


@pytest.mark.parametrize(("text", "numa_node"), [("-1", -1), ("0", 0), ("3", 3), ("", -1)])
def test_the_numa_node(sysfs: Sysfs, text: str, numa_node: int) -> None:
    sysfs.port(numa_node=text)
    assert sysfs.read()[0].numa_node == numa_node


def test_addresses_are_ordered_ipv4_then_global_then_link_local(sysfs: Sysfs) -> None:
    sysfs.port(
        gids={
            0: (LOCAL, ROCE_V1),
            1: (LOCAL, ROCE_V2),
            2: (GLOBAL, ROCE_V2),
            4: (V4, ROCE_V2),
            3: (V4.replace("0007", "0008"), ROCE_V2),
        }
    )
    [port] = sysfs.read()
    assert [gid.index for gid in port.roce_v2_gids] == [3, 4, 2, 1]
    assert [gid.rank for gid in port.roce_v2_gids] == [0, 0, 1, 2]
    assert choose_port([port]).gid.index == 3


# -- the choice ------------------------------------------------------------------------------------


def refusal(ports: tuple[Port, ...], **how: object) -> str:
    with pytest.raises(CarrierUnavailable) as excinfo:
        choose_port(ports, **how)  # type: ignore[arg-type]
    return str(excinfo.value)


def test_no_device_at_all(sysfs: Sysfs) -> None:
    assert refusal(sysfs.read()) == (
        "this host has no RDMA device (/sys/class/infiniband is empty): load the driver, or for a "
        "try without hardware: rdma link add rxe0 type rxe netdev eth0; pdctl node check (check "
        "rdma) looks into it"
    )


def test_not_the_device_that_was_asked_for(sysfs: Sysfs) -> None:
    sysfs.port("mlx5_0", 1)
    sysfs.port("mlx5_0", 2)
    expected = "there is no RDMA port mlx5_1; this host has mlx5_0:1, mlx5_0:2"
    assert refusal(sysfs.read(), device="mlx5_1") == expected
    assert "no RDMA port mlx5_0:3" in refusal(sysfs.read(), device="mlx5_0:3")


def test_no_port_with_ethernet(sysfs: Sysfs) -> None:
    sysfs.port("ib0", link_layer="InfiniBand")
    (sysfs.root / "odd" / "ports" / "1").mkdir(parents=True)
    assert refusal(sysfs.read()) == (
        "RoCE needs a port with link layer Ethernet; there is ib0:1 (InfiniBand), odd:1 (unknown)"
    )


def test_no_port_with_an_active_link(sysfs: Sysfs) -> None:
    sysfs.port("mlx5_0", state="1: DOWN")
    sysfs.write("mlx5_1/ports/1/link_layer", "Ethernet")
    assert refusal(sysfs.read()) == (
        "no RDMA port is active (mlx5_0:1 is DOWN, mlx5_1:1 is unknown): bring its network "
        "interface up; pdctl node check (check rdma) looks into it"
    )


def test_no_port_with_a_roce_v2_address(sysfs: Sysfs) -> None:
    sysfs.port("mlx5_0", gids={0: (LOCAL, ROCE_V1)})
    sysfs.port("mlx5_1", gids={0: (NONE, "")})
    assert refusal(sysfs.read()) == (
        "mlx5_0:1, mlx5_1:1 has no RoCE v2 address: give its network interface an IP address; "
        "pdctl node check (check rdma) looks into it"
    )


def test_an_index_without_an_address(sysfs: Sysfs) -> None:
    sysfs.port("mlx5_0", gids={1: (LOCAL, ROCE_V2), 3: (NONE, "")})
    sysfs.port("mlx5_1", gids={})
    sentence = refusal(sysfs.read(), gid_index=3)
    assert sentence == (
        "GID index 3 has no address (mlx5_0:1 has 1: fe80::5054:ff:fe12:3456 (RoCE v2); mlx5_1:1 "
        "has none): leave rdma_gid_index at -1, or give the network interface an IP address; pdctl "
        "node check (check rdma) looks into it"
    )


def test_refusals_come_in_their_order(sysfs: Sysfs) -> None:
    """Each is said of what the one before has left over."""
    sysfs.port("a", link_layer="InfiniBand")
    sysfs.port("b", state="1: DOWN")
    sysfs.port("c", gids={0: (LOCAL, ROCE_V1)})
    ports = sysfs.read()
    assert "link layer" in refusal(ports, device="a", gid_index=9)
    assert "(b:1 is DOWN)" in refusal(ports, device="b", gid_index=9)
    assert "c:1 has no RoCE v2 address" in refusal(ports, device="c")
    assert re.match(r"GID index 9 .*\(c:1 has 0: ", refusal(ports, gid_index=9))
    assert refusal(ports).startswith("c:1 has no RoCE v2 address")


@pytest.mark.parametrize(
    ("how", "chosen"),
    [
        # By name.
        ({}, "a:1"),
        # On the node of the memory; -1 is no node, and a node that no port is on changes nothing.
        ({"numa_node": 1}, "b:1"),
        ({"numa_node": -1}, "a:1"),
        ({"numa_node": 7}, "a:1"),
        # The address this host listens on goes before the node.
        ({"near": address("::ffff:10.0.0.3"), "numa_node": 1}, "c:1"),
        ({"near": address("::ffff:10.9.9.9"), "numa_node": 1}, "b:1"),
        # What a person wants goes before both.
        ({"device": "d", "near": address("::ffff:10.0.0.3"), "numa_node": 1}, "d:1"),
        ({"device": "d:1"}, "d:1"),
    ],
)
def test_the_choice_of_a_port(sysfs: Sysfs, how: dict, chosen: str) -> None:
    for position, (device, numa_node) in enumerate(
        (("a", "0"), ("b", "1"), ("c", "0"), ("d", "0")), 1
    ):
        sysfs.port(device, numa_node=numa_node, gids={0: (f"::ffff:10.0.0.{position}", ROCE_V2)})
    sysfs.port("_down", state="1: DOWN", numa_node="1")
    sysfs.port("_v1", numa_node="1", gids={0: (V4, ROCE_V1)})
    assert choose_port(sysfs.read(), **how).port.name == chosen


def test_the_address_that_this_host_listens_on_is_taken(sysfs: Sysfs) -> None:
    sysfs.port(gids={0: (V4, ROCE_V1), 1: (V4, ROCE_V2), 2: (GLOBAL, ROCE_V2)})
    ports = sysfs.read()
    assert choose_port(ports, near=address(GLOBAL)).gid.index == 2
    assert choose_port(ports, near=address(V4)).gid.index == 1
    assert choose_port(ports, near=address("2001:db8::8")).gid.index == 1


def test_an_index_is_taken_as_it_is(sysfs: Sysfs) -> None:
    """Also one that RoCE v2 does not use: ``device.check_is_roce`` says that."""
    sysfs.port("a", gids={0: (V4, ROCE_V2)})
    sysfs.port("b", gids={0: (V4, ROCE_V2), 5: (LOCAL, ROCE_V1)})
    chosen = choose_port(sysfs.read(), gid_index=5)
    assert (chosen.port.name, chosen.gid.index, chosen.gid.kind) == ("b:1", 5, ROCE_V1)
    assert choose_port(sysfs.read(), gid_index=0).port.name == "a:1"
    assert choose_port(sysfs.read(), device="b", gid_index=0).port.name == "b:1"


@pytest.mark.parametrize(
    ("toward", "index"),
    [
        ("::ffff:10.0.0.99", 1),  # the same subnet
        ("::ffff:10.1.0.1", 2),
        ("2001:db8::1", 3),
        ("fe80::1", 4),
        # Nothing in common: the same kind of address at least.
        ("::ffff:192.0.2.1", 1),
    ],
)
def test_the_address_toward_a_peer_is_that_of_its_subnet(
    sysfs: Sysfs, toward: str, index: int
) -> None:
    sysfs.port(
        gids={
            0: ("::ffff:10.0.0.98", ROCE_V1),
            1: ("::ffff:10.0.0.7", ROCE_V2),
            2: ("::ffff:10.1.0.7", ROCE_V2),
            3: (GLOBAL, ROCE_V2),
            4: (LOCAL, ROCE_V2),
        }
    )
    assert choose_gid(sysfs.read()[0], address(toward)).index == index


def test_shared_bits() -> None:
    gid = Gid(0, address("::ffff:10.0.0.7"), ROCE_V2, "")
    assert gid.shared_bits(address("::ffff:10.0.0.7")) == 128
    assert gid.shared_bits(address("::ffff:10.0.0.6")) == 127
    assert gid.shared_bits(address("8000::")) == 0


@pytest.mark.parametrize(
    ("cpulists", "usable", "expected"),
    [
        ({0: "0-3", 1: "4-7"}, {1, 2}, 0),
        ({0: "0-3", 1: "4,6-7"}, {4, 7}, 1),
        ({0: "0-3", 1: "4-7"}, {3, 4}, -1),
        ({}, {0}, -1),
        ({0: "nonsense"}, {0}, -1),
    ],
)
def test_the_numa_node_is_that_of_the_cpus_in_use(
    cpulists: dict[int, str],
    usable: set[int],
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number, cpulist in cpulists.items():
        folder = tmp_path / f"node{number}"
        folder.mkdir()
        (folder / "cpulist").write_text(f"{cpulist}\n", encoding="ascii")
    (tmp_path / "possible").write_text("0-1\n", encoding="ascii")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: usable)
    assert own_numa_node(tmp_path) == expected


def test_odd_entries_of_sysfs_are_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "mlx5_0" / "ports"
    (folder / "1" / "gids").mkdir(parents=True)
    (folder / "power").mkdir()
    (folder / "1" / "gids" / "0").write_text("garbage\n", encoding="ascii")
    (folder / "1" / "gids" / "uevent").write_text("\n", encoding="ascii")
    [port] = read_ports(tmp_path)
    assert (port.number, port.gids) == (1, ())
