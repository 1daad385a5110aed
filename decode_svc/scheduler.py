"""Which sequences run the next decode step, who is admitted, who gives way: a pure function.

Continuous batching: sequences join and leave between steps. Blocks are taken as a sequence grows.
When the pool is empty the youngest sequence gives its blocks back and is computed again later from
its tokens (preemption by recompute); the oldest is never preempted, so the system always advances.

No clock, no randomness, no I/O: the service and a simulator call the same function.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One sequence, in order of arrival.

    ``num_tokens`` tokens known so far (prompt and output): the next step writes the KV of the last
    one, so the sequence needs blocks for all of them. ``num_blocks`` blocks it holds;
    ``is_admitted`` it holds blocks or is fetching its KV; ``is_runnable`` its KV is complete up to
    the last token.
    """

    sequence_id: str
    num_tokens: int
    num_blocks: int
    is_admitted: bool
    is_runnable: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The decision, applied in this order: preempt, grow and run, admit.

    ``grow`` lists the sequences of ``run`` that need one more block. A sequence that would need a
    block which a preempted one has yet to give back is left out of ``run`` for this step.
    """

    preempt: tuple[str, ...]
    run: tuple[str, ...]
    grow: tuple[str, ...]
    admit: tuple[str, ...]


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold ``num_tokens`` tokens."""
    return -(-num_tokens // block_size)


def plan_step(
    sequences: Sequence[SequenceView],
    *,
    block_size: int,
    num_free_blocks: int,
    max_num_seqs: int,
) -> StepPlan:
    """Choose the next step; ``sequences`` oldest first.

    A block given back by a preempted sequence that is still being written by a prefill worker
    returns only later; therefore blocks count as free within this plan only when their owner is
    runnable (nobody else writes them).
    """
    admitted = [s for s in sequences if s.is_admitted]
    preempt, num_free_blocks = _make_room(admitted, block_size, num_free_blocks)
    run: list[str] = []
    grow: list[str] = []
    for sequence in admitted:
        if sequence.sequence_id in preempt or not sequence.is_runnable:
            continue
        if _needs_block(sequence, block_size):
            if num_free_blocks == 0:
                continue
            num_free_blocks -= 1
            grow.append(sequence.sequence_id)
        run.append(sequence.sequence_id)
    admit: list[str] = []
    if not preempt:
        admit = _admit(sequences, block_size, num_free_blocks, max_num_seqs)
    return StepPlan(tuple(preempt), tuple(run), tuple(grow), tuple(admit))


def _needs_block(sequence: SequenceView, block_size: int) -> bool:
    return num_blocks_for(sequence.num_tokens, block_size) > sequence.num_blocks


def _make_room(
    admitted: Sequence[SequenceView], block_size: int, num_free_blocks: int
) -> tuple[list[str], int]:
    """Preempt from the youngest until every older runnable sequence can grow."""
    survivors = list(admitted)
    preempt: list[str] = []
    while len(survivors) > 1:
        num_wanted = sum(s.is_runnable and _needs_block(s, block_size) for s in survivors)
        if num_wanted <= num_free_blocks:
            break
        victim = survivors.pop()
        preempt.append(victim.sequence_id)
        if victim.is_runnable:
            num_free_blocks += victim.num_blocks
        else:
            # Its blocks come back when the prefill worker has stopped writing; until then the
            # sequences that wait for them sit out, and nobody else is preempted for their sake.
            break
    return preempt, num_free_blocks


def _admit(
    sequences: Sequence[SequenceView], block_size: int, num_free_blocks: int, max_num_seqs: int
) -> list[str]:
    """First come, first served; one block of head-room for each sequence already in.

    Without the head-room a newcomer would take the blocks the running ones need a few steps later
    and be preempted at once.
    """
    num_admitted = sum(s.is_admitted for s in sequences)
    admit: list[str] = []
    for sequence in sequences:
        if sequence.is_admitted:
            continue
        num_needed = num_blocks_for(sequence.num_tokens, block_size)
        head_room = num_admitted
        if num_admitted >= max_num_seqs or num_needed + head_room > num_free_blocks:
            break
        num_free_blocks -= num_needed
        num_admitted += 1
        admit.append(sequence.sequence_id)
    return admit
