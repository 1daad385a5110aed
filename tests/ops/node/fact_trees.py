"""Canned facts of machines, captured from real ones, and trees of files made of them."""

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from ops.node.change import FileChange
from ops.node.facts import CommandOutput, RecordedFacts
from ops.node.finding import Finding, Verdict

_CAPTURED = Path(__file__).with_name("captured")


def captured(name: str) -> str:
    """What a tool printed on a real machine, a file of ``captured``."""
    return (_CAPTURED / name).read_text(encoding="utf-8")


UBUNTU_22 = """\
PRETTY_NAME="Ubuntu 22.04.4 LTS"
NAME="Ubuntu"
VERSION_ID="22.04"
VERSION="22.04.4 LTS (Jammy Jellyfish)"
VERSION_CODENAME=jammy
ID=ubuntu
ID_LIKE=debian
HOME_URL="https://www.ubuntu.com/"
UBUNTU_CODENAME=jammy
"""
UBUNTU_24 = """\
PRETTY_NAME="Ubuntu 24.04.1 LTS"
NAME="Ubuntu"
VERSION_ID="24.04"
VERSION="24.04.1 LTS (Noble Numbat)"
VERSION_CODENAME=noble
ID=ubuntu
ID_LIKE=debian
UBUNTU_CODENAME=noble
LOGO=ubuntu-logo
"""
DEBIAN_12 = """\
PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"
NAME="Debian GNU/Linux"
VERSION_ID="12"
VERSION="12 (bookworm)"
VERSION_CODENAME=bookworm
ID=debian
HOME_URL="https://www.debian.org/"
"""
CENTOS_7 = """\
NAME="CentOS Linux"
VERSION="7 (Core)"
ID="centos"
ID_LIKE="rhel fedora"
VERSION_ID="7"
PRETTY_NAME="CentOS Linux 7 (Core)"
ANSI_COLOR="0;31"
CPE_NAME="cpe:/o:centos:centos:7"

CENTOS_MANTISBT_PROJECT="CentOS-7"
CENTOS_MANTISBT_PROJECT_VERSION="7"
"""
RHEL_8 = """\
NAME="Red Hat Enterprise Linux"
VERSION="8.9 (Ootpa)"
ID="rhel"
ID_LIKE="fedora"
VERSION_ID="8.9"
PLATFORM_ID="platform:el8"
PRETTY_NAME="Red Hat Enterprise Linux 8.9 (Ootpa)"
"""
ROCKY_9 = """\
NAME="Rocky Linux"
VERSION="9.3 (Blue Onyx)"
ID="rocky"
ID_LIKE="rhel centos fedora"
VERSION_ID="9.3"
PLATFORM_ID="platform:el9"
PRETTY_NAME="Rocky Linux 9.3 (Blue Onyx)"
"""
ALPINE = """\
NAME="Alpine Linux"
ID=alpine
VERSION_ID=3.19.1
PRETTY_NAME="Alpine Linux v3.19"
"""

# Debian 12's kernel; the aliases and the signature are left out but for a line each.
MODINFO_DEBIAN_12 = captured("modinfo_debian_12.txt")
# The vendor's driver, 24.01.
MODINFO_OFED = captured("modinfo_ofed_24_01.txt")
# A kernel of EL 8, as it came in a mail: long lines are broken.
MODINFO_EL_8 = captured("modinfo_el_8.txt")

# `sysctl -a` of procps 4.0.2 under Linux 6.18 (some of its lines), and lines as procps-ng 3.3.10 of
# CentOS 7 writes them.
SYSCTL_DEBIAN_12 = captured("sysctl_debian_12.txt")
SYSCTL_CENTOS_7 = captured("sysctl_centos_7.txt")

LOCALE_A_DEBIAN_12 = "C\nC.utf8\nPOSIX\n"
LOCALE_A_UBUNTU = "C\nC.utf8\nen_US.utf8\nPOSIX\n"
LOCALE_A_CENTOS_7 = "C\nPOSIX\naa_DJ\naa_DJ.utf8\nen_US\nen_US.iso88591\nen_US.utf8\nzh_CN.gbk\n"

ASK_PYTHON = (
    "env -u LC_ALL -u LC_CTYPE -u LANG -u PYTHONUTF8 -u PYTHONIOENCODING -u PYTHONCOERCECLOCALE"
)
PYTHON_CODE = (
    "python3 -c import locale, sys; print(sys.getfilesystemencoding(), sys.stdout.encoding, "
    "locale.getpreferredencoding(False))"
)


def said(stdout: str, exit_code: int = 0) -> CommandOutput:
    """A command that was run."""
    return CommandOutput(exit_code, stdout, "")


def python_asked(variables: str, answer: str) -> dict[str, CommandOutput]:
    """What Python says about its encodings when started with ``variables``."""
    line = " ".join(part for part in (ASK_PYTHON, variables, PYTHON_CODE) if part)
    return {line: said(f"{answer}\n")}


