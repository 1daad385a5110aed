"""The probes themselves: the search on a made network, and real ones on the loopback."""

import json
import socket
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.node import path_mtu, path_quality
from ops.node.path_mtu import PathMtu, parse_path_mtus, probe_path_mtu, search_path_mtu
from ops.node.path_quality import probe_path_quality
from ops.node.probe_socket import Answer, ProbeSocket, interface_mtu

HEADERS_NBYTES = 28


class FakeProbe:
    """A network that carries ``path_mtu``; time passes by waiting alone."""

    address, method, headers_nbytes = "10.0.0.2", "fake", HEADERS_NBYTES

    def __init__(
        self,
        path_mtu: int,
        *,
        local_mtu: int = 9000,
        hops: tuple[int, ...] = (),
        lost: tuple[int, ...] = (),
        late_s: float = 0.0,
    ) -> None:
        self.local_mtu = local_mtu
        self.now = 0.0
        self.num_sent = 0
        self._path_mtu, self._hops, self._lost, self._late_s = path_mtu, hops, lost, late_s
        self._answer: Answer | None = None

    def clock(self) -> float:
        return self.now

    def send(self, packet_nbytes: int, sequence: int) -> Answer | None:
        self.num_sent += 1
        self._answer = None
        if packet_nbytes > self.local_mtu:
            return Answer(told_mtu=0)
        for hop in self._hops:
            if packet_nbytes > hop:
                self._answer = Answer(told_mtu=hop)
                return None
        if packet_nbytes <= self._path_mtu and self.num_sent not in self._lost:
            self._answer = Answer(sequence=sequence)
        return None

    def receive(self, timeout_s: float) -> Answer | None:
        answer, self._answer = self._answer, None
        self.now += timeout_s if answer is None else self._late_s
        return answer


def searched(probe: FakeProbe) -> PathMtu:
    return search_path_mtu("peer", probe, probe.clock)


def test_full_size_takes_two_packets() -> None:
    probe = FakeProbe(9000)
    assert searched(probe) == PathMtu("peer", "10.0.0.2", "fake", 9000, 9000)
    assert probe.num_sent == 2


def test_hops_that_tell_are_followed_one_after_the_other() -> None:
    path = searched(FakeProbe(1400, hops=(4200, 1500, 1400)))
    assert (path.path_mtu, path.told_mtu, path.is_black_hole) == (1400, 1400, False)


@given(path_mtu_of_network=st.integers(HEADERS_NBYTES, 8999))
def test_a_black_hole_is_found_to_the_byte(path_mtu_of_network: int) -> None:
    probe = FakeProbe(path_mtu_of_network)
    path = searched(probe)
    measured = path.path_mtu
    assert path.told_mtu == 0
    # Up to four bytes above a usual size are its VLAN tag; below IPv4's smallest there is no need.
    if path_mtu_of_network >= 576:
        assert measured <= path_mtu_of_network <= measured + 4
    assert probe.now <= path_mtu.DEADLINE_S


def test_a_told_limit_that_is_not_true_ends_in_the_search() -> None:
    # The hop says 4200, and what is below it takes 1500 and says nothing.
    path = searched(FakeProbe(1500, hops=(4200,)))
    assert path.path_mtu == 1500


@pytest.mark.parametrize("lost", [(1,), (2,), (1, 3), (2, 3)])
def test_single_losses_do_not_make_a_path_narrow(lost: tuple[int, ...]) -> None:
    assert searched(FakeProbe(9000, lost=lost)).path_mtu == 9000


def test_silence_is_told_as_such() -> None:
    path = searched(FakeProbe(0))
    assert (path.path_mtu, path.error) == (0, "no answer, not even to a small packet")


def test_a_slow_path_is_measured_within_the_deadline() -> None:
    probe = FakeProbe(9000, late_s=0.2)
    assert searched(probe).path_mtu == 9000


def test_an_error_of_the_network_is_the_reason() -> None:
    class Unreachable(FakeProbe):
        def send(self, packet_nbytes: int, sequence: int) -> Answer | None:
            return Answer(error="No route to host")

    assert searched(Unreachable(0)).error == "No route to host"


class TestLoopback:
    @pytest.mark.parametrize("allows_icmp", [True, False])
    def test_path_mtu(self, allows_icmp: bool) -> None:
        path = probe_path_mtu("127.0.0.1", allows_icmp=allows_icmp)
        assert path.error == ""
        # The loopback takes more than an IPv4 packet may have.
        assert path.path_mtu == path.local_mtu == min(interface_mtu("127.0.0.1") or 0, 65535)

    @pytest.mark.parametrize("allows_icmp", [True, False])
    def test_quality(self, allows_icmp: bool) -> None:
        quality = probe_path_quality("127.0.0.1", allows_icmp=allows_icmp)
        assert (quality.num_sent, quality.loss, quality.error) == (100, 0, "")
        assert 0 < quality.median_rtt_s <= quality.p99_rtt_s

    def test_ipv6(self) -> None:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as asked:
            try:
                asked.bind(("::1", 0))
            except OSError as exc:
                pytest.skip(f"no IPv6 here: {exc}")
        for allows_icmp in (True, False):
            assert probe_path_mtu("::1", allows_icmp=allows_icmp).path_mtu > 1280
            assert probe_path_quality("::1", allows_icmp=allows_icmp).num_answered == 100

    def test_a_packet_that_is_too_large_for_the_interface_is_told(self) -> None:
        with ProbeSocket("127.0.0.1", allows_icmp=False) as probe:
            answer = probe.send(100_000, 1)
        assert answer == Answer(told_mtu=0)


@pytest.mark.parametrize("peer", ["nowhere.invalid", "", "a" * 70, "bad..name"])
def test_a_name_that_is_none_is_an_answer(peer: str) -> None:
    assert probe_path_mtu(peer).path_mtu == 0
    assert probe_path_mtu(peer).error
    assert probe_path_quality(peer).error


def test_an_address_of_nobody_here_has_no_interface() -> None:
    assert interface_mtu("203.0.113.1") is None
    assert interface_mtu("2001:db8::1") is None


class TestPrograms:
    def test_both_write_what_the_checks_read(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert path_mtu.main(["127.0.0.1", "nowhere.invalid"]) == 0
        near, nowhere = parse_path_mtus(capsys.readouterr().out)
        assert (near.peer, near.error) == ("127.0.0.1", "")
        assert nowhere.error
        assert path_quality.main(["nowhere.invalid"]) == 0
        (quality,) = path_quality.parse_path_qualities(capsys.readouterr().out)
        assert quality.error

    def test_without_peers_there_is_an_empty_list(self, capsys: pytest.CaptureFixture[str]) -> None:
        path_mtu.main([])
        path_quality.main([])
        assert capsys.readouterr().out == "[]\n[]\n"

    @pytest.mark.parametrize(
        "change", [{"path_mtu": "1500"}, {"peer": None}, {"colour": "red"}, {"told_mtu": True}]
    )
    def test_entries_that_are_odd_are_skipped(self, change: dict[str, object]) -> None:
        entry = json.loads(json.dumps([vars_of(PathMtu("a", path_mtu=1500))]))[0]
        assert parse_path_mtus(json.dumps([entry])) == [replace(PathMtu("a"), path_mtu=1500)]
        assert parse_path_mtus(json.dumps([entry | change])) == []


def vars_of(path: PathMtu) -> dict[str, object]:
    return {name: getattr(path, name) for name in PathMtu.__dataclass_fields__}
