"""The flow-control check: settings on made machines, counters as a function of two samples."""

import pytest

from ops.node.checks.flow_control import CounterSample, check, judge_counters, read_qos
from ops.node.facts import RecordedFacts, RecordingFacts
from ops.node.finding import Finding, Verdict
from ops.node.rdma_ports import RdmaPort, read_rdma_ports
from tests.ops.node.network_facts import (
    HW_COUNTERS,
    LINK,
    NETDEV,
    Machine,
    captured,
    counters,
    edge_box,
    found,
    hw_counters,
    printed,
    roce_node,
    soft_roce_node,
    verdicts,
)

TOS_PATH = "/sys/kernel/config/rdma_cm/mlx5_0/ports/1/default_roce_tos"
ENABLED = "enabled     0   0   0   1   0   0   0   0"


@pytest.fixture
def node() -> Machine:
    return roce_node()


def edit(machine: Machine, old: str, new: str) -> None:
    """In what mlnx_qos prints."""
    text = machine.commands["mlnx_qos -i ens1f0"].stdout
    assert old in text
    machine.commands["mlnx_qos -i ens1f0"] = printed(text.replace(old, new))


def with_dcb(machine: Machine, *, pfc: str, app: str = "", buffer: str = "") -> None:
    """A machine with the kernel's driver: iproute2 and no mlnx_qos."""
    del machine.commands["mlnx_qos -i ens1f0"]
    machine.remove(f"{NETDEV}/ecn")
    for name, text in (("pfc", pfc), ("app", app), ("buffer", buffer)):
        machine.commands[f"dcb {name} show dev ens1f0"] = printed(text)


def test_a_good_node_is_good_in_everything(node: Machine) -> None:
    findings = check(node.facts)
    assert verdicts(findings) == {Verdict.OK}
    assert found(findings, "ens1f0 RoCE priority").measured == (
        "trusts dscp, type of service 106 (DSCP 26) on priority 3"
    )
    assert found(findings, "ens1f0 PFC").measured == "on for 3"
    assert (
        found(findings, "ens1f0 receive buffer").measured
        == "priority 3 in buffer 1 of 156096 bytes"
    )


@pytest.mark.parametrize("facts", [edge_box().facts, RecordedFacts()])
def test_without_roce_there_is_nothing_to_keep_lossless(facts: RecordedFacts) -> None:
    (finding,) = check(facts)
    assert finding.verdict is Verdict.UNKNOWN


def test_soft_roce_has_no_flow_control_and_does_not_fail() -> None:
    findings = check(soft_roce_node().facts)
    assert found(findings, "rxe0/1").verdict is Verdict.OK
    assert Verdict.FAIL not in verdicts(findings)


def test_without_tools_everything_is_unknown_and_nothing_fails(node: Machine) -> None:
    node.commands.clear()
    node.remove(f"{NETDEV}/ecn")
    assert verdicts(check(node.facts)) == {Verdict.UNKNOWN}


class TestPriority:
    def test_trust_in_vlan_tags_fails(self, node: Machine) -> None:
        node.commands["mlnx_qos -i ens1f0"] = printed(captured("mlnx_qos-4.2-pcp.txt"))
        findings = check(node.facts)
        finding = found(findings, "ens1f0 RoCE priority")
        assert (finding.verdict, finding.measured) == (Verdict.FAIL, "trusts pcp")
        assert "mlnx_qos -i ens1f0 --trust dscp" in finding.cure

    def test_type_of_service_0_shares_the_priority_of_everything(self, node: Machine) -> None:
        node.files[TOS_PATH] = "0\n"
        finding = found(check(node.facts), "ens1f0 RoCE priority")
        assert finding.verdict is Verdict.FAIL
        assert "cma_roce_tos -d mlx5_0 -t 106" in finding.cure

    def test_packets_that_cannot_take_marks_are_warned_of(self, node: Machine) -> None:
        node.files[TOS_PATH] = "104\n"
        finding = found(check(node.facts), "ens1f0 RoCE priority")
        assert (finding.verdict, "cannot take ECN marks" in finding.reason) == (Verdict.WARN, True)

    def test_an_override_of_the_driver_wins(self, node: Machine) -> None:
        node.files[f"{LINK}/tc/1/traffic_class"] = "Global tclass=186\n"
        findings = check(node.facts)
        assert "(DSCP 46) on priority 5" in found(findings, "ens1f0 RoCE priority").measured
        pfc = found(findings, "ens1f0 PFC")
        assert (pfc.verdict, pfc.wanted) == (Verdict.FAIL, "on for priority 5 and no other")

    def test_the_tool_is_asked_where_configfs_is_not_mounted(self, node: Machine) -> None:
        del node.files[TOS_PATH]
        node.commands["cma_roce_tos -d mlx5_0 -p 1"] = printed("106\n")
        assert found(check(node.facts), "ens1f0 RoCE priority").verdict is Verdict.OK

    def test_an_unknown_type_of_service_leaves_the_priority_with_pfc(self, node: Machine) -> None:
        del node.files[TOS_PATH]
        findings = check(node.facts)
        assert found(findings, "ens1f0 RoCE priority").verdict is Verdict.UNKNOWN
        assert found(findings, "ens1f0 PFC").verdict is Verdict.OK


