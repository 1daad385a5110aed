"""Output of iproute2's ``rdma`` 4.14 to 6, and of the copy that MLNX_OFED brings.

Source: rdma-link(8), rdma-system(8).
"""

import re
from dataclasses import dataclass
from typing import Final

_LINK: Final = re.compile(r"(?:link |\d+/\d+: )(?P<device>[^\s/]+)/(?P<port>\d+):?\s+(?P<rest>.*)")


@dataclass(frozen=True, slots=True)
class RdmaLink:
    """A port as ``rdma link`` lists it; "" where a word is missing.

    Attributes:
        device: "mlx5_0".
        port: counts from 1.
        state: "ACTIVE", "DOWN", …
        physical_state: "LINK_UP", "DISABLED", …
        netdev: the Ethernet interface below; "" for InfiniBand.
    """

    device: str
    port: int
    state: str
    physical_state: str
    netdev: str


def parse_links(text: str) -> tuple[RdmaLink, ...]:
    """Both forms: ``link mlx5_0/1 state …`` (5.0 and later) and ``1/1: mlx5_0/1: state …``."""
    links = []
    for line in text.splitlines():
        match = _LINK.match(line.strip())
        if match is None:
            continue
        words = match["rest"].split()
        values = dict(zip(words[::2], words[1::2], strict=False))
        if "subnet_prefix" in values:  # InfiniBand: other words, in no pairs after them
            values = {name: words[words.index(name) + 1] for name in _after(words)}
        links.append(
            RdmaLink(
                match["device"],
                int(match["port"]),
                values.get("state", ""),
                values.get("physical_state", ""),
                values.get("netdev", ""),
            )
        )
    return tuple(links)


def _after(words: list[str]) -> list[str]:
    return [name for name in ("state", "physical_state", "netdev") if name in words[:-1]]


def parse_netns_mode(text: str) -> str:
    """``rdma system show``: "shared", "exclusive", or "" if it does not say."""
    match = re.search(r"\bnetns\s+(shared|exclusive)\b", text)
    return match[1] if match else ""
