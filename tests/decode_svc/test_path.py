"""Which carrier is chosen, and what is said of those that are not; with made carriers."""

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decode_svc.letter_box import LetterBoxes
from decode_svc.metrics import DecodeMetrics
from decode_svc.path import TCP, Path, PathChooser
from decode_svc.quarantine import Quarantine
from kvproto.blocks import BlockPool
from kvproto.errors import (
    CarrierUnavailable,
    ConnectionLost,
    ErrorCode,
    HandshakeRefused,
    PoolExhausted,
)
from kvproto.geometry import KvGeometry, PoolLayout
from kvproto.lease import LeaseTable
from kvproto.messages import Attached
from kvproto.probe import PathReport, ProbeFailed

_LAYOUT = PoolLayout(KvGeometry.uniform(1, 1, 2, "float32", ("a",)), 8, 4)


def _report(carrier: str, megabytes_per_s: float) -> PathReport:
    """0: the larger probe took no longer than the small one."""
    elapsed_s = 1.0 + bool(megabytes_per_s)
    return PathReport(carrier, 1 + round(megabytes_per_s * 1e6), elapsed_s, 1.0, 1)


class _Attachment:
    """A hold on our memory that this side may be able to cut."""

    def __init__(self, writer: str, *, can_cut: bool) -> None:
        self.writer = writer
        self.num_cuts = 0
        self._can_cut = can_cut

    @property
    def is_gone(self) -> bool:
        return self._can_cut and self.num_cuts > 0

    def cut(self) -> None:
        self.num_cuts += 1


class _Host:
    """Attaches, or does not."""

    def __init__(self, carrier: str, refusal: Exception | None = None) -> None:
        self.carrier = carrier
        self.refusal = refusal
        self.attachments: list[_Attachment] = []
        self.answers: list[object] = []

    async def attach(self, peer: object, *, timeout_s: float) -> _Attachment:
        assert (peer, timeout_s) == ("control", 3.0)
        if self.refusal is not None:
            raise self.refusal
        self.attachments.append(_Attachment("p", can_cut=self.carrier == "rdma"))
        return self.attachments[-1]

    def attached(self, peer: object, message: object) -> None:
        assert peer == "control"
        self.answers.append(message)


class _Bench:
    """A chooser between made hosts and made probes.

    ``found``: what the probe of each carrier reports, or raises.
    """

    def __init__(self, hosts: Sequence[_Host], only: str = "", min_bandwidth: float = 0.0) -> None:
        self.hosts = hosts
        self.found: dict[str, PathReport | Exception] = {
            "rdma": _report("rdma", 5000),
            "mapped": _report("mapped", 4000),
            TCP: _report(TCP, 1000),
        }
        self.probed: list[str] = []
        self.metrics = DecodeMetrics()
        blocks = BlockPool(_LAYOUT.num_blocks)
        self.blocks = blocks
        self.leases = LeaseTable(_LAYOUT, memoryview(bytearray(_LAYOUT.nbytes)), blocks)
        self.quarantine = Quarantine(self.leases)
        self.aborts: list[str] = []
        carriers = [*(host.carrier for host in hosts), TCP]
        self.peer: Any = SimpleNamespace(
            name="prefill/p",
            control="control",
            lanes=["one"],
            remote=SimpleNamespace(instance_id="p", carriers=carriers),
            abort=self.aborts.append,
            wait_closed=self._closed,
        )
        self.paths = PathChooser(
            self.leases,
            blocks,
            _LAYOUT,
            LetterBoxes(),
            self.quarantine,
            self.metrics,
            hosts=cast("Any", hosts),
            only=only,
            new_generation=itertools.count(1).__next__,
            min_bandwidth=min_bandwidth,
            timeout_s=3.0,
        )

    async def _closed(self) -> None:
        pass

    async def measure(self, _peer: object, *_: object, **how: Any) -> PathReport:
        carrier = how["carrier"]
        self.probed.append(carrier)
        assert (how["attachment"] is None) is (carrier == TCP)
        found = self.found[carrier]
        if isinstance(found, ProbeFailed) and found.generation:
            # As ``measure`` leaves it: the lease is revoked and its blocks wait.
            table = self.blocks.allocate("probe", 1)
            is_placed = carrier != TCP
            self.leases.grant("probe", found.generation, table, 1, writer="p", is_placed=is_placed)
            self.leases.revoke(found.generation)
        if isinstance(found, Exception):
            raise found
        return found

    def fallbacks(self) -> dict[str, float]:
        """The metric, by carrier."""
        return {
            sample.labels["carrier"]: sample.value
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == "pd_decode_path_fallbacks_total"
        }

    def num_cuts(self, carrier: str) -> list[int]:
        """Of each attachment that this carrier made."""
        [host] = [host for host in self.hosts if host.carrier == carrier]
        return [attachment.num_cuts for attachment in host.attachments]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(*hosts: _Host, **options: Any) -> _Bench:
        made = _Bench(hosts or (_Host("rdma"), _Host("mapped")), **options)
        monkeypatch.setattr("decode_svc.path.measure", made.measure)
        return made

    return make


