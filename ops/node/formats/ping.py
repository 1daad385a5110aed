"""Output of iputils' ``ping`` s20121221 to 20250605.

Source: ping(8).
"""

import re
from dataclasses import dataclass
from typing import Final

_RECEIVED: Final = re.compile(r"(\d+) packets transmitted, (\d+) (?:packets )?received")
# "local error: Message too long, mtu=1400" and "Frag needed and DF set (mtu = 1400)"; for IPv6
# "Packet too big: mtu=1400".
_MTU: Final = re.compile(r"\bmtu ?= ?(\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PingAnswer:
    """How a ping ended.

    Attributes:
        num_sent: packets sent, 0 if it did not get so far.
        num_received: answers.
        told_mtu: the MTU that a router or this host's kernel named as the limit, or None.
    """

    num_sent: int
    num_received: int
    told_mtu: int | None


def parse_ping(stdout: str, stderr: str) -> PingAnswer:
    """Both streams: local errors are on the second one."""
    counted = _RECEIVED.search(stdout)
    # 0 is what some routers send that do not tell (RFC 1191, section 5).
    told = [int(mtu) for mtu in _MTU.findall(f"{stdout}\n{stderr}") if int(mtu) > 0]
    return PingAnswer(
        int(counted[1]) if counted else 0,
        int(counted[2]) if counted else 0,
        min(told) if told else None,
    )
