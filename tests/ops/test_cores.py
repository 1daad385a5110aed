import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.cores import cpu_list, divide_cores, place_in_sysfs


def flat(cpu: int) -> tuple[int, int]:
    return (0, cpu)


@given(cpus=st.frozensets(st.integers(0, 255), min_size=1, max_size=40), workers=st.integers(1, 9))
def test_each_cpu_once_and_as_evenly_as_possible(cpus: frozenset[int], workers: int) -> None:
    shares = divide_cores(sorted(cpus), workers, flat)
    assert len(shares) == workers
    assert all(shares)
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    if len(cpus) >= workers:
        assert sorted(cpu for share in shares for cpu in share) == sorted(cpus)
    else:
        assert {cpu for share in shares for cpu in share} == cpus


def test_hardware_threads_of_a_core_stay_together() -> None:
    # 4 cores, CPU i and i + 4 are one core, as Linux numbers them.
    shares = divide_cores(range(8), 2, lambda cpu: (0, cpu % 4))
    assert shares == [(0, 1, 4, 5), (2, 3, 6, 7)]


def test_packages_stay_together() -> None:
    assert divide_cores(range(4), 2, lambda cpu: (cpu % 2, cpu)) == [(0, 2), (1, 3)]


def test_earlier_workers_get_the_remainder() -> None:
    assert divide_cores([0, 1, 2], 2, flat) == [(0, 1), (2,)]


def test_cpu_list() -> None:
    assert cpu_list((0, 2, 3)) == "0,2,3"


def test_a_cpu_the_kernel_does_not_know_is_its_own_core() -> None:
    assert place_in_sysfs(999_999) == (0, 999_999)


@pytest.mark.parametrize("workers", [1, 2])
def test_one_cpu_is_shared(workers: int) -> None:
    assert divide_cores([5], workers, flat) == [(5,)] * workers
