"""The MTU check on made machines, and its judgement of measured paths."""

import json
from dataclasses import asdict

import pytest

from ops.node.checks.mtu import best_rdma_mtu, check, compare, judge_paths, measure_paths
from ops.node.facts import RecordedFacts
from ops.node.finding import Verdict
from ops.node.path_mtu import PathMtu
from tests.ops.node.network_facts import (
    LINK,
    NETDEV,
    PORT,
    PYTHON,
    Machine,
    captured,
    edge_box,
    found,
    printed,
    roce_node,
    verdicts,
)

PEER = "192.168.1.12"


@pytest.fixture
def node() -> Machine:
    return roce_node()


def ping(payload_nbytes: int, peer: str = PEER) -> str:
    return f"ping -n -M do -c 2 -i 0.2 -W 1 -s {payload_nbytes} {peer}"


def answered(num_received: int, *, said: str = "") -> str:
    loss = 100 - 50 * num_received
    return (
        f"PING x (x) 8972(9000) bytes of data.\n{said}\n--- x ping statistics ---\n"
        f"2 packets transmitted, {num_received} received, {loss}% packet loss, time 201ms\n"
    )


def probed(machine: Machine, *paths: PathMtu) -> None:
    line = " ".join((PYTHON, "-m", "ops.node.path_mtu", *(path.peer for path in paths)))
    machine.commands[line] = printed(json.dumps([asdict(path) for path in paths]))


@pytest.mark.parametrize(
    ("netdev_mtu", "rdma_mtu"),
    [(9000, 4096), (4200, 4096), (4192, 4096), (4191, 2048), (1500, 1024), (1119, 512), (300, 0)],
)
def test_rdma_mtu_that_fits(netdev_mtu: int, rdma_mtu: int) -> None:
    assert best_rdma_mtu(netdev_mtu) == rdma_mtu


class TestInterfaces:
    def test_a_jumbo_frame_is_right(self, node: Machine) -> None:
        findings = check(node.facts)
        assert verdicts(findings) == {Verdict.OK}
        assert found(findings, "ens1f0").measured == "9000"
        assert found(findings, "mlx5_0/1 active MTU").measured == "4096 on ens1f0 with MTU 9000"

    def test_1500_is_small_for_roce_and_right_for_tcp(self, node: Machine) -> None:
        node.files[f"{NETDEV}/mtu"] = "1500\n"
        findings = check(node.facts)
        assert found(findings, "ens1f0").verdict is Verdict.WARN
        assert found(findings, "eth0").verdict is Verdict.OK

    def test_an_edge_box_does_not_fail(self) -> None:
        findings = check(edge_box().facts)
        assert [(finding.subject, finding.verdict) for finding in findings] == [
            ("eth0", Verdict.OK)
        ]

    def test_too_small_for_ipv6_is_warned_of(self) -> None:
        box = edge_box()
        box.files["/sys/class/net/eth0/mtu"] = "576\n"
        assert found(check(box.facts), "eth0").verdict is Verdict.WARN

    def test_an_interface_that_is_down_does_not_count(self) -> None:
        box = edge_box()
        box.files["/sys/class/net/eth0/operstate"] = "down\n"
        assert found(check(box.facts), "interfaces").verdict is Verdict.UNKNOWN

    def test_nothing_readable_is_unknown(self) -> None:
        assert verdicts(check(RecordedFacts())) == {Verdict.UNKNOWN}


