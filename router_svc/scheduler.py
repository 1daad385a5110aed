"""Who serves a sequence. Pure: a snapshot of the workers goes in, a decision comes out."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

MAX_RANKED_PREFILL_WORKERS: Final = 16


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as the router sees it at one instant.

    `num_running`, `num_waiting`, `num_waiting_tokens` and `num_free_blocks` are from the
    worker's last RENEW. `num_assigned` and `num_assigned_tokens` are the router's own books:
    sequences it has there now, and tokens it sent there since that RENEW. `age_s` is the time
    since the last sign of life. `is_offered` is false until the router could reach it.
    """

    instance_id: str
    role: str
    host: str
    port: int
    max_model_len: int
    num_blocks: int
    block_size: int
    num_free_blocks: int
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_assigned: int = 0
    num_assigned_tokens: int = 0
    is_draining: bool = False
    is_offered: bool = True
    age_s: float = 0.0

    @property
    def max_sequence_tokens(self) -> int:
        """The longest sequence, prompt and output together, that fits its context and pool."""
        return min(self.max_model_len, self.num_blocks * self.block_size)

    @property
    def num_sequences(self) -> int:
        """Load in sequences: the worker's count lags one RENEW, the router's misses others'."""
        return max(self.num_running + self.num_waiting, self.num_assigned)


def choose_decode(
    workers: Sequence[WorkerView],
    num_sequence_tokens: int,
    *,
    excluded_ids: Collection[str] = (),
) -> WorkerView | None:
    """Return the least loaded decode worker that can hold `num_sequence_tokens`.

    Skips workers that are draining, not offered, excluded, or too small. Prefers one with
    enough free blocks now, then fewer sequences, then more free tokens; equal ones by id. None
    if no worker is left.
    """
    candidates = [
        worker
        for worker in workers
        if worker.role == "decode"
        and _is_available(worker)
        and worker.instance_id not in excluded_ids
        and worker.max_sequence_tokens >= num_sequence_tokens
    ]
    if not candidates:
        return None

    def order(worker: WorkerView) -> tuple[bool, int, int, str]:
        num_free_tokens = worker.num_free_blocks * worker.block_size
        must_wait = num_free_tokens < num_sequence_tokens
        return must_wait, worker.num_sequences, -num_free_tokens, worker.instance_id

    return min(candidates, key=order)


def rank_prefill(
    workers: Sequence[WorkerView],
    num_prompt_tokens: int,
    *,
    max_workers: int = MAX_RANKED_PREFILL_WORKERS,
) -> tuple[WorkerView, ...]:
    """Return the prefill workers that can take the prompt, best first, at most `max_workers`.

    Prefill time follows tokens, so the fewest tokens ahead come first, then fewer sequences;
    equal ones by id. Skips workers that are draining, not offered or too small.
    """
    candidates = [
        worker
        for worker in workers
        if worker.role == "prefill"
        and _is_available(worker)
        and worker.max_model_len >= num_prompt_tokens
    ]

    def order(worker: WorkerView) -> tuple[int, int, str]:
        num_tokens_ahead = worker.num_waiting_tokens + worker.num_assigned_tokens
        return num_tokens_ahead, worker.num_running + worker.num_waiting, worker.instance_id

    return tuple(sorted(candidates, key=order)[:max_workers])


def longest_sequence_tokens(workers: Sequence[WorkerView], max_model_len: int) -> int:
    """Return the longest sequence that can be served: the model's limit, or the workers'.

    Without a decode worker the model's limit alone counts. Draining workers count too: the
    limit that clients see should not move when one of several is restarted.
    """
    sizes = [worker.max_sequence_tokens for worker in workers if worker.role == "decode"]
    return min(max_model_len, max(sizes)) if sizes else max_model_len


def _is_available(worker: WorkerView) -> bool:
    return worker.is_offered and not worker.is_draining
