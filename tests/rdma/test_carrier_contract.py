"""The carrier contract on RDMA: the tests of the other carriers, unchanged."""

import pytest

from tests.kvproto.carrier_contract import watched
from tests.kvproto.conftest import run as run
from tests.kvproto.test_carrier_contract import *  # noqa: F403
from tests.rdma.rdma_rig import RdmaRig

pytestmark = pytest.mark.rdma


@pytest.fixture(params=[RdmaRig], ids=lambda rig: rig.name)
def contract(request, run):
    """Runs ``scenario(rig)`` with a fresh rig made with the given settings."""
    return lambda scenario, **settings: run(watched(request.param, scenario, **settings))
