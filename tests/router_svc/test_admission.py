"""The bound on requests in flight."""

import asyncio

import pytest

from router_svc.admission import Admission
from router_svc.errors import OverloadedError


async def test_bound_and_idle() -> None:
    admission = Admission(2)
    await admission.wait_idle()
    with admission.slot(), admission.slot():
        assert admission.num_in_flight == 2
        with pytest.raises(OverloadedError, match="max_requests"), admission.slot():
            pytest.fail("one too many was admitted")
        waiting = asyncio.create_task(admission.wait_idle())
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting
    assert admission.num_in_flight == 0


async def test_failed_request_gives_its_place_back() -> None:
    admission = Admission(1)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), admission.slot():
            raise ZeroDivisionError
    await admission.wait_idle()
