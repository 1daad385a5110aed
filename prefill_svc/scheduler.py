"""Which prompts share the next prefill step, and how many tokens of each: a pure function.

Two wishes pull apart: the oldest prompt must never starve, and short prompts must not wait for
the whole of a long one. Half of the token budget is the oldest prompt's by right; the other half
goes to the prompts with the fewest tokens left, and whatever they leave over returns to the oldest.
Every prompt that has been started gets at least a little, because its decode worker takes silence
for a stall.
A prompt is admitted only when the pool can hold all of it, so a started prompt always finishes.

No clock, no randomness, no I/O: the service and a simulator call the same function.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptView:
    """What the scheduler needs to know about one prompt, in order of arrival.

    ``num_tokens`` prompt tokens to prefill, of which ``num_computed_tokens`` are done;
    ``num_needed_blocks`` blocks still to be allocated (0 once admitted);
    ``is_stalled`` when the decode worker reads too slowly to be sent more.
    """

    sequence_id: str
    num_tokens: int
    num_computed_tokens: int
    num_needed_blocks: int
    is_stalled: bool = False

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens not yet computed."""
        return self.num_tokens - self.num_computed_tokens


@dataclass(frozen=True, slots=True)
class Chunk:
    """``num_tokens`` tokens of one prompt, to be computed in this step."""

    sequence_id: str
    first_token: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The decision: prompts to give blocks to, then the chunks of the step, oldest first."""

    admit: tuple[str, ...]
    chunks: tuple[Chunk, ...]


def plan_step(
    prompts: Sequence[PromptView],
    *,
    max_step_tokens: int,
    max_step_prompts: int,
    num_free_blocks: int,
) -> StepPlan:
    """Choose the next step.

    ``prompts`` oldest first, every one with at least one token left. Admission is in order of
    arrival and stops at the first prompt that does not fit, so that a long prompt cannot be
    overtaken for ever. The sum of all chunks is at most ``max_step_tokens``.
    """
    admit: list[str] = []
    candidates: list[PromptView] = []
    for prompt in prompts:
        if prompt.num_needed_blocks > num_free_blocks:
            break
        num_free_blocks -= prompt.num_needed_blocks
        if prompt.num_needed_blocks:
            admit.append(prompt.sequence_id)
        if not prompt.is_stalled:
            candidates.append(prompt)
        if len(candidates) == max_step_prompts:
            break
    if not candidates:
        return StepPlan(tuple(admit), ())
    shares = _share(candidates, max_step_tokens)
    chunks = tuple(
        Chunk(prompt.sequence_id, prompt.num_computed_tokens, shares[prompt.sequence_id])
        for prompt in candidates
        if shares[prompt.sequence_id]
    )
    return StepPlan(tuple(admit), chunks)


def _share(candidates: Sequence[PromptView], max_step_tokens: int) -> dict[str, int]:
    """Tokens per prompt: see the module text for the rule."""
    oldest = candidates[0]
    by_right = min(oldest.num_remaining_tokens, max(1, max_step_tokens // 2))
    shares = {prompt.sequence_id: 0 for prompt in candidates}
    shares[oldest.sequence_id] = by_right
    left = max_step_tokens - by_right
    floor = max(1, max_step_tokens // (4 * len(candidates)))
    for prompt in candidates[1:]:
        if prompt.num_computed_tokens:
            given = min(prompt.num_remaining_tokens, floor, left)
            shares[prompt.sequence_id] = given
            left -= given
    # sorted() is stable: among equals the older prompt comes first.
    for prompt in sorted(candidates[1:], key=lambda p: p.num_remaining_tokens):
        given = min(prompt.num_remaining_tokens - shares[prompt.sequence_id], left)
        shares[prompt.sequence_id] += given
        left -= given
    shares[oldest.sequence_id] += min(left, oldest.num_remaining_tokens - by_right)
    return shares
