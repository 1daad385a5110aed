"""Plans as data."""

import dataclasses

import pytest

from router_svc.sequence import SequenceEnd, SequencePlan


def test_total_tokens_and_immutability() -> None:
    plan = SequencePlan("s", (1, 2, 3), 4, 1.0, 1.0, 0, 0, (), ignore_eos=False)
    assert plan.num_total_tokens == 7
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.seed = 1  # type: ignore[misc]


def test_end_defaults() -> None:
    end = SequenceEnd("stop")
    assert (dict(end.timings), end.num_resumes) == ({}, 0)