class TestActiveMtu:
    def test_larger_than_the_interface_fails(self, node: Machine) -> None:
        node.files[f"{NETDEV}/mtu"] = "1500\n"
        finding = found(check(node.facts), "mlx5_0/1 active MTU")
        assert finding.verdict is Verdict.FAIL
        assert finding.measured == "4096 on ens1f0 with MTU 1500"
        assert finding.wanted == "4096 on an Ethernet MTU of 4200 or 9000"

    def test_smaller_than_it_could_be_is_warned_of(self, node: Machine) -> None:
        small = captured("ibv_devinfo-ofed_5.9-mlx5.txt").replace(
            "active_mtu:\t\t4096 (5)", "active_mtu:\t\t1024 (3)"
        )
        node.commands["ibv_devinfo -v"] = printed(small)
        finding = found(check(node.facts), "mlx5_0/1 active MTU")
        assert (finding.verdict, "takes larger packets" in finding.reason) == (Verdict.WARN, True)

    def test_the_most_that_fits_into_1500_is_warned_of(self, node: Machine) -> None:
        node.files[f"{NETDEV}/mtu"] = "1500\n"
        small = captured("ibv_devinfo-ofed_5.9-mlx5.txt").replace("4096 (5)", "1024 (3)")
        node.commands["ibv_devinfo -v"] = printed(
            small.replace("max_mtu:\t\t1024", "max_mtu: 4096")
        )
        finding = found(check(node.facts), "mlx5_0/1 active MTU")
        assert (finding.verdict, "most that fits" in finding.reason) == (Verdict.WARN, True)

    def test_without_ibv_devinfo_it_is_unknown_and_the_wanted_one_is_told(
        self, node: Machine
    ) -> None:
        del node.commands["ibv_devinfo -v"]
        finding = found(check(node.facts), "mlx5_0/1 active MTU")
        assert (finding.verdict, finding.wanted) == (
            Verdict.UNKNOWN,
            "4096 on ens1f0 with MTU 9000",
        )
        assert "not installed" in finding.reason

    def test_a_tool_that_says_nothing_of_the_port_is_unknown(self, node: Machine) -> None:
        node.commands["ibv_devinfo -v"] = printed("No IB devices found\n", exit_code=255)
        assert found(check(node.facts), "mlx5_0/1 active MTU").verdict is Verdict.UNKNOWN

    def test_infiniband_is_not_judged(self, node: Machine) -> None:
        node.files[f"{PORT}/link_layer"] = "InfiniBand\n"
        subjects = {finding.subject for finding in check(node.facts)}
        assert "mlx5_0/1 active MTU" not in subjects


class TestMeasuring:
    @pytest.fixture
    def node(self) -> Machine:
        node = roce_node()
        node.commands[f"ip route get {PEER}"] = printed(
            f"{PEER} dev ens1f0 src 192.168.1.11 uid 0 \n    cache \n"
        )
        return node

    def test_an_answer_to_the_full_size_ends_the_search(self, node: Machine) -> None:
        node.commands[ping(8972)] = printed(answered(2))
        assert measure_paths(node.facts, [PEER]) == [
            PathMtu(PEER, PEER, "ping", local_mtu=9000, path_mtu=9000)
        ]

    @pytest.mark.parametrize(
        ("stdout", "stderr"),
        [
            ("From 192.168.1.1 icmp_seq=1 Frag needed and DF set (mtu = 1500)", ""),
            ("", "ping: local error: message too long, mtu=1500\n"),
            # iputils s20160308 of CentOS 7.
            ("ping: local error: Message too long, mtu=1500", ""),
        ],
    )
    def test_a_told_limit_is_followed(self, node: Machine, stdout: str, stderr: str) -> None:
        node.commands[ping(8972)] = printed(answered(0, said=stdout), exit_code=1, stderr=stderr)
        node.commands[ping(1472)] = printed(answered(2))
        assert measure_paths(node.facts, [PEER]) == [
            PathMtu(PEER, PEER, "ping", local_mtu=9000, path_mtu=1500, told_mtu=1500)
        ]

    def test_silence_is_looked_into_by_the_own_probe(self, node: Machine) -> None:
        node.commands[ping(8972)] = printed(answered(0), exit_code=1)
        path = PathMtu(PEER, PEER, "ICMP echo", local_mtu=9000, path_mtu=1500)
        probed(node, path)
        assert measure_paths(node.facts, [PEER]) == [path]

    @pytest.mark.parametrize(
        "output",
        [
            printed(exit_code=127),
            # busybox
            printed(exit_code=1, stderr="ping: unrecognized option: M\n"),
            printed(exit_code=2, stderr="ping: socket: Operation not permitted\n"),
        ],
    )
    def test_a_ping_that_cannot_do_it_is_replaced(self, node: Machine, output: object) -> None:
        node.commands[ping(8972)] = output  # type: ignore[assignment]
        path = PathMtu(PEER, PEER, "ICMP echo", local_mtu=9000, path_mtu=9000)
        probed(node, path)
        assert measure_paths(node.facts, [PEER]) == [path]

    def test_a_peer_without_any_probe_says_so(self) -> None:
        (path,) = measure_paths(RecordedFacts(), [PEER])
        assert (path.path_mtu, "could be run" in path.error) == (0, True)

    def test_each_peer_is_asked_once(self, node: Machine) -> None:
        node.commands[ping(8972)] = printed(answered(1))
        assert len(measure_paths(node.facts, [PEER, PEER])) == 1

    def test_a_name_that_looks_like_an_option_is_not_given_to_ping(self, node: Machine) -> None:
        (path,) = measure_paths(node.facts, ["-f"])
        assert path.path_mtu == 0