class TestPfc:
    def test_off_fails_and_the_command_is_told(self, node: Machine) -> None:
        edit(node, ENABLED, ENABLED.replace("1", "0"))
        finding = found(check(node.facts), "ens1f0 PFC")
        assert (finding.verdict, finding.measured) == (Verdict.FAIL, "off")
        assert "mlnx_qos -i ens1f0 --pfc 0,0,0,1,0,0,0,0" in finding.cure
        assert "dcb pfc set dev ens1f0 prio-pfc all:off 3:on" in finding.cure

    def test_on_for_another_priority_fails(self, node: Machine) -> None:
        edit(node, ENABLED, "enabled     0   0   0   0   1   0   0   0")
        finding = found(check(node.facts), "ens1f0 PFC")
        assert (finding.verdict, finding.measured) == (Verdict.FAIL, "on for 4")
        assert "RoCE is on priority 3" in finding.reason

    def test_on_for_more_than_roce_is_warned_of(self, node: Machine) -> None:
        edit(node, ENABLED, "enabled     1   0   0   1   0   0   0   0")
        finding = found(check(node.facts), "ens1f0 PFC")
        assert (finding.verdict, finding.measured) == (Verdict.WARN, "on for 0, 3")

    def test_a_global_pause_is_warned_of(self, node: Machine) -> None:
        node.commands["ethtool -a ens1f0"] = printed(
            "Pause parameters for ens1f0:\nAutonegotiate:\toff\nRX:\t\ton\nTX:\t\ton\n"
        )
        finding = found(check(node.facts), "ens1f0 global pause")
        assert (finding.verdict, finding.cure[:29]) == (
            Verdict.WARN,
            "ethtool -A ens1f0 rx off tx o",
        )


class TestKernelDriver:
    """dcb of iproute2 instead of mlnx_qos."""

    PFC = (
        "pfc-cap 8 macsec-bypass off delay 0\n"
        "prio-pfc 0:off 1:off 2:off 3:on 4:off 5:off 6:off 7:off\n"
    )

    def test_names_and_numbers_of_dscp_are_read(self, node: Machine) -> None:
        with_dcb(
            node,
            pfc=self.PFC,
            app="dscp-prio AF31:3 CS6:6 \n",
            buffer="prio-buffer 0:0 1:0 2:0 3:1 4:0 5:0 6:0 7:0 \n"
            "buffer-size 0:19Kb 1:156096b 2:0b 3:0b 4:0b 5:0b 6:0b 7:0b \ntotal-size 262016b \n",
        )
        findings = check(node.facts)
        assert found(findings, "ens1f0 RoCE priority").verdict is Verdict.OK
        assert found(findings, "ens1f0 PFC").verdict is Verdict.OK
        assert found(findings, "ens1f0 receive buffer").measured == (
            "priority 3 in buffer 1 of 156096 bytes"
        )
        # The kernel's driver shows ECN nowhere.
        assert found(findings, "ens1f0 ECN").verdict is Verdict.UNKNOWN

    def test_a_map_without_roce_sends_it_by_its_upper_bits(self, node: Machine) -> None:
        with_dcb(node, pfc=self.PFC, app="dscp-prio 48:6 \n")
        (port,) = read_rdma_ports(node.facts)
        assert read_qos(node.facts, port).priority == 3

    def test_no_map_means_that_trust_is_unknown(self, node: Machine) -> None:
        with_dcb(node, pfc=self.PFC)
        findings = check(node.facts)
        assert found(findings, "ens1f0 RoCE priority").verdict is Verdict.UNKNOWN
        assert found(findings, "ens1f0 PFC").verdict is Verdict.OK

    def test_a_driver_without_dcb_is_unknown(self, node: Machine) -> None:
        del node.commands["mlnx_qos -i ens1f0"]
        for name in ("pfc", "app", "buffer"):
            node.commands[f"dcb {name} show dev ens1f0"] = printed(
                stderr="Attribute read: Operation not supported\n"
            )
        assert found(check(node.facts), "ens1f0 PFC").verdict is Verdict.UNKNOWN


