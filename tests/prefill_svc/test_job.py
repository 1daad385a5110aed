"""The table of a prompt's states, and when its blocks are freed."""

from itertools import product
from typing import Any, cast

import pytest

from kvproto.geometry import KvGeometry
from kvproto.messages import Prefill
from prefill_svc.job import JOB_TRANSITIONS, Job, JobEvent, JobState

_GEOMETRY = KvGeometry.uniform(
    num_layers=2, num_kv_heads=1, head_dim=4, dtype="float32", layer_names=("0", "1")
)


def _job(released: list[Job], state: JobState = JobState.WAITING) -> Job:
    return Job(
        request=Prefill("s", 1, tokens=[1, 2, 3], timeout_s=1.0),
        peer=cast("Any", None),
        arrived_at=0.0,
        expires_at=1.0,
        transfer=cast("Any", None),
        on_release=released.append,
        state=state,
    )


def test_every_pair_of_state_and_event_is_decided() -> None:
    for state, event in product(JobState, JobEvent):
        job = _job([], state)
        target = JOB_TRANSITIONS.get((state, event))
        if target is None:
            with pytest.raises(KeyError):
                job.advance(event)
        else:
            job.advance(event)
            assert job.state is target


def test_every_state_can_be_given_up_and_the_end_is_final() -> None:
    for state in JobState:
        assert (state, JobEvent.GIVEN_UP) in JOB_TRANSITIONS
    for state in (JobState.DONE, JobState.ABORTED):
        targets = {to for (source, _), to in JOB_TRANSITIONS.items() if source is state}
        assert targets == {state}


def test_blocks_are_freed_once_and_only_when_nobody_holds_them() -> None:
    released: list[Job] = []
    job = _job(released)
    job.hold()
    job.hold()
    job.advance(JobEvent.GIVEN_UP)
    job.release_if_idle()
    job.drop()
    assert released == []
    job.drop()
    assert released == [job]
    job.release_if_idle()
    assert released == [job]


def test_a_job_in_work_is_never_released() -> None:
    released: list[Job] = []
    job = _job(released)
    job.hold()
    job.drop()
    assert released == []