async def test_the_first_that_works_is_taken(bench: Any) -> None:
    made = bench()
    path = await made.paths.choose(made.peer)
    assert (path.carrier, path.report.carrier) == ("rdma", "rdma")
    assert path.attachment is made.hosts[0].attachments[0]
    assert made.probed == ["rdma", TCP], "compared with TCP, and nothing else is tried"
    assert path.passed_over == {}
    assert made.fallbacks() == {}
    assert made.num_cuts("rdma") == [0]


async def test_what_cannot_be_used_is_passed_over_and_says_why(bench: Any) -> None:
    made = bench(
        _Host("rdma", CarrierUnavailable("p cannot attach: no RDMA device")),
        _Host("mapped", CarrierUnavailable("another host")),
    )
    path = await made.paths.choose(made.peer)
    assert (path.carrier, path.attachment) == (TCP, None)
    assert made.probed == [TCP]
    reasons = {"rdma": "p cannot attach: no RDMA device", "mapped": "another host"}
    assert path.passed_over == reasons
    assert path.stats()["passed_over"] == reasons
    assert made.fallbacks() == {"rdma": 1, "mapped": 1}


async def test_mapped_memory_is_not_compared_with_tcp(bench: Any) -> None:
    made = bench(_Host("rdma", CarrierUnavailable("no")), _Host("mapped"))
    made.found["mapped"] = _report("mapped", 1)
    path = await made.paths.choose(made.peer)
    assert path.carrier == "mapped"
    assert made.probed == ["mapped"]
    assert made.fallbacks() == {"rdma": 1}


async def test_a_carrier_that_the_worker_does_not_have_is_not_tried(bench: Any) -> None:
    made = bench()
    made.peer.remote.carriers = ["mapped", TCP]
    path = await made.paths.choose(made.peer)
    assert path.carrier == "mapped"
    assert made.hosts[0].attachments == []
    assert path.passed_over == {}
    assert made.fallbacks() == {}


async def test_several_lanes_are_of_tcp_alone(bench: Any) -> None:
    made = bench()
    path = await made.paths.choose(made.peer, is_tcp_only=True)
    assert path.carrier == TCP
    assert made.probed == [TCP]


# -- RDMA and TCP ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rdma", "tcp", "is_taken"),
    [(1000, 1199, True), (1000, 1200, True), (1000, 1201, False), (0, 9000, True), (5, 0, True)],
)
async def test_rdma_is_given_up_if_tcp_is_a_fifth_faster(
    bench: Any, rdma: float, tcp: float, *, is_taken: bool
) -> None:
    """A figure of 0 is that of a probe which was too short to tell."""
    made = bench(_Host("rdma"))
    made.found |= {"rdma": _report("rdma", rdma), TCP: _report(TCP, tcp)}
    path = await made.paths.choose(made.peer)
    assert path.carrier == ("rdma" if is_taken else TCP)
    assert made.probed == ["rdma", TCP], "each is measured once"
    assert made.num_cuts("rdma") == [0 if is_taken else 1]
    assert made.fallbacks() == ({} if is_taken else {"rdma": 1})
    if not is_taken:
        assert path.report.carrier == TCP
        assert path.passed_over == {
            "rdma": "it carries 1000 MB/s, TCP 1201 MB/s; kv_carrier rdma would use it all the same"
        }


async def test_rdma_that_is_slower_than_tcp_leaves_room_for_mapped_memory(bench: Any) -> None:
    made = bench()
    made.found["rdma"] = _report("rdma", 100)
    path = await made.paths.choose(made.peer)
    assert path.carrier == "mapped"
    assert made.probed == ["rdma", TCP, "mapped"]
    assert list(path.passed_over) == ["rdma"]
    assert made.num_cuts("rdma") == [1]
    assert made.num_cuts("mapped") == [0]


async def test_rdma_that_could_not_be_proven_is_not_used(bench: Any) -> None:
    """Two ports that are active may still not reach each other."""
    made = bench(_Host("rdma"))
    made.found["rdma"] = PoolExhausted("no probe over rdma: 3 blocks are free")
    path = await made.paths.choose(made.peer)
    assert path.carrier == TCP
    assert path.passed_over == {"rdma": "no block was free to prove it with"}
    assert made.num_cuts("rdma") == [1]


async def test_nothing_stays_attached_if_tcp_fails_while_it_is_compared(bench: Any) -> None:
    made = bench()
    made.found[TCP] = ConnectionLost("gone")
    with pytest.raises(ConnectionLost):
        await made.paths.choose(made.peer)
    assert made.num_cuts("rdma") == [1]


# -- one carrier alone -----------------------------------------------------------------------------


@pytest.mark.parametrize("only", ["rdma", "mapped"])
async def test_the_one_that_was_asked_for_is_not_compared(bench: Any, only: str) -> None:
    made = bench(_Host(only), only=only)
    made.found[only] = _report(only, 1)
    path = await made.paths.choose(made.peer)
    assert path.carrier == only
    assert made.probed == [only]


