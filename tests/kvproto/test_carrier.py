"""The implementations have the signatures of the interfaces."""

import inspect

import pytest

from kvproto.carrier import KvWriter, Landing
from kvproto.lease import LeaseTable
from kvproto.tcp import TcpWriter


@pytest.mark.parametrize(
    ("interface", "implementation", "names"),
    [
        (Landing, LeaseTable, ["destination", "received", "landed", "abandoned", "placed"]),
        (KvWriter, TcpWriter, ["write", "flush"]),
    ],
)
def test_signatures_agree(interface, implementation, names):
    for name in names:
        wanted, found = getattr(interface, name), getattr(implementation, name)
        assert inspect.signature(wanted) == inspect.signature(found)
        assert inspect.iscoroutinefunction(wanted) == inspect.iscoroutinefunction(found)


def test_a_landing_has_its_geometry():
    assert isinstance(inspect.getattr_static(LeaseTable, "geometry"), property)
