"""What is generated: one token stream, from one prompt. Pure data."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

# Takes output tokens as they arrive; returns False when no more are wanted.
EmitTokens = Callable[[Sequence[int]], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """Everything a decode worker needs, so that the stream can be continued anywhere.

    `sequence_id` is unique and made by the router. The sampler depends only on `seed` and the
    position, so another worker given prompt and emitted tokens continues exactly.
    """

    sequence_id: str
    prompt_token_ids: tuple[int, ...]
    max_output_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool

    @property
    def num_total_tokens(self) -> int:
        """Tokens of the finished sequence at most, prompt and output."""
        return len(self.prompt_token_ids) + self.max_output_tokens


@dataclass(frozen=True, slots=True)
class SequenceEnd:
    """How a sequence ended well: `reason` is "stop" or "length".

    `timings` are those of the decode worker that finished it, empty if the router ended it.
    """

    reason: str
    timings: Mapping[str, float | int | str] = field(default_factory=dict)
    num_resumes: int = 0
