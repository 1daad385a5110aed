"""Output of ``nvidia-smi``: the list of GPUs and the topology matrix.

Source: nvidia-smi(1).
"""

import re
from dataclasses import dataclass
from typing import Final

GPU_QUERY: Final = (
    "nvidia-smi",
    "--query-gpu=index,name,driver_version,pci.bus_id",
    "--format=csv,noheader",
)
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
_NIC_LEGEND: Final = re.compile(r"^\s+(NIC\d+):\s+(\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU; its PCI address as sysfs writes it ("0000:17:00.0")."""

    index: int
    name: str
    driver: str
    pci_address: str


@dataclass(frozen=True, slots=True)
class Topology:
    """``nvidia-smi topo -m``.

    Attributes:
        links: how two of GPU0, GPU1, …, mlx5_0, … are joined: "NV18", "PIX", "PXB", "PHB",
            "NODE", "SYS".
    """

    links: dict[tuple[str, str], str]


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """The GPUs of ``GPU_QUERY``; error texts give none."""
    gpus = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4 and fields[0].isdecimal():
            # "00000000:17:00.0": nvidia-smi writes eight digits of the domain, sysfs four.
            domain, _, rest = fields[3].lower().partition(":")
            address = f"{domain[-4:]}:{rest}"
            gpus.append(Gpu(int(fields[0]), fields[1], fields[2], address))
    return tuple(gpus)


def parse_topology(text: str) -> Topology:
    """The matrix; newer drivers call the NICs NIC0, … and name them in a legend."""
    plain = _COLOURS.sub("", text)
    names = dict(_NIC_LEGEND.findall(plain))
    links: dict[tuple[str, str], str] = {}
    columns: list[str] = []
    for line in plain.splitlines():
        words = line.split()
        if not words:
            continue
        if not columns:
            columns = [word for word in words if re.fullmatch(r"GPU\d+|NIC\d+|mlx\d+_\d+", word)]
        elif re.fullmatch(r"GPU\d+|NIC\d+|mlx\d+_\d+", words[0]):
            for column, link in zip(columns, words[1:], strict=False):
                if link != "X":
                    pair = names.get(words[0], words[0]), names.get(column, column)
                    links[pair] = link
    return Topology(links)