async def test_without_a_free_block_the_one_that_was_asked_for_is_used_unmeasured(
    bench: Any,
) -> None:
    made = bench(_Host("rdma"), only="rdma")
    made.found["rdma"] = PoolExhausted("no block")
    path = await made.paths.choose(made.peer)
    assert (path.carrier, path.report, path.bandwidth) == ("rdma", None, 0.0)
    assert path.stats()["bandwidth_bytes_per_s"] is None
    assert made.num_cuts("rdma") == [0]


@pytest.mark.parametrize("only", ["rdma", "mapped"])
async def test_a_worker_without_the_one_that_was_asked_for_is_refused(
    bench: Any, only: str
) -> None:
    made = bench(_Host(only, CarrierUnavailable("the link is down")), only=only)
    with pytest.raises(CarrierUnavailable) as excinfo:
        await made.paths.choose(made.peer)
    assert str(excinfo.value) == (
        f"prefill/p does not reach this worker's memory by {only} and kv_carrier is {only} (the "
        "link is down); correct that, or set kv_carrier to auto"
    )
    assert made.probed == []
    made.peer.remote.carriers = [TCP]
    with pytest.raises(CarrierUnavailable, match="it does not offer that"):
        await made.paths.choose(made.peer)


# -- probes that fail ------------------------------------------------------------------------------


async def test_a_probe_that_fails_by_rdma_is_cut_and_its_blocks_are_free_at_once(
    bench: Any,
) -> None:
    made = bench(_Host("rdma"))
    made.found["rdma"] = ProbeFailed("not proven", ErrorCode.DEADLINE_EXCEEDED, generation=7)
    path = await made.paths.choose(made.peer)
    assert path.carrier == TCP
    assert path.passed_over == {"rdma": "not proven"}
    assert made.num_cuts("rdma") != [0]
    assert made.blocks.num_free_blocks == _LAYOUT.num_blocks
    assert made.fallbacks() == {"rdma": 1}
    assert made.aborts == [], "messages still pass"


async def test_a_probe_that_fails_by_mapped_memory_keeps_its_blocks(bench: Any) -> None:
    """Nobody can be kept from writing to memory that it has mapped."""
    made = bench(_Host("mapped"))
    made.found["mapped"] = ProbeFailed("not proven", ErrorCode.DEADLINE_EXCEEDED, generation=7)
    path = await made.paths.choose(made.peer)
    assert path.carrier == TCP
    assert made.blocks.stats()["quarantined"] == 1
    assert made.leases.release(7)


async def test_a_probe_that_fails_and_left_nothing(bench: Any) -> None:
    made = bench()
    made.found["rdma"] = ProbeFailed("damaged", ErrorCode.DIGEST_MISMATCH)
    path = await made.paths.choose(made.peer)
    assert path.carrier == "mapped"
    assert made.num_cuts("rdma") == [1]


async def test_a_probe_that_fails_by_tcp_ends_the_connection(bench: Any) -> None:
    made = bench(_Host("rdma", CarrierUnavailable("no")))
    made.found[TCP] = ProbeFailed("not proven", ErrorCode.DEADLINE_EXCEEDED, generation=7)
    with pytest.raises(ProbeFailed):
        await made.paths.choose(made.peer)
    assert made.aborts == ["the path is not proven"]
    assert made.blocks.num_free_blocks == _LAYOUT.num_blocks


async def test_a_connection_that_is_lost_while_a_carrier_is_proven_is_cut(bench: Any) -> None:
    made = bench()
    made.found["rdma"] = ConnectionLost("gone")
    with pytest.raises(ConnectionLost):
        await made.paths.choose(made.peer)
    assert made.num_cuts("rdma") == [1]
    assert made.hosts[1].attachments == []


# -- after the choice ------------------------------------------------------------------------------


def test_every_carrier_hears_of_attached(bench: Any) -> None:
    made = bench()
    message = Attached("rdma", bytes(32))
    made.paths.attached(made.peer, message)
    assert [host.answers for host in made.hosts] == [[message], [message]]


async def test_the_figure_of_a_path_is_in_the_metrics_until_its_connection_ends(
    bench: Any,
) -> None:
    made = bench()
    path = await made.paths.choose(made.peer)
    made.paths.accept(made.peer, path)
    labels = {"writer": "p", "carrier": "rdma"}
    read = made.metrics.registry.get_sample_value
    assert read("pd_decode_path_bandwidth_bytes_per_second", labels) == pytest.approx(5e9)
    made.paths.forget(made.peer, path)
    assert read("pd_decode_path_bandwidth_bytes_per_second", labels) is None
    assert made.num_cuts("rdma") == [1]


async def test_a_path_that_is_too_slow_is_refused(bench: Any) -> None:
    made = bench(min_bandwidth=6e9)
    path = await made.paths.choose(made.peer)
    with pytest.raises(HandshakeRefused, match="over rdma carries 5000 MB/s"):
        made.paths.accept(made.peer, path)


def test_a_path_without_a_figure_is_accepted_and_forgotten(bench: Any) -> None:
    made = bench(min_bandwidth=6e9)
    made.paths.accept(made.peer, Path(TCP))
    made.paths.forget(made.peer, Path(TCP))
    made.paths.accept(made.peer, Path(TCP, report=_report(TCP, 0)))
