"""One choice of an answer: output tokens in, text pieces and times out. No I/O.

The router's clock is handed in as instants, so every time here is a difference of two of them.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from router_svc.detokenizer import Detokenizer
from router_svc.sequence import SequenceEnd
from router_svc.stop_strings import StopStringMatcher


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to choice `index`; `finish_reason` is set on the last one."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    is_first: bool
    finish_reason: str | None = None


class ChoiceStream:
    """Detokenizes one sequence, finds its end, and times its tokens.

    `hidden_token_ids` end the text without being part of it. `arrived_at` is when the request
    came in, on the clock of `push`.
    """

    def __init__(
        self,
        index: int,
        detokenize: Callable[[Sequence[int]], str],
        *,
        stop: Sequence[str],
        hidden_token_ids: Sequence[int],
        arrived_at: float,
    ) -> None:
        self.index = index
        self.text = ""
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.timings: dict[str, Any] = {}
        self._detokenizer = Detokenizer(detokenize)
        self._stop = StopStringMatcher(stop)
        self._hidden_token_ids = frozenset(hidden_token_ids)
        self._arrived_at = arrived_at
        self._token_times: list[float] = []
        self._num_shown_token_ids = 0

    @property
    def is_matched(self) -> bool:
        """Whether a stop string was found; tokens after it are not wanted."""
        return self._stop.is_matched

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token, None before it."""
        return self._token_times[0] - self._arrived_at if self._token_times else None

    @property
    def itls_s(self) -> list[float]:
        """One gap per pair of neighbouring tokens."""
        times = self._token_times
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    @property
    def tpot_s(self) -> float | None:
        """Mean gap; None for fewer than two tokens, where it is undefined."""
        times = self._token_times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def e2e_s(self) -> float | None:
        """Time to the last token, None before the first."""
        return self._token_times[-1] - self._arrived_at if self._token_times else None

    def push(self, token_ids: Sequence[int], now: float) -> Delta:
        """Take tokens that arrived at `now`; those after a stop string are dropped."""
        pieces: list[str] = []
        # One by one, so that the end does not depend on how the worker batched its tokens.
        for token_id in token_ids:
            if self._stop.is_matched:
                break
            self.token_ids.append(token_id)
            self._token_times.append(now)
            if token_id not in self._hidden_token_ids:
                pieces.append(self._stop.push(self._detokenizer.push((token_id,))))
        return self._delta("".join(pieces))

    def finish(self, end: SequenceEnd) -> Delta:
        """End the choice: what was held back is shown now, unless a stop string was found."""
        text = ""
        if not self._stop.is_matched:
            text = self._stop.push(self._detokenizer.flush())
        if not self._stop.is_matched:
            text += self._stop.flush()
        self.finish_reason = "stop" if self._stop.is_matched else end.reason
        self.timings = self._make_timings(end)
        return self._delta(text)

    def _delta(self, text: str) -> Delta:
        is_first = self._num_shown_token_ids == 0
        token_ids = tuple(self.token_ids[self._num_shown_token_ids :])
        self._num_shown_token_ids = len(self.token_ids)
        self.text += text
        return Delta(self.index, text, token_ids, is_first, self.finish_reason)

    def _make_timings(self, end: SequenceEnd) -> dict[str, Any]:
        """Return the worker's timings and the router's own, JSON-ready."""
        own: Mapping[str, Any] = {
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            "e2e_s": self.e2e_s,
            "itl_s": _summary(self.itls_s),
            "num_output_tokens": len(self.token_ids),
            "num_resumes": end.num_resumes,
        }
        return {**end.timings, **own}


def _summary(samples: list[float]) -> dict[str, float | int] | None:
    """Return count, mean, nearest-rank p50 and p99, and maximum; None without samples."""
    if not samples:
        return None
    ordered = sorted(samples)

    def rank(fraction: float) -> float:
        # Nearest rank: the smallest sample that at least `fraction` of them do not exceed.
        return ordered[math.ceil(fraction * len(ordered)) - 1]

    return {
        "num": len(ordered),
        "mean": fmean(ordered),
        "p50": rank(0.50),
        "p99": rank(0.99),
        "max": ordered[-1],
    }