class TestBuffer:
    def test_a_shared_buffer_is_warned_of(self, node: Machine) -> None:
        edit(node, "buffer      0   0   0   1", "buffer      0   0   0   0")
        finding = found(check(node.facts), "ens1f0 receive buffer")
        assert (finding.verdict, finding.measured) == (
            Verdict.WARN,
            "priority 3 in buffer 0 of 20016 bytes",
        )

    def test_a_buffer_without_room_fails(self, node: Machine) -> None:
        edit(node, "20016,156096", "262016,0")
        assert found(check(node.facts), "ens1f0 receive buffer").verdict is Verdict.FAIL

    def test_old_tools_do_not_show_it(self, node: Machine) -> None:
        edit(node, "buffer      0   0   0   1   0   0   0   0", "")
        assert "ens1f0 receive buffer" not in {f.subject for f in check(node.facts)}


class TestEcn:
    @pytest.mark.parametrize("side", ["roce_np", "roce_rp"])
    def test_off_for_roces_priority_fails_because_dcqcn_needs_it(
        self, node: Machine, side: str
    ) -> None:
        node.files[f"{NETDEV}/ecn/{side}/enable/3"] = "0\n"
        node.files[f"{NETDEV}/ecn/{side}/enable/0"] = "1\n"
        finding = found(check(node.facts), "ens1f0 ECN")
        assert (finding.verdict, finding.measured) == (Verdict.FAIL, f"off for priority 3: {side}")
        assert "DCQCN" in finding.reason
        assert f"echo 1 > {NETDEV}/ecn/{side}/enable/3" in finding.cure

    def test_on_is_right(self, node: Machine) -> None:
        assert found(check(node.facts), "ens1f0 ECN").verdict is Verdict.OK

    def test_a_driver_that_does_not_show_it_is_unknown(self, node: Machine) -> None:
        node.remove(f"{NETDEV}/ecn")
        finding = found(check(node.facts), "ens1f0 ECN")
        assert (finding.verdict, "mlxconfig" in finding.cure) == (Verdict.UNKNOWN, True)


PORT = RdmaPort("mlx5_0", 1, "ens1f0", "ACTIVE", "LinkUp", "Ethernet", "100 Gb/sec", False, ())


def judged(
    before: dict[str, int], after: dict[str, int], *, device: bool = False, priority: int = 3
) -> list[Finding]:
    if device:
        return judge_counters(PORT, priority, CounterSample({}, before), CounterSample({}, after))
    return judge_counters(PORT, priority, CounterSample(before, {}), CounterSample(after, {}))


