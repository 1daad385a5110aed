"""Parsers of what network tools print, on several versions' output and on none of them."""

from collections.abc import Callable
from ipaddress import ip_interface
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.node.formats.clock_sync import parse_adjtimex, parse_chronyc, parse_timedatectl
from ops.node.formats.dcb import Buffers, parse_buffers, parse_dscp_map, parse_pfc
from ops.node.formats.ethtool import (
    Driver,
    Feature,
    Pause,
    parse_counters,
    parse_driver,
    parse_features,
    parse_pause,
)
from ops.node.formats.ibv_devinfo import DevicePort, parse_devinfo
from ops.node.formats.ip import NetdevAddress, parse_addresses, parse_route_netdev
from ops.node.formats.limits import Limit, parse_limits
from ops.node.formats.lspci import parse_devices
from ops.node.formats.mlnx_qos import parse_mlnx_qos
from ops.node.formats.nvidia_smi import Gpu, parse_gpus, parse_topology
from ops.node.formats.ping import PingAnswer, parse_ping
from ops.node.formats.rdma import RdmaLink, parse_links, parse_netns_mode
from ops.node.path_mtu import parse_path_mtus
from ops.node.path_quality import parse_path_qualities
from tests.ops.node.network_facts import CAPTURED, LIMITS, captured

