import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.exposition import generate_latest

import ops.diagnosis
from decode_svc.metrics import DecodeMetrics
from ops.diagnosis.exposition import parse_exposition
from prefill_svc.metrics import PrefillMetrics
from router_svc.metrics import RouterMetrics

TEXT = """\
# HELP pd_decode_refusals_total Refused.
# TYPE pd_decode_refusals_total counter
pd_decode_refusals_total{code="overloaded"} 3.0
pd_decode_refusals_total{code="lease"} 1.0
# TYPE pd_decode_handoff_failures_total counter
# TYPE pd_decode_free_blocks gauge
pd_decode_free_blocks NaN
# TYPE pd_decode_step_seconds histogram
pd_decode_step_seconds_bucket{le="+Inf"} 2.0
pd_decode_step_seconds_count 2.0
pd_decode_step_seconds_sum 0.5
"""


def test_values() -> None:
    metrics = parse_exposition(TEXT)
    assert metrics.total("pd_decode_refusals_total") == 4.0
    assert metrics.by_label("pd_decode_refusals_total", "code") == {"overloaded": 3.0, "lease": 1.0}
    assert metrics.total("pd_decode_step_seconds_sum") == 0.5


def test_what_is_not_there_is_not_zero() -> None:
    metrics = parse_exposition(TEXT)
    # A counter with labels that never counted has no sample, but its family is there.
    assert metrics.total("pd_decode_handoff_failures_total") == 0.0
    assert metrics.total("pd_decode_free_blocks") is None  # NaN
    assert metrics.total("pd_decode_nothing") is None
    assert metrics.total("pd_decode_nothing_total") is None
    assert metrics.by_label("pd_decode_nothing", "code") == {}


@pytest.mark.parametrize("text", ["<html>", "a b c d e", 'a{b="c" 1', "pd_x 1_2_3 x y\n", "{"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not Prometheus' text format"):
        parse_exposition(text)


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        metrics = parse_exposition(text)
    except ValueError:
        return
    values = [value for by_labels in metrics.samples.values() for value in by_labels.values()]
    assert all(math.isfinite(value) for value in values)


def test_all_metrics_that_the_doctor_names_exist() -> None:
    """A metric that is renamed would be "not seen" for ever."""
    texts = [
        generate_latest(registry).decode()
        for registry in (
            DecodeMetrics().registry,
            PrefillMetrics().registry,
            RouterMetrics().metrics.registry,
        )
    ]
    exposed = {
        line.split()[2] for text in texts for line in text.splitlines() if line.startswith("# TYPE")
    }
    folder = Path(ops.diagnosis.__file__).parent
    source = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    named = set(re.findall(r"\"((?:pd_(?:router|prefill|decode)|gen_ai)_[a-z_]+)\"", source))
    assert len(named) > 20
    missing = {
        name
        for name in named
        if name not in exposed and name.removesuffix("_sum").removesuffix("_count") not in exposed
    }
    assert missing == set()
