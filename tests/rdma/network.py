"""The wire between the guest's two devices, and how a test makes it bad."""

import shutil
import subprocess
from pathlib import Path
from typing import Final

# Netdevices: rxe0 is on rdma0, rxe1 on rdma1.
DEVICES: Final = ("rdma0", "rdma1")
_ROUTES: Final = Path(__file__).parent / "rig/pair.routes"
# Packets; netem's own limit of 1000 is reached by one window of a fast sender.
_QUEUE_LIMIT: Final = 100_000


class Network:
    """The veth pair: what is set holds for both directions until ``heal``.

    Only for root in the guest. FileNotFoundError: no iproute2; CalledProcessError: the kernel
    refused.
    """

    def __init__(self) -> None:
        self._delay_ms = 0.0
        self._loss_percent = 0.0
        self._is_cut = False

    def delay(self, delay_ms: float) -> None:
        """Hold every packet back for ``delay_ms``; a round trip takes twice that."""
        self._delay_ms = delay_ms
        self._shape()

    def loss(self, percent: float) -> None:
        """Drop ``percent`` of all packets, chosen at random; 100 is a wire that swallows all.

        The devices do not notice: to them the link is up.
        """
        self._loss_percent = percent
        self._shape()

    def cut(self) -> None:
        """Pull the cable: both devices lose the link and report it as an event."""
        _run("ip", "link", "set", DEVICES[0], "down")
        self._is_cut = True

    def heal(self) -> None:
        """Undo all of it."""
        if self._delay_ms or self._loss_percent:
            self._delay_ms = self._loss_percent = 0.0
            self._shape()
        if self._is_cut:
            _run("ip", "link", "set", DEVICES[0], "up")
            # They went with the link.
            _run("ip", "-batch", str(_ROUTES))
            self._is_cut = False

    def num_packets_sent(self, device: str) -> int:
        """What ``device`` has put on the wire so far."""
        counter = Path(f"/sys/class/net/{device}/statistics/tx_packets")
        return int(counter.read_text(encoding="utf-8"))

    def _shape(self) -> None:
        """Give both ends the delay and the loss of this moment."""
        wishes = []
        if self._delay_ms:
            wishes += ["delay", f"{self._delay_ms:g}ms"]
        if self._loss_percent:
            wishes += ["loss", f"{self._loss_percent:g}%"]
        for device in DEVICES:
            qdisc = ["netem", "limit", str(_QUEUE_LIMIT), *wishes] if wishes else ["noqueue"]
            _run("tc", "qdisc", "replace", "dev", device, "root", *qdisc)


def _run(program: str, *arguments: str) -> None:
    # By its path and without closing descriptors, Python starts it by posix_spawn: to fork a
    # process that has loaded torch takes half a second in the guest.
    path = shutil.which(program)
    if path is None:
        raise FileNotFoundError(f"{program} is not installed; the package is iproute2.")
    subprocess.run([path, *arguments], check=True, stdin=subprocess.DEVNULL, close_fds=False)
