from hypothesis import given
from hypothesis import strategies as st

from ops.restart_policy import RestartPolicy

POLICY = RestartPolicy(max_restarts=3, window_s=60, first_delay_s=0.5, max_delay_s=1.5)


def test_delay_doubles_up_to_the_cap_and_then_gives_up() -> None:
    deaths = [0.0, 1.0, 2.0, 3.0]
    delays = [POLICY.delay_s(deaths[:num], deaths[num - 1]) for num in (1, 2, 3, 4)]
    assert delays == [0.5, 1.0, 1.5, None]


def test_old_deaths_are_forgotten() -> None:
    assert POLICY.delay_s([0.0, 1.0, 2.0, 3.0, 100.0], 100.0) == 0.5


def test_no_restart_allowed() -> None:
    assert RestartPolicy(max_restarts=0).delay_s([1.0], 1.0) is None


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=50).map(sorted))
def test_delay_is_bounded(deaths: list[float]) -> None:
    delay_s = POLICY.delay_s(deaths, deaths[-1])
    assert delay_s is None or 0.5 <= delay_s <= 1.5
