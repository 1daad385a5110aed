"""Real MTU mismatch, loss and delay between network namespaces, found and named.

client ── veth ── router ── veth ── server. Where the kernel has netem it makes loss and delay;
otherwise packets go through a relay of our own in the router.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from ops.node.checks.path import MAX_RTT_S
from tests.ops.stand_ins import SOURCE_ROOT

CLIENT, SERVER = "10.79.1.1", "10.79.2.1"
NAMES = itertools.count()


class Fabric:
    """Three namespaces in a row, with jumbo frames; the test makes it bad."""

    def __init__(self, env: dict[str, str]) -> None:
        number = f"{os.getpid()}-{next(NAMES)}"
        self.client, self.router, self.server = (
            f"pdserve-{number}-{role}" for role in ("client", "router", "server")
        )
        self._env = env
        self._relay: subprocess.Popen[str] | None = None
        self._made: list[str] = []

    def build(self) -> str:
        """The reason why this machine cannot have it, or ""."""
        for name in (self.client, self.router, self.server):
            made = subprocess.run(
                ["ip", "netns", "add", name], capture_output=True, text=True, check=False
            )
            if made.returncode:
                return f"no network namespace can be made here: {made.stderr.strip()}"
            self._made.append(name)
        lines = f"""
            link add c0 netns {self.client} type veth peer name r0 netns {self.router}
            link add s0 netns {self.server} type veth peer name r1 netns {self.router}
            -n {self.client} addr add {CLIENT}/24 dev c0
            -n {self.router} addr add 10.79.1.9/24 dev r0
            -n {self.router} addr add 10.79.2.9/24 dev r1
            -n {self.server} addr add {SERVER}/24 dev s0
        """
        ends = (
            *((self.client, "c0"), (self.router, "r0")),
            *((self.router, "r1"), (self.server, "s0")),
        )
        for namespace, netdev in ends:
            lines += f"-n {namespace} link set {netdev} mtu 9000 up\n"
        lines += f"""
            -n {self.client} route add default via 10.79.1.9
            -n {self.server} route add default via 10.79.2.9
        """
        for line in filter(None, map(str.strip, lines.splitlines())):
            made = subprocess.run(
                ["ip", *line.split()], capture_output=True, text=True, check=False
            )
            if made.returncode:
                return f"no veth pair can be made here: ip {line}: {made.stderr.strip()}"
        self.inside(self.router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        return ""

    def inside(self, namespace: str, *command: str) -> str:
        """What ``command`` writes there."""
        ended = subprocess.run(
            ["ip", "netns", "exec", namespace, *command],
            env=self._env,
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def set_mtu(self, namespace: str, netdev: str, mtu: int) -> None:
        self.inside(namespace, "ip", "link", "set", netdev, "mtu", str(mtu))

    def check(self, name: str, *peers: str, missing: str = "") -> dict[str, dict[str, Any]]:
        """Findings of the check in the client, by subject."""
        program = (sys.executable, "-m", "tests.ops.node.run_check", name, missing, *peers)
        answers = json.loads(self.inside(self.client, *program))
        return {answer.get("subject") or answer["peer"]: answer for answer in answers}

    def worsen(self, *, loss: float = 0.0, delay_s: float = 0.0) -> None:
        """Lose and delay what the client sends."""
        netem = ("netem", "loss", f"{loss:.0%}", "delay", f"{delay_s * 1000:g}ms", "limit", "9999")
        tried = subprocess.run(
            ["ip", "netns", "exec", self.client, "tc", "qdisc", "add", "dev", "c0", "root", *netem],
            capture_output=True,
            check=False,
        )
        if tried.returncode:
            self._start_relay(loss, delay_s)

    def _start_relay(self, loss: float, delay_s: float) -> None:
        if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
            pytest.skip("the kernel has neither netem nor tun devices")
        relay = subprocess.Popen(
            [
                *("ip", "netns", "exec", self.router, sys.executable),
                *("-m", "tests.ops.node.relay", "relay0", str(loss), str(delay_s)),
            ],
            env=self._env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._relay = relay
        assert relay.stdout is not None
        assert relay.stdout.readline() == "ready\n"
        in_router = ("ip", "-n", self.router)
        for command in (
            ("link", "set", "relay0", "mtu", "9000", "up"),
            # From the client through the relay, from the relay on to the server.
            ("route", "add", "default", "dev", "relay0", "table", "100"),
            ("rule", "add", "iif", "r0", "lookup", "100"),
        ):
            subprocess.run([*in_router, *command], check=True)

    def close(self) -> None:
        if self._relay is not None:
            assert self._relay.stdin is not None
            assert self._relay.stdout is not None
            self._relay.stdin.close()
            self._relay.wait(10)
            self._relay.stdout.close()
        for name in self._made:
            subprocess.run(["ip", "netns", "delete", name], check=True)


@pytest.fixture
def fabric(program_env: dict[str, str]) -> Iterator[Fabric]:
    if os.geteuid() != 0:
        pytest.skip("only root may make network namespaces")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} (iproute2) is not installed")
    made = Fabric({**program_env, "PATH": os.environ["PATH"], "PYTHONPATH": str(SOURCE_ROOT)})
    try:
        if reason := made.build():
            pytest.skip(reason)
        yield made
    finally:
        made.close()


@pytest.fixture(params=["ping", ""], ids=["own probe", "ping if it is there"])
def missing(request: pytest.FixtureRequest) -> str:
    """Tools that count as not installed."""
    return str(request.param)


def test_a_path_that_is_right(fabric: Fabric, missing: str) -> None:
    finding = fabric.check("mtu", SERVER, missing=missing)[f"path to {SERVER}"]
    assert (finding["verdict"], finding["measured"].split()[0]) == ("OK", "9000")


def test_a_smaller_hop_in_the_middle_is_named(fabric: Fabric, missing: str) -> None:
    fabric.set_mtu(fabric.router, "r1", 4200)
    finding = fabric.check("mtu", SERVER, missing=missing)[f"path to {SERVER}"]
    assert (finding["verdict"], finding["measured"].split()[0]) == ("FAIL", "4200")
    assert "A router on the way has a smaller MTU" in finding["reason"]
    assert finding["wanted"] == "9000, as the own interface has"


@pytest.mark.parametrize(("missing", "mtu"), [("ping", 1500), ("", 3777)])
def test_a_far_end_that_takes_less_is_a_black_hole(fabric: Fabric, missing: str, mtu: int) -> None:
    # Nobody tells: the far end drops what is too large for it, as a NIC does.
    fabric.set_mtu(fabric.server, "s0", mtu)
    finding = fabric.check("mtu", SERVER, missing=missing)[f"path to {SERVER}"]
    assert finding["verdict"] == "FAIL"
    # A veth pair lets a VLAN tag more through than the MTU says.
    measured = int(finding["measured"].split()[0])
    assert mtu <= measured <= mtu + 4
    assert "vanish without a message" in finding["reason"]


def test_peers_that_disagree_are_listed(fabric: Fabric, missing: str) -> None:
    fabric.set_mtu(fabric.router, "r1", 4200)
    near = "10.79.1.9"
    finding = fabric.check("mtu", SERVER, near, missing=missing)["paths to 2 peers"]
    assert (finding["verdict"], finding["measured"]) == ("FAIL", f"{SERVER} 4200, {near} 9000")


def test_a_peer_that_is_not_there_is_named(fabric: Fabric, missing: str) -> None:
    nobody = "10.79.2.77"
    finding = fabric.check("mtu", nobody, missing=missing)[f"path to {nobody}"]
    assert finding["verdict"] == "FAIL"
    assert "cannot be reached" in finding["reason"]


def test_without_icmp_udp_finds_the_same(fabric: Fabric) -> None:
    fabric.set_mtu(fabric.router, "r1", 4200)
    answer = fabric.check("udp", SERVER)[SERVER]
    assert answer["method"] == "UDP to a closed port"
    assert (answer["path_mtu"], answer["told_mtu"], answer["local_mtu"]) == (4200, 4200, 9000)


def test_a_good_path_loses_nothing(fabric: Fabric) -> None:
    findings = fabric.check("path", SERVER)
    assert findings[f"path to {SERVER}: loss"]["verdict"] == "OK"
    assert findings[f"path to {SERVER}: loss"]["measured"] == "0 of 100 lost (0%, ICMP echo)"


def test_real_loss_is_found_and_named(fabric: Fabric) -> None:
    fabric.worsen(loss=0.2)
    finding = fabric.check("path", SERVER)[f"path to {SERVER}: loss"]
    num_lost = int(finding["measured"].split()[0])
    assert finding["verdict"] == "FAIL"
    # Of 100 with a chance of 20 %; beyond these it is not that network any more.
    assert 3 <= num_lost <= 60


def test_real_delay_is_found_and_named(fabric: Fabric) -> None:
    fabric.worsen(delay_s=0.02)
    finding = fabric.check("path", SERVER)[f"path to {SERVER}: delay"]
    assert finding["verdict"] == "WARN"
    assert "far away" in finding["reason"]
    median_ms = float(finding["measured"].split()[1])
    assert median_ms >= 20 > MAX_RTT_S * 1000


def test_loss_does_not_look_like_a_small_mtu(fabric: Fabric) -> None:
    fabric.worsen(loss=0.05)
    finding = fabric.check("mtu", SERVER, missing="ping")[f"path to {SERVER}"]
    assert finding["measured"].split()[0] == "9000"