def running_values(**values: str) -> dict[str, str]:
    """Files below /proc/sys; "__" in a name stands for the dot."""
    return {f"/proc/sys/{name.replace('__', '/')}": f"{value}\n" for name, value in values.items()}


STOCK_VALUES = running_values(
    net__core__rmem_max="212992",
    net__core__wmem_max="212992",
    net__core__netdev_max_backlog="1000",
    net__core__somaxconn="4096",
    net__ipv4__tcp_rmem="4096\t131072\t6291456",
    net__ipv4__tcp_wmem="4096\t16384\t4194304",
    net__ipv4__tcp_mtu_probing="0",
    net__ipv4__tcp_slow_start_after_idle="1",
    net__ipv4__tcp_window_scaling="1",
    vm__max_map_count="65530",
    net__ipv4__neigh__default__gc_thresh1="128",
    net__ipv4__neigh__default__gc_thresh2="512",
    net__ipv4__neigh__default__gc_thresh3="1024",
    net__ipv4__neigh__default__base_reachable_time_ms="30000",
    net__ipv6__neigh__default__base_reachable_time_ms="30000",
)
GOOD_VALUES = running_values(
    net__core__rmem_max="268435456",
    net__core__wmem_max="536870912",
    net__core__netdev_max_backlog="250000",
    net__core__somaxconn="4096",
    net__ipv4__tcp_rmem="4096\t131072\t268435456",
    net__ipv4__tcp_wmem="4096\t16384\t268435456",
    net__ipv4__tcp_mtu_probing="1",
    net__ipv4__tcp_slow_start_after_idle="0",
    net__ipv4__tcp_window_scaling="1",
    vm__max_map_count="1048576",
    net__ipv4__neigh__default__gc_thresh1="1024",
    net__ipv4__neigh__default__gc_thresh2="2048",
    net__ipv4__neigh__default__gc_thresh3="4096",
    net__ipv4__neigh__default__base_reachable_time_ms="1000",
    net__ipv6__neigh__default__base_reachable_time_ms="1000",
)

# A stock Debian 12, as files: what apply, verify and rollback work on.
STOCK_TREE: Mapping[str, str] = {
    "/etc/os-release": DEBIAN_12,
    "/etc/locale.gen": "# en_US ISO-8859-1\n# en_US.UTF-8 UTF-8\n",
    "/usr/lib/locale/C.utf8/LC_CTYPE": "ctype",
    "/usr/lib/locale/en_US.utf8/LC_CTYPE": "ctype",
    "/etc/default/locale": "#  File generated by update-locale\nLANG=zh_CN.GBK\n",
    "/etc/systemd/system.conf": "[Manager]\n#LogLevel=info\n",
    "/etc/sysctl.d/README": "none of ours\n",
    "/proc/sys/kernel/random/boot_id": "5f0c1c9e-6f5e-4c1c-9d3a-d9f6a0c4d2b1\n",
    "/var/lib/misc/kept": "theirs\n",
    **STOCK_VALUES,
}


def facts(
    *files: Mapping[str, str],
    links: Mapping[str, str] | None = None,
    commands: Mapping[str, CommandOutput] | None = None,
    variables: Mapping[str, str] | None = None,
    folders: Mapping[str, tuple[str, ...]] | None = None,
) -> RecordedFacts:
    """Facts of several groups of files; a later one wins."""
    merged: dict[str, str] = {}
    for group in files:
        merged.update(group)
    return RecordedFacts(
        files=merged, links=links, commands=commands, variables=variables, folders=folders
    )


def write_tree(root: Path, files: Mapping[str, str]) -> None:
    """The files below ``root``, some with a mode of their own."""
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o640 if name == "/etc/default/locale" else 0o644)


def tree_digest(root: Path) -> dict[str, str]:
    """Everything below ``root`` but times: kind, mode, owner, content or target."""
    digests = {}
    for folder, names, files in os.walk(root):
        for name in (*names, *files):
            path = Path(folder) / name
            facts_of = path.lstat()
            if stat.S_ISLNK(facts_of.st_mode):
                content = os.readlink(path)
            elif stat.S_ISDIR(facts_of.st_mode):
                content = "folder"
            else:
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            digests[str(path.relative_to(root))] = (
                f"{stat.filemode(facts_of.st_mode)} {facts_of.st_uid}:{facts_of.st_gid} {content}"
            )
    return digests


def verdict_of(findings: list[Finding], subject: str) -> Verdict:
    """The verdict of the first finding about ``subject``."""
    return found(findings, subject).verdict


def found(findings: list[Finding], subject: str) -> Finding:
    """The first finding about ``subject``."""
    return next(finding for finding in findings if finding.subject == subject)


def file_change(path: str, text: str) -> FileChange:
    """A change for the sake of a test."""
    return FileChange(path, text, "A test wants it.")
