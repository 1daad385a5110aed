"""One prompt on its way through a prefill worker, and the table of the states it can be in."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from kvproto.errors import ErrorCode
from kvproto.messages import Prefill
from kvproto.tcp_link import Link
from prefill_svc.transfer import Transfer


class JobState(Enum):
    """Where a prompt is; see ``JOB_TRANSITIONS``."""

    WAITING = auto()  # no blocks yet
    COMPUTING = auto()  # has blocks; some tokens are left to compute
    PUSHING = auto()  # everything is computed, the last layers are on their way
    COMMITTED = auto()  # COMMIT was sent, the acknowledgement is awaited
    DONE = auto()  # acknowledged: blocks may be freed
    ABORTED = auto()  # given up by either side: blocks may be freed once nothing reads them


class JobEvent(Enum):
    """What moves a prompt on."""

    ADMITTED = auto()
    COMPUTED = auto()
    COMMIT_SENT = auto()
    ACKNOWLEDGED = auto()
    GIVEN_UP = auto()


JOB_TRANSITIONS: dict[tuple[JobState, JobEvent], JobState] = {
    (JobState.WAITING, JobEvent.ADMITTED): JobState.COMPUTING,
    (JobState.COMPUTING, JobEvent.COMPUTED): JobState.PUSHING,
    (JobState.PUSHING, JobEvent.COMMIT_SENT): JobState.COMMITTED,
    (JobState.COMMITTED, JobEvent.ACKNOWLEDGED): JobState.DONE,
    (JobState.WAITING, JobEvent.GIVEN_UP): JobState.ABORTED,
    (JobState.COMPUTING, JobEvent.GIVEN_UP): JobState.ABORTED,
    (JobState.PUSHING, JobEvent.GIVEN_UP): JobState.ABORTED,
    (JobState.COMMITTED, JobEvent.GIVEN_UP): JobState.ABORTED,
    # Giving up twice, or after the end, changes nothing: terminal messages are idempotent.
    (JobState.ABORTED, JobEvent.GIVEN_UP): JobState.ABORTED,
    (JobState.DONE, JobEvent.GIVEN_UP): JobState.DONE,
}


@dataclass(slots=True)
class Job:
    """One PREFILL request.

    ``peer`` is the decode worker that asked and receives the KV; the ``_at`` fields are instants of
    this host's monotonic clock. The blocks are freed (``on_release``) when the state is terminal
    *and* nobody reads them any more: the step that computes and every queued write hold the job.
    """

    request: Prefill
    peer: Link
    arrived_at: float
    expires_at: float
    transfer: Transfer
    on_release: Callable[["Job"], None]
    state: JobState = JobState.WAITING
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    started_at: float = 0.0
    computed_at: float = 0.0
    first_write_at: float = 0.0
    give_up_code: ErrorCode = ErrorCode.INTERNAL
    give_up_reason: str = ""
    is_cancelled_by_peer: bool = False
    beat_at: float = 0.0
    has_beat_queued: bool = False
    _num_holds: int = 0
    _is_released: bool = False

    @property
    def key(self) -> tuple[str, int]:
        """Sequence and generation: together they name one handoff."""
        return (self.request.sequence_id, self.request.generation)

    @property
    def unique_id(self) -> str:
        """Unique in the worker: two decode workers may number their generations alike."""
        return f"{self.peer.name}/{self.request.sequence_id}/{self.request.generation}"

    @property
    def num_tokens(self) -> int:
        """Tokens to prefill."""
        return len(self.request.tokens)

    def is_beat_due(self, now: float) -> bool:
        """The asker wants to hear now that the prompt still waits for its first step."""
        return (
            self.request.heartbeat_s > 0
            and not self.started_at
            and not self.is_over
            and not self.has_beat_queued
            and now - max(self.beat_at, self.arrived_at) >= self.request.heartbeat_s
        )

    def advance(self, event: JobEvent) -> None:
        """Follow ``JOB_TRANSITIONS``; KeyError means a bug of ours."""
        self.state = JOB_TRANSITIONS[self.state, event]

    @property
    def is_over(self) -> bool:
        """True once no more work is done for the prompt."""
        return self.state in (JobState.DONE, JobState.ABORTED)

    def hold(self) -> None:
        """Somebody starts to read or write the job's blocks."""
        self._num_holds += 1

    def drop(self) -> None:
        """That somebody is done."""
        self._num_holds -= 1
        self.release_if_idle()

    def release_if_idle(self) -> None:
        """Free the blocks, once, when the job is over and nobody holds them."""
        if self.is_over and not self._num_holds and not self._is_released:
            self._is_released = True
            self.on_release(self)