class TestPaths:
    def test_full_size_is_right(self) -> None:
        findings = judge_paths([PathMtu(PEER, PEER, "ping", 9000, 9000)])
        assert verdicts(findings) == {Verdict.OK}

    def test_a_smaller_hop_that_tells_is_named(self) -> None:
        (finding,) = judge_paths([PathMtu(PEER, PEER, "ping", 9000, 1500, told_mtu=1500)])
        assert (finding.verdict, finding.measured) == (Verdict.FAIL, "1500 (ping)")
        assert "A router on the way has a smaller MTU" in finding.reason

    def test_a_black_hole_is_named(self) -> None:
        (finding,) = judge_paths([PathMtu(PEER, PEER, "ICMP echo", 9000, 1500)])
        assert finding.verdict is Verdict.FAIL
        assert "vanish without a message" in finding.reason
        assert finding.wanted == "9000, as the own interface has"

    def test_no_answer_fails_with_the_reason(self) -> None:
        (finding,) = judge_paths([PathMtu("nowhere", error="Name or service not known")])
        assert (finding.verdict, finding.measured) == (Verdict.FAIL, "Name or service not known")

    def test_peers_that_differ_are_listed(self) -> None:
        paths = [
            PathMtu("a", "10.0.0.1", "ping", 9000, 9000),
            PathMtu("b", "10.0.0.2", "ping", 9000, 4200),
            PathMtu("here", "127.0.0.1", "ICMP echo", 65535, 65535),
        ]
        finding = found(judge_paths(paths), "paths to 2 peers")
        assert (finding.verdict, finding.measured) == (Verdict.FAIL, "a 9000, b 4200")

    def test_peers_that_agree_are_right(self) -> None:
        paths = [PathMtu(name, name, "ping", 9000, 9000) for name in "abc"]
        assert found(judge_paths(paths), "paths to 3 peers").verdict is Verdict.OK

    def test_the_check_has_them_with_peers_only(self, node: Machine) -> None:
        probed(node, PathMtu(PEER, PEER, "ICMP echo", 9000, 9000))
        assert found(check(node.facts, [PEER]), f"path to {PEER}").verdict is Verdict.OK
        assert all("path" not in finding.subject for finding in check(node.facts))


class TestDumpsOfSeveralNodes:
    def test_one_mtu_everywhere_is_right(self, node: Machine) -> None:
        (finding,) = compare({"p0": node.facts, "d0": roce_node().facts})
        assert (finding.verdict, finding.measured) == (Verdict.OK, "9000")

    def test_a_node_that_differs_is_named(self, node: Machine) -> None:
        node.files[f"{NETDEV}/mtu"] = "4200\n"
        (finding,) = compare({"p0": node.facts, "d0": roce_node().facts})
        assert finding.verdict is Verdict.FAIL
        assert finding.measured == "d0 ens1f0 9000, p0 ens1f0 4200"

    def test_less_than_two_roce_nodes_have_nothing_to_agree_on(self, node: Machine) -> None:
        assert compare({"p0": node.facts, "edge": edge_box().facts}) == []
        node.remove(LINK)
        assert compare({"p0": node.facts, "edge": edge_box().facts}) == []
