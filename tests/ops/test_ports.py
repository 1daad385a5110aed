import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.ports import free_ports, plan_ports, refuse_busy_ports
from svckit.errors import ServiceError


def test_defaults() -> None:
    plan = plan_ports(8000, 7400, 2)
    assert (plan.http, plan.control) == (8000, 7400)
    assert plan.workers == (7401, 7402)
    assert plan.admins == (7411, 7412)


@given(st.integers(1, 128))
def test_no_port_is_used_twice(num_workers: int) -> None:
    plan = plan_ports(1, 7400, num_workers)
    assert len(plan.flags()) == 2 + 2 * num_workers
    assert set(plan.flags().values()) == {"--http-port", "--base-port"}


def test_numbers_that_run_out_are_refused() -> None:
    with pytest.raises(ServiceError, match=r"up to 65541.*--base-port"):
        plan_ports(8000, 65530, 1)


@pytest.mark.parametrize("http_port", [7400, 7401, 7411])
def test_http_port_among_the_others_is_refused(http_port: int) -> None:
    with pytest.raises(ServiceError, match=f"Port {http_port} of --http-port is also used"):
        plan_ports(http_port, 7400, 1)


def test_free_ports_are_distinct_and_open() -> None:
    plan = free_ports(2)
    assert len(plan.flags()) == 6
    refuse_busy_ports(plan, "127.0.0.1")


def test_busy_port_names_port_and_flag() -> None:
    plan = free_ports(1)
    with socket.create_server(("127.0.0.1", plan.http)):
        sentence = f"Port {plan.http} on 127.0.0.1 is already in use; .* --http-port"
        with pytest.raises(ServiceError, match=sentence):
            refuse_busy_ports(plan, "127.0.0.1")
    with socket.create_server(("127.0.0.1", plan.admins[0])):
        sentence = f"Port {plan.admins[0]} on 127.0.0.1 is already in use; .* --base-port"
        with pytest.raises(ServiceError, match=sentence):
            refuse_busy_ports(plan, "127.0.0.1")
