"""The rig itself: what the other RDMA tests take for granted."""

import errno
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import pytest

from tests.rdma.locked_memory import with_limit
from tests.rdma.network import DEVICES, Network

pytestmark = pytest.mark.rdma

_ROUND_TRIPS = 200
_PINGPONG_PORT = 18515


def _is_listening(port: int) -> bool:
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    # Local address and state; 0A is LISTEN.
    return any(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows)


class _PingPong:
    """rdma-core's example between rxe0 and rxe1; its control connection goes over lo."""

    def __init__(self, num_round_trips: int) -> None:
        self._num_round_trips = num_round_trips
        self._server = self._start("rxe0")
        # A client that comes too early does not try again.
        while not _is_listening(_PINGPONG_PORT):
            assert self._server.poll() is None
        self.client = self._start("rxe1", "127.0.0.1")

    def result(self) -> tuple[int, str]:
        """Exit status and output of the client."""
        output = (self.client.stdout or StringIO()).read()
        return self.client.wait(), output

    def close(self) -> None:
        for process in (self.client, self._server):
            with process:  # Waits for it and closes its output.
                process.kill()

    def _start(self, device: str, *server: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [
                *("ibv_rc_pingpong", "-e", "-d", device, "-g", "1"),
                *("-p", str(_PINGPONG_PORT), "-n", str(self._num_round_trips), *server),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
        )


@pytest.fixture
def pingpong() -> Iterator[Callable[[int], _PingPong]]:
    """Starts a conversation of so many round trips."""
    started: list[_PingPong] = []

    def start(num_round_trips: int) -> _PingPong:
        started.append(_PingPong(num_round_trips))
        return started[-1]

    yield start
    for conversation in started:
        conversation.close()


def _port_state(device: str) -> str:
    text = Path(f"/sys/class/infiniband/{device}/ports/1/state").read_text(encoding="utf-8")
    return text.partition(": ")[2].strip()


def test_two_devices_have_an_active_port_and_an_ipv4_gid() -> None:
    for name, address in (("rxe0", "0a63:0001"), ("rxe1", "0a63:0002")):
        port = Path(f"/sys/class/infiniband/{name}/ports/1")
        assert _port_state(name) == "ACTIVE"
        assert (port / "gids/1").read_text().strip() == f"0000:0000:0000:0000:0000:ffff:{address}"
        assert (port / "gid_attrs/types/1").read_text().strip() == "RoCE v2"


def test_pyverbs_is_there_alone_and_opens_the_devices() -> None:
    device = pytest.importorskip("pyverbs.device")
    assert sorted(item.name for item in device.get_device_list()) == [b"rxe0", b"rxe1"]
    with device.Context(name="rxe0") as context:
        assert context.query_device().phys_port_cnt == 1
    folders = [Path(entry) for entry in sys.path if (Path(entry) / "pyverbs").is_dir()]
    assert [sorted(path.name for path in folder.iterdir()) for folder in folders] == [["pyverbs"]]


def test_packets_cross_the_wire(network: Network, pingpong: Callable[[int], _PingPong]) -> None:
    before = [network.num_packets_sent(device) for device in DEVICES]
    status, output = pingpong(_ROUND_TRIPS).result()
    assert status == 0, output
    after = [network.num_packets_sent(device) for device in DEVICES]
    assert all(new - old >= _ROUND_TRIPS for old, new in zip(before, after, strict=True))


def test_delay_slows_the_wire_until_it_heals(
    network: Network, pingpong: Callable[[int], _PingPong]
) -> None:
    num_round_trips, delay_ms = 20, 10.0
    network.delay(delay_ms)
    started_at = time.monotonic()
    status, output = pingpong(num_round_trips).result()
    assert status == 0, output
    # No upper bound: the machine may be busy. Less is impossible.
    assert time.monotonic() - started_at >= num_round_trips * 2 * delay_ms / 1000
    network.heal()
    assert "netem" not in _queues("rdma0") + _queues("rdma1")


def test_loss_drops_packets(network: Network, pingpong: Callable[[int], _PingPong]) -> None:
    """Whether queue pairs get over it is their own affair: rxe's sometimes stall for ever."""
    network.loss(5)
    conversation = pingpong(_ROUND_TRIPS)
    while not (_num_dropped("rdma0") + _num_dropped("rdma1")):
        assert conversation.client.poll() is None, "no packet of many was dropped"


def test_total_loss_is_not_seen_by_the_ports_and_ends_when_it_heals(
    network: Network, pingpong: Callable[[int], _PingPong]
) -> None:
    network.loss(100)
    conversation = pingpong(1)
    while not (_num_dropped("rdma0") + _num_dropped("rdma1")):
        assert conversation.client.poll() is None
    assert [_port_state(name) for name in ("rxe0", "rxe1")] == ["ACTIVE", "ACTIVE"]
    network.heal()
    conversation.close()
    status, output = pingpong(1).result()
    assert status == 0, output


def test_a_cut_takes_both_ports_down_until_it_heals(
    network: Network, pingpong: Callable[[int], _PingPong]
) -> None:
    network.cut()
    assert [_port_state(name) for name in ("rxe0", "rxe1")] == ["DOWN", "DOWN"]
    network.heal()
    assert [_port_state(name) for name in ("rxe0", "rxe1")] == ["ACTIVE", "ACTIVE"]
    status, output = pingpong(1).result()
    assert status == 0, output


def test_a_child_can_have_a_limit_on_locked_memory() -> None:
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY
    code = """if True:
        import sys
        from pyverbs.device import Context
        from pyverbs.mr import MR
        from pyverbs.pd import PD
        from pyverbs.pyverbs_error import PyverbsRDMAError
        with Context(name="rxe0") as context, PD(context) as domain:
            with MR(domain, 4096, 0):
                pass
            try:
                MR(domain, 1 << 20, 0)
            except PyverbsRDMAError as exc:
                sys.exit(exc.error_code)
    """
    result = subprocess.run(with_limit(64 << 10, [sys.executable, "-c", code]), check=False)
    assert result.returncode == errno.ENOMEM
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_writes_do_not_reach_the_host() -> None:
    (line,) = [
        line for line in Path("/proc/mounts").read_text().splitlines() if line.split()[1] == "/"
    ]
    assert line.split()[2] == "overlay"
    assert os.environ["PYTHONDONTWRITEBYTECODE"] == "1"


def _queues(device: str) -> str:
    return subprocess.check_output(["tc", "-s", "qdisc", "show", "dev", device], text=True)


def _num_dropped(device: str) -> int:
    return int(_queues(device).split("dropped ")[1].split(",")[0])
