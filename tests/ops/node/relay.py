"""A bad piece of network, for kernels without netem.

``python -m tests.ops.node.relay NAME LOSS DELAY`` makes the tun interface NAME, says "ready" and
sends every packet that is routed into it back out of it: all but each ``1 / LOSS``-th one,
``DELAY`` seconds later.
"""

import collections
import fcntl
import os
import select
import struct
import sys
import time

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000


def main(name: str, loss: float, delay_s: float) -> None:
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    drops_each = round(1 / loss) if loss else 0
    waiting: collections.deque[tuple[float, bytes]] = collections.deque()
    poller = select.poll()
    poller.register(tun, select.POLLIN)
    poller.register(sys.stdin, select.POLLIN | select.POLLHUP)
    num_packets = 0
    while True:
        timeout_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for fd, _ in poller.poll(None if timeout_s is None else timeout_s * 1000):
            if fd != tun:
                return  # whoever started us is gone
            packet = os.read(tun, 65536)
            num_packets += 1
            if not drops_each or num_packets % drops_each:
                waiting.append((time.monotonic() + delay_s, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            os.write(tun, waiting.popleft()[1])


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]))