class TestCounters:
    @pytest.mark.parametrize(
        "name",
        ["rx_discards_phy", "rx_prio3_buf_discard", "rx_prio3_discards", "rx_prio3_cong_discard"],
    )
    @pytest.mark.parametrize(
        ("before", "after", "verdict"),
        [(0, 0, Verdict.OK), (7, 7, Verdict.WARN), (7, 9, Verdict.FAIL)],
    )
    def test_discards(self, name: str, before: int, after: int, verdict: Verdict) -> None:
        finding = found(judged({name: before}, {name: after}), "ens1f0 discards")
        assert finding.verdict is verdict

    def test_growth_is_told_and_history_is_not_mixed_in(self) -> None:
        finding = found(
            judged(
                {"rx_discards_phy": 7, "rx_prio3_buf_discard": 5},
                {"rx_discards_phy": 9, "rx_prio3_buf_discard": 5},
            ),
            "ens1f0 discards",
        )
        assert finding.measured == "growing: rx_discards_phy 2"

    def test_a_reset_in_between_counts_from_zero(self) -> None:
        finding = found(judged({"rx_discards_phy": 70}, {"rx_discards_phy": 3}), "ens1f0 discards")
        assert finding.measured == "growing: rx_discards_phy 3"

    @pytest.mark.parametrize(
        "name", ["out_of_sequence", "packet_seq_err", "rnr_nak_retry_err", "retry_exceeded_err"]
    )
    @pytest.mark.parametrize(
        ("before", "after", "verdict"),
        [(0, 0, Verdict.OK), (4, 4, Verdict.WARN), (4, 5, Verdict.FAIL)],
    )
    def test_retransmissions(self, name: str, before: int, after: int, verdict: Verdict) -> None:
        findings = judged({name: before}, {name: after}, device=True)
        assert found(findings, "mlx5_0/1 retransmissions").verdict is verdict

    @pytest.mark.parametrize("name", ["warning", "error"])
    @pytest.mark.parametrize(
        ("before", "after", "verdict"),
        [(0, 0, Verdict.OK), (1, 1, Verdict.WARN), (0, 1, Verdict.FAIL)],
    )
    def test_storms(self, name: str, before: int, after: int, verdict: Verdict) -> None:
        counter = f"tx_pause_storm_{name}_events"
        finding = found(judged({counter: before}, {counter: after}), "ens1f0 pause storm")
        assert finding.verdict is verdict

    def test_a_pause_for_much_of_the_time_fails(self) -> None:
        finding = found(
            judged(
                {"rx_prio3_pause": 10, "rx_prio3_pause_duration": 0},
                {"rx_prio3_pause": 900, "rx_prio3_pause_duration": 300_000},
            ),
            "ens1f0 pauses",
        )
        assert (finding.verdict, finding.measured) == (
            Verdict.FAIL,
            "rx_prio3_pause 890; paused 60% of the time",
        )

    def test_some_pauses_are_warned_of(self) -> None:
        finding = found(judged({"tx_prio3_pause": 1}, {"tx_prio3_pause": 4}), "ens1f0 pauses")
        assert finding.verdict is Verdict.WARN

    def test_pauses_of_another_priority_show_that_the_ends_disagree(self) -> None:
        finding = found(
            judged(
                {"rx_prio0_pause": 5, "rx_prio3_pause": 1},
                {"rx_prio0_pause": 5, "rx_prio3_pause": 1},
            ),
            "ens1f0 pauses",
        )
        assert (finding.verdict, "ever: rx_prio0_pause" in finding.measured) == (Verdict.WARN, True)

    def test_ignored_notifications_fail(self) -> None:
        findings = judged({"rp_cnp_ignored": 0}, {"rp_cnp_ignored": 9}, device=True)
        finding = found(findings, "mlx5_0/1 congestion notifications")
        assert (finding.verdict, "rp is off" in finding.reason) == (Verdict.FAIL, True)

    def test_marks_without_an_answer_fail(self) -> None:
        findings = judged(
            {"np_ecn_marked_roce_packets": 10, "np_cnp_sent": 3},
            {"np_ecn_marked_roce_packets": 90, "np_cnp_sent": 3},
            device=True,
        )
        finding = found(findings, "mlx5_0/1 congestion notifications")
        assert (finding.verdict, "np is off" in finding.reason) == (Verdict.FAIL, True)

    def test_marks_that_are_answered_are_right(self) -> None:
        findings = judged(
            {"np_ecn_marked_roce_packets": 10, "np_cnp_sent": 3},
            {"np_ecn_marked_roce_packets": 90, "np_cnp_sent": 9},
            device=True,
        )
        assert found(findings, "mlx5_0/1 congestion notifications").verdict is Verdict.OK

    def test_no_counters_are_unknown(self) -> None:
        (finding,) = judged({}, {})
        assert finding.verdict is Verdict.UNKNOWN


class TestSampling:
    def test_two_samples_are_taken_and_both_are_in_the_dump(self, node: Machine) -> None:
        counters(
            node,
            captured("ethtool_5.4-counters-mlx5.txt").replace(
                "rx_prio3_buf_discard: 0", "rx_prio3_buf_discard: 12"
            ),
            2,
        )
        hw_counters(node, {**HW_COUNTERS, "out_of_sequence": 5}, 2)
        recording = RecordingFacts(node.facts)
        findings = check(recording)
        assert found(findings, "ens1f0 discards").measured == "growing: rx_prio3_buf_discard 12"
        assert found(findings, "mlx5_0/1 retransmissions").measured == "growing: out_of_sequence 5"
        dump = recording.as_json()
        assert '"ethtool -S ens1f0"' in dump
        assert '"ethtool --statistics ens1f0"' in dump

    def test_without_counters_nobody_waits(self, node: Machine) -> None:
        node.commands = {
            line: output
            for line, output in node.commands.items()
            if not line.startswith(("grep", "ethtool"))
        }

        class Watched(RecordedFacts):
            asked: list[str] = []  # noqa: RUF012

            def run(self, *command: str):  # type: ignore[no-untyped-def]
                self.asked.append(command[0])
                return super().run(*command)

        check(Watched(files=node.files, commands=node.commands, folders=node.folders))
        assert "grep" in Watched.asked
        assert "sleep" not in Watched.asked
