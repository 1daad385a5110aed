import pytest

from svckit.metrics import NBYTES_BUCKETS, TIME_BUCKETS_S, Metrics


def test_names_carry_the_service_and_values_are_rendered() -> None:
    metrics = Metrics("decode")
    metrics.counter("requests", "Requests.", ["outcome"]).labels("stop").inc(2)
    metrics.gauge("running", "Running.").set(3)
    metrics.histogram("step_s", "Step time.").observe(0.003)
    text = metrics.render().decode()
    assert 'pd_decode_requests_total{outcome="stop"} 2.0' in text
    assert "pd_decode_running 3.0" in text
    assert 'pd_decode_step_s_bucket{le="0.005"} 1.0' in text
    assert 'pd_decode_step_s_bucket{le="0.0025"} 0.0' in text


def test_two_services_in_one_process_do_not_collide() -> None:
    first, second = Metrics("decode"), Metrics("decode")
    first.gauge("running", "Running.").set(1)
    second.gauge("running", "Running.").set(2)
    assert "pd_decode_running 1.0" in first.render().decode()


def test_the_same_name_twice_is_a_defect() -> None:
    metrics = Metrics("decode")
    metrics.gauge("running", "Running.")
    with pytest.raises(ValueError, match="Duplicated"):
        metrics.gauge("running", "Running.")


def test_process_metrics_are_there() -> None:
    assert "pd_decode_process_resident_memory_bytes" in Metrics("decode").render().decode()


@pytest.mark.parametrize("buckets", [TIME_BUCKETS_S, NBYTES_BUCKETS])
def test_buckets_rise(buckets: tuple[float, ...]) -> None:
    assert list(buckets) == sorted(set(buckets))
