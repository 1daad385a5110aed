from dataclasses import replace

import pytest

from tests.rdma.rig.host import Host, obstacle, this_host

_DEBIAN = Host(
    system="Linux",
    machine="x86_64",
    distribution="debian",
    implementation="cpython",
    is_root=True,
    has_apt=True,
    guest_memory_nbytes=8 << 30,
)


def test_debian_on_x86_64_can_have_the_rig() -> None:
    assert obstacle(_DEBIAN) is None
    # Whether packages are missing is found out later.
    assert obstacle(replace(_DEBIAN, is_root=False)) is None


@pytest.mark.parametrize(
    ("host", "words"),
    [
        (replace(_DEBIAN, system="Darwin", machine="arm64"), "Linux on x86_64 and this is Darwin"),
        (replace(_DEBIAN, machine="aarch64"), "this is Linux on aarch64"),
        (replace(_DEBIAN, distribution="fedora", has_apt=False), "is fedora without apt"),
        (replace(_DEBIAN, distribution="ubuntu"), "this distribution is ubuntu"),
        (replace(_DEBIAN, distribution=""), "this distribution is unknown"),
        (replace(_DEBIAN, has_apt=False), "this distribution is debian without apt"),
        (replace(_DEBIAN, implementation="pypy"), "is for CPython and this is pypy"),
        (replace(_DEBIAN, guest_memory_nbytes=64 << 20), "where 64 MiB are free and 1024 MiB"),
    ],
)
def test_other_machines_are_told_why_not(host: Host, words: str) -> None:
    assert words in (obstacle(host) or "")


def test_this_machine_is_described() -> None:
    host = this_host()
    assert host.system
    assert host.machine
    assert host.guest_memory_nbytes >= 0
