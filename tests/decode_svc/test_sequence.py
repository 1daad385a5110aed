"""The table of a sequence's states, and how a sequence ends."""

from itertools import product
from typing import Any, cast

import pytest

from decode_svc.handoff import Fetched, Handoff
from decode_svc.sequence import (
    SEQUENCE_TRANSITIONS,
    End,
    Sequence,
    SequenceEvent,
    SequenceState,
)
from kvengine.sampler import SamplingParams
from tests.decode_svc.conftest import make_generate


def _sequence(**fields: Any) -> Sequence:
    request = make_generate("s", [1, 2, 3], [])
    defaults: dict[str, Any] = {
        "outbox": cast("Any", None),
        "arrived_at": 10.0,
        "expires_at": 20.0,
        "params": SamplingParams(),
        "stop_token_ids": frozenset(),
        "tokens": [1, 2, 3],
    }
    return Sequence(request, **{**defaults, **fields})


def test_every_pair_of_state_and_event_is_decided() -> None:
    for state, event in product(SequenceState, SequenceEvent):
        sequence = _sequence(state=state)
        target = SEQUENCE_TRANSITIONS.get((state, event))
        if target is None:
            with pytest.raises(KeyError):
                sequence.advance(event)
            assert sequence.state is state
        else:
            sequence.advance(event)
            assert sequence.state is target


def test_nothing_leaves_ended_and_everything_reaches_it() -> None:
    assert all(state is not SequenceState.ENDED for state, _ in SEQUENCE_TRANSITIONS)
    reachable = {SequenceState.WAITING}
    for _ in SequenceState:
        reachable |= {to for (state, _), to in SEQUENCE_TRANSITIONS.items() if state in reachable}
    assert reachable == set(SequenceState)


def test_the_first_decision_about_the_end_stands_and_stops_the_handoff() -> None:
    sequence = _sequence(handoff=Handoff("s", [1, 2], [0], [], expires_at=20.0))
    sequence.finish(End("stop"))
    sequence.fail(9, "too late")
    assert sequence.end == End("stop")
    assert sequence.handoff is not None
    assert sequence.handoff.is_cancelled


def test_timings_are_durations_and_leave_out_what_never_happened() -> None:
    sequence = _sequence()
    assert sequence.final_timings(15.0) == {"num_output_tokens": 0, "num_preemptions": 0}
    sequence.note_fetched(Fetched("p", "tcp", 4096, 0.25, 0.5, total_s=1.0))
    sequence.admitted_at, sequence.runnable_at, sequence.first_token_at = 11.0, 12.5, 13.0
    sequence.tokens.append(4)
    assert sequence.final_timings(15.0) == {
        "carrier": "tcp",
        "prefill_worker": "p",
        "prefill_queue_s": 0.25,
        "prefill_s": 0.5,
        "handoff_s": 0.25,
        "handoff_nbytes": 4096,
        "num_output_tokens": 1,
        "num_preemptions": 0,
        "decode_queue_s": 1.0,
        "first_step_s": 0.5,
        "decode_s": 2.0,
    }