PARSERS: list[Callable[[str], Any]] = [
    parse_features,
    parse_counters,
    parse_pause,
    parse_driver,
    parse_links,
    parse_netns_mode,
    parse_devinfo,
    parse_addresses,
    parse_route_netdev,
    parse_pfc,
    parse_dscp_map,
    parse_buffers,
    parse_mlnx_qos,
    parse_devices,
    parse_limits,
    parse_gpus,
    parse_topology,
    parse_timedatectl,
    parse_chronyc,
    parse_adjtimex,
    parse_path_mtus,
    parse_path_qualities,
    lambda text: parse_ping(text, text),
]
ALL_CAPTURED = sorted(path.name for path in CAPTURED.glob("*.txt"))


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize("name", ALL_CAPTURED)
def test_output_of_another_tool_is_survived(parse: Callable[[str], Any], name: str) -> None:
    text = captured(name)
    parse(text)
    parse(text[: len(text) // 2])
    parse(text.replace("\n", "\r\n"))


@given(text=st.text(alphabet=st.sampled_from("ab01289.:,/-+()[]{}\"'=\t\n "), max_size=200))
def test_any_text_is_survived(text: str) -> None:
    for parse in PARSERS:
        parse(text)


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize(
    "text", ["", "\n", "[]", "{}", "null", "[null]", '[{"addr_info": 7}]', "x"]
)
def test_nothing_and_the_wrong_json_are_survived(parse: Callable[[str], Any], text: str) -> None:
    parse(text)


class TestEthtool:
    def test_features(self) -> None:
        features = parse_features(captured("ethtool_6.1-features-virtio.txt"))
        assert features["tcp-segmentation-offload"] == Feature(is_on=True, is_fixed=False)
        assert features["large-receive-offload"] == Feature(is_on=False, is_fixed=True)
        assert len(features) == 63

    def test_features_that_were_asked_for_otherwise(self) -> None:
        assert parse_features("rx-vlan-offload: off [requested on]\n") == {
            "rx-vlan-offload": Feature(is_on=False, is_fixed=False)
        }

    def test_counters_of_two_drivers(self) -> None:
        mlx5 = parse_counters(captured("ethtool_5.4-counters-mlx5.txt"))
        assert mlx5["rx_prio3_pause"] == 5210
        assert mlx5["tx_pause_storm_error_events"] == 0
        assert parse_counters(captured("ethtool_6.1-counters-veth.txt"))["rx_queue_0_drops"] == 2

    @pytest.mark.parametrize(
        ("text", "pause"),
        [
            (
                "Pause parameters for eth0:\nAutonegotiate:\toff\nRX:\t\ton\nTX:\t\toff\n",
                Pause(autonegotiates=False, receives=True, sends=False),
            ),
            # ethtool 5.19 and later, with a partner that negotiates.
            (
                "Pause parameters:\nAutonegotiate:\ton\nRX:\toff\nTX:\toff\nRX negotiated: on\n",
                Pause(autonegotiates=True, receives=False, sends=False),
            ),
            (
                "Cannot get device pause settings: Operation not supported\n",
                Pause(None, None, None),
            ),
        ],
    )
    def test_pause(self, text: str, pause: Pause) -> None:
        assert parse_pause(text) == pause

    def test_driver(self) -> None:
        text = (
            "driver: mlx5_core\nversion: 5.15.0-91-generic\n"
            "firmware-version: 22.35.2302 (MT_0000000359)\nexpansion-rom-version: \n"
            "bus-info: 0000:4b:00.0\nsupports-statistics: yes\n"
        )
        assert parse_driver(text) == Driver(
            "mlx5_core", "5.15.0-91-generic", "22.35.2302 (MT_0000000359)", "0000:4b:00.0"
        )


class TestRdma:
    def test_links_of_new_and_old_versions(self) -> None:
        new = parse_links(
            "link mlx5_0/1 state ACTIVE physical_state LINK_UP netdev ens1f0 \n"
            "link mlx5_1/1 state DOWN physical_state DISABLED netdev ens1f1 \n"
        )
        assert new[0] == RdmaLink("mlx5_0", 1, "ACTIVE", "LINK_UP", "ens1f0")
        assert new[1].state == "DOWN"
        old = parse_links("1/1: mlx5_0/1: state ACTIVE physical_state LINK_UP netdev ens1f0 \n")
        assert old == new[:1]
        ofed = parse_links("link mlx5_0/1: state ACTIVE physical_state LINK_UP netdev ens1f0\n")
        assert ofed == new[:1]

    def test_infiniband_has_no_interface(self) -> None:
        text = (
            "link mlx5_2/1 subnet_prefix fe80:0000:0000:0000 lid 13 sm_lid 1 lmc 0 "
            "state ACTIVE physical_state LINK_UP \n"
        )
        assert parse_links(text) == (RdmaLink("mlx5_2", 1, "ACTIVE", "LINK_UP", ""),)

    def test_namespaces(self) -> None:
        assert parse_netns_mode("netns shared copy-on-fork on\n") == "shared"
        assert parse_netns_mode("netns exclusive\n") == "exclusive"
        assert parse_netns_mode("Failed to open NETLINK_RDMA socket\n") == ""


class TestIbvDevinfo:
    def test_verbose_of_ofed(self) -> None:
        first, second = parse_devinfo(captured("ibv_devinfo-ofed_5.9-mlx5.txt"))
        assert first == DevicePort("mlx5_0", 1, "22.35.2302", "PORT_ACTIVE", "Ethernet", 4096, 4096)
        assert (second.device, second.state, second.active_mtu) == ("mlx5_1", "PORT_DOWN", 1024)

    @pytest.mark.parametrize("name", ["rxe", "rxe-short"])
    def test_soft_roce_of_rdma_core(self, name: str) -> None:
        ports = parse_devinfo(captured(f"ibv_devinfo-rdma_core_44-{name}.txt"))
        assert [(port.device, port.active_mtu) for port in ports] == [
            ("rxe0", 4096),
            ("rxe1", 4096),
        ]

    def test_an_invalid_mtu_is_0(self) -> None:
        (port,) = parse_devinfo("hca_id: a\n port: 1\n  active_mtu: invalid MTU (0)\n")
        assert port.active_mtu == 0

    def test_no_devices(self) -> None:
        assert parse_devinfo("No IB devices found\n") == ()


class TestIp:
    def test_json_and_one_line(self) -> None:
        json_text = (
            '[{"ifname":"lo","addr_info":[]},{"ifname":"eth0","mtu":1400,"addr_info":[{"family":'
            '"inet","local":"192.0.2.2","prefixlen":24},{"family":"inet6","local":"fd00::2",'
            '"prefixlen":64}]}]'
        )
        one_line = (
            "2: eth0    inet 192.0.2.2/24 brd 192.0.2.255 scope global eth0\\  valid_lft forever\n"
            "2: eth0    inet6 fd00::2/64 scope global nodad \\  valid_lft forever\n"
        )
        expected = (
            NetdevAddress("eth0", ip_interface("192.0.2.2/24")),
            NetdevAddress("eth0", ip_interface("fd00::2/64")),
        )
        assert parse_addresses(json_text) == expected
        assert parse_addresses(one_line) == expected

    def test_a_vlan_is_named_without_its_parent(self) -> None:
        text = "5: eth0.5@eth0    inet 10.5.0.1/24 scope global eth0.5\n"
        assert parse_addresses(text)[0].netdev == "eth0.5"

    def test_an_address_that_is_none_is_skipped(self) -> None:
        assert parse_addresses("2: tun0    inet 10.0.0.1 peer 10.0.0.2/32 scope global tun0\n") == (
            NetdevAddress("tun0", ip_interface("10.0.0.1/32")),
        )
        assert parse_addresses('[{"ifname":"a","addr_info":[{"local":"x","prefixlen":24}]}]') == ()

    def test_route(self) -> None:
        assert parse_route_netdev("10.1.0.2 dev v0 src 10.1.0.1 uid 0 \n    cache \n") == "v0"
        assert parse_route_netdev('[{"dst":"10.1.0.2","dev":"v0","prefsrc":"10.1.0.1"}]') == "v0"
        assert parse_route_netdev("10.2.0.1 via 10.1.0.9 dev v0 src 10.1.0.1\n") == "v0"
        assert parse_route_netdev("RTNETLINK answers: Network is unreachable\n") == ""


class TestDcb:
    @pytest.mark.parametrize(
        "text",
        [
            "pfc-cap 8 macsec-bypass off delay 4096\nprio-pfc 0:off 1:off 2:off 3:on 4:off\n",
            "pfc-cap 8 prio-pfc 0:off 1:off 2:off 3:on 4:off delay 0\n",
            "prio-pfc 3:on 4:off \n",
        ],
    )
    def test_pfc(self, text: str) -> None:
        assert parse_pfc(text) == {3}

    def test_pfc_off_is_not_unknown(self) -> None:
        assert parse_pfc("prio-pfc 0:off 1:off\n") == frozenset()
        assert parse_pfc("Attribute read: Operation not supported\n") is None

    @pytest.mark.parametrize(
        "text",
        [
            "dscp-prio AF31:3 CS6:6 EF:5 \n",
            "dscp-prio 26:3 48:6 46:5 \n",
            "ethtype-prio 0x8915:3 \ndscp-prio AF31:3 CS6:6 EF:5 odd:x \ndgram-port-prio 4791:3\n",
        ],
    )
    def test_dscp_by_name_and_number(self, text: str) -> None:
        assert parse_dscp_map(text) == {26: 3, 48: 6, 46: 5}

    @pytest.mark.parametrize(
        ("sizes", "nbytes"),
        [("0:10000 3:70000", 70000), ("0:18048b 3:1b", 1), ("0:10Kb 3:1.5Mb", 1572864)],
    )
    def test_buffers(self, sizes: str, nbytes: int) -> None:
        text = f"prio-buffer 0:0 1:0 2:0 3:3\nbuffer-size {sizes}\ntotal-size 221072\n"
        buffers = parse_buffers(text)
        assert buffers.buffer_of_priority == {0: 0, 1: 0, 2: 0, 3: 3}
        assert buffers.nbytes[3] == nbytes

    def test_no_buffers(self) -> None:
        assert parse_buffers("") == Buffers({}, {})


class TestMlnxQos:
    def test_dscp(self) -> None:
        qos = parse_mlnx_qos(captured("mlnx_qos-5.9.txt"))
        assert (qos.trust, qos.dscp_map[26], qos.dscp_map[0]) == ("dscp", 3, 0)
        assert qos.pfc_priorities == {3}
        assert qos.buffer_of_priority[3] == 1
        assert qos.buffer_nbytes[:2] == (20016, 156096)
        assert (qos.cable_length_m, qos.dcbx_mode) == (7, "OS controlled")

    def test_pcp_of_an_old_version(self) -> None:
        qos = parse_mlnx_qos(captured("mlnx_qos-4.2-pcp.txt"))
        assert (qos.trust, qos.pfc_priorities) == ("pcp", frozenset())
        assert (qos.dscp_map, qos.buffer_of_priority, qos.buffer_nbytes) == ({}, {}, ())

    def test_an_error_tells_nothing(self) -> None:
        qos = parse_mlnx_qos("Netdevice not exists\n")
        assert (qos.trust, qos.pfc_priorities) == ("", None)


class TestOthers:
    def test_lspci_of_root_and_of_a_user(self) -> None:
        switch, nic = parse_devices(captured("lspci-3.9.txt"))
        assert (switch.address, switch.redirects_requests) == ("0000:4a:00.0", True)
        assert (nic.address, nic.redirects_requests, nic.orders_relaxed) == (
            "0000:4b:00.0",
            False,
            True,
        )
        (plain,) = parse_devices(captured("lspci-3.5-user.txt"))
        assert (plain.redirects_requests, plain.orders_relaxed) == (None, None)
        assert "ConnectX-6 Dx" in plain.title

    def test_ping(self) -> None:
        text = "2 packets transmitted, 1 received, 50% packet loss, time 201ms\n"
        assert parse_ping(text, "") == PingAnswer(2, 1, None)
        # With errors counted in between, and a router that does not say how much it takes.
        assert parse_ping(
            "From 10.0.0.1 icmp_seq=1 Frag needed and DF set (mtu = 0)\n"
            "2 packets transmitted, 0 received, +2 errors, 100% packet loss, time 202ms\n",
            "ping: local error: message too long, mtu=1400\n",
        ) == PingAnswer(2, 0, 1400)

    def test_limits(self) -> None:
        limits = parse_limits(LIMITS.format(files=1024, locked="unlimited"))
        assert limits["Max locked memory"] == Limit(None, None)
        assert limits["Max open files"] == Limit(1024, 1024)
        assert "Limit" not in limits
        assert parse_limits("Max odd things            some                 more\n") == {}

    def test_gpus(self) -> None:
        line = "0, NVIDIA H100 80GB HBM3, 550.54.15, 00000000:B3:00.0\n"
        assert parse_gpus(line) == (Gpu(0, "NVIDIA H100 80GB HBM3", "550.54.15", "0000:b3:00.0"),)
        assert parse_gpus("No devices were found\n") == ()

    @pytest.mark.parametrize("version", ["450", "550"])
    def test_topology_of_old_and_new_drivers(self, version: str) -> None:
        links = parse_topology(captured(f"nvidia_smi_topo-{version}.txt")).links
        assert links["GPU1", "mlx5_0"] == "SYS"
        assert links["GPU0", "mlx5_0"] == {"450": "PHB", "550": "PIX"}[version]
        assert links["GPU0", "GPU1"].startswith("NV")
