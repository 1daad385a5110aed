"""Whether the looking process is inside a container, and of which kind.

Source: podman-run(1) (/run/.containerenv), systemd's Container Interface.
"""

import re
from typing import Final

from ops.node.facts import Facts

_CGROUP_NAME: Final = re.compile(r"/(docker|kubepods|lxc|libpod|machine\.slice/libpod)\b")


def container_kind(facts: Facts) -> str:
    """Its kind, as "docker" or "kubernetes"; "" outside of one, as far as it can be told."""
    if facts.environment("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if facts.text("/run/.containerenv") is not None:
        return "podman"
    if facts.text("/.dockerenv") is not None:
        return "docker"
    kind = (facts.text("/run/systemd/container") or facts.environment("container") or "").strip()
    if kind:
        return kind
    match = _CGROUP_NAME.search(facts.text("/proc/1/cgroup") or "")
    if match is None:
        return ""
    return {"kubepods": "kubernetes"}.get(match[1], match[1].rpartition("/")[2])
