"""One sequence on its way through a decode worker, and the table of the states it can be in."""

from dataclasses import dataclass, field
from enum import Enum, auto

from decode_svc.handoff import Fetched, Handoff
from decode_svc.outbox import Outbox
from kvengine.sampler import SamplingParams
from kvproto.messages import Generate


class SequenceState(Enum):
    """Where a sequence is; see ``SEQUENCE_TRANSITIONS``."""

    WAITING = auto()  # holds no blocks
    FETCHING = auto()  # holds blocks that a prefill worker writes
    RUNNABLE = auto()  # takes part in the next step
    ENDED = auto()  # FINISHED was sent, the blocks are free


class SequenceEvent(Enum):
    """What moves a sequence on."""

    ADMITTED_REMOTE = auto()
    ADMITTED_LOCAL = auto()
    LANDED = auto()
    FETCH_ENDED = auto()  # without KV: failed, cancelled or preempted
    PREEMPTED = auto()
    ENDED = auto()


SEQUENCE_TRANSITIONS: dict[tuple[SequenceState, SequenceEvent], SequenceState] = {
    (SequenceState.WAITING, SequenceEvent.ADMITTED_REMOTE): SequenceState.FETCHING,
    (SequenceState.WAITING, SequenceEvent.ADMITTED_LOCAL): SequenceState.RUNNABLE,
    (SequenceState.FETCHING, SequenceEvent.LANDED): SequenceState.RUNNABLE,
    (SequenceState.FETCHING, SequenceEvent.FETCH_ENDED): SequenceState.WAITING,
    (SequenceState.RUNNABLE, SequenceEvent.PREEMPTED): SequenceState.WAITING,
    (SequenceState.RUNNABLE, SequenceEvent.ENDED): SequenceState.ENDED,
    (SequenceState.WAITING, SequenceEvent.ENDED): SequenceState.ENDED,
}


@dataclass(frozen=True, slots=True)
class End:
    """Why a sequence ends: ``reason`` is that of FINISHED; ``code`` 0 unless it is an error."""

    reason: str
    code: int = 0
    message: str = ""


@dataclass(slots=True)
class Sequence:
    """One token stream.

    ``tokens`` prompt and output so far; ``num_cached_tokens`` of them have their KV in the pool.
    The ``_at`` fields are instants of this host's monotonic clock. ``end`` is set by whoever
    decides that the sequence is over; the decode loop acts on it between two steps.
    """

    request: Generate
    outbox: Outbox
    arrived_at: float
    expires_at: float
    params: SamplingParams
    stop_token_ids: frozenset[int]
    tokens: list[int]
    state: SequenceState = SequenceState.WAITING
    block_table: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    handoff: Handoff | None = None
    end: End | None = None
    admitted_at: float = 0.0
    runnable_at: float = 0.0
    first_token_at: float = 0.0
    timings: dict[str, float | int | str] = field(default_factory=dict)

    @property
    def sequence_id(self) -> str:
        """The router's name for it."""
        return self.request.sequence_id

    @property
    def num_output_tokens(self) -> int:
        """Tokens beyond the prompt, those that an earlier worker made included."""
        return len(self.tokens) - self.request.num_prompt_tokens

    @property
    def is_admitted(self) -> bool:
        """True while the sequence holds blocks."""
        return self.state in (SequenceState.FETCHING, SequenceState.RUNNABLE)

    def advance(self, event: SequenceEvent) -> None:
        """Follow ``SEQUENCE_TRANSITIONS``; KeyError means a bug of ours."""
        self.state = SEQUENCE_TRANSITIONS[self.state, event]

    def finish(self, end: End) -> None:
        """Decide the end; the first decision stands."""
        if self.end is None:
            self.end = end
            if self.handoff is not None:
                self.handoff.cancel()

    def fail(self, code: int, message: str) -> None:
        """End with an error."""
        self.finish(End("error", code, message))

    def become_runnable(self, now: float) -> None:
        """The KV is there; after the first token the moment no longer counts for timings."""
        if not self.first_token_at:
            self.runnable_at = now

    def note_fetched(self, fetched: Fetched) -> None:
        """Keep the figures of the handoff for ``final_timings``; the last one counts."""
        self.timings.update(
            carrier=fetched.carrier,
            prefill_worker=fetched.writer,
            prefill_queue_s=fetched.prefill_queue_s,
            prefill_s=fetched.prefill_s,
            handoff_s=fetched.exposed_s,
            handoff_nbytes=fetched.nbytes,
        )
        if fetched.wire_error:
            self.timings["wire_error"] = fetched.wire_error

    def final_timings(self, now: float) -> dict[str, float | int | str]:
        """Where the time went: durations of single clocks, never a difference of two hosts'."""
        timings = dict(self.timings)
        timings["num_output_tokens"] = self.num_output_tokens
        timings["num_preemptions"] = self.num_preemptions
        if self.admitted_at:
            timings["decode_queue_s"] = self.admitted_at - self.arrived_at
        if self.first_token_at:
            timings["first_step_s"] = self.first_token_at - self.runnable_at
            timings["decode_s"] = now - self.first_token_at
        return timings
