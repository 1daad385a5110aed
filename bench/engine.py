"""Our engine against plain transformers, in one process, on the same threads.

Both run the same float32 weights. Single steps of the two alternate, so that whatever else the
machine does falls on both, and each is summed up by its median. The reference is what `generate`
does at each step: a DynamicCache, sdpa attention, logits for the last token only. With rows of
equal length it gets no attention mask, which is in its favour; prompts of mixed lengths it has to
pad.
Our prefill is what a prefill worker runs: it makes KV and no logits.

    python bench/engine.py --model DIR --threads 2
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from kvengine.engine import Engine
from kvengine.forward_batch import Span
from kvengine.sampler import SamplingParams, sample

# The largest prefill that is timed, prompts times tokens: beyond it one pass takes half a minute.
MAX_PREFILL_ROWS = 4096


class Reference:
    """Plain transformers, as `generate` drives it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        parameters = inspect.signature(inspect.unwrap(model.forward)).parameters
        # Renamed in transformers 5.2x; both mean the same cache object.
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"

    def step(
        self, tokens: torch.Tensor, cache: DynamicCache, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the tokens [batch, length]; return the greedy next token of each row."""
        inputs: dict[str, Any] = {self.cache_name: cache, "attention_mask": mask}
        logits = self.model(tokens, use_cache=True, logits_to_keep=1, **inputs).logits
        return logits[:, -1].argmax(-1)


class Ours:
    """Our engine with blocks laid out for a number of equally long sequences."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def step(self, rows: list[list[int]], num_cached_tokens: int, num_tokens: int) -> list[int]:
        """Run the rows, each of a sequence of at most num_tokens; return their greedy tokens."""
        block_size = self.engine.kv_pool.layout.block_size
        num_blocks = -(-num_tokens // block_size)
        spans = [
            Span(row, num_cached_tokens, range(index * num_blocks, (index + 1) * num_blocks))
            for index, row in enumerate(rows)
        ]
        logits = self.engine.forward(spans)
        return sample(logits, [SamplingParams()] * len(rows), [0] * len(rows))

    def prefill(self, rows: list[list[int]]) -> None:
        """Compute the KV of fresh prompts of any lengths together."""
        block_size = self.engine.kv_pool.layout.block_size
        spans, begin = [], 0
        for row in rows:
            end = begin - (-len(row) // block_size)
            spans.append(Span(row, 0, range(begin, end), needs_logits=False))
            begin = end
        self.engine.forward(spans)


def pool_nbytes(model_dir: Path, num_tokens: int) -> int:
    config = AutoConfig.from_pretrained(model_dir).get_text_config()
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    token_elements = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    return num_tokens * token_elements * torch.float32.itemsize


def timed(function: Callable[[], object]) -> float:
    begin_at = time.perf_counter()
    function()
    return time.perf_counter() - begin_at


def alternate(
    ours: Callable[[int], object], reference: Callable[[int], object], num_steps: int
) -> tuple[list[float], list[float]]:
    """Time `num_steps` of each in turn, the first going first every other time."""
    our_s: list[float] = []
    reference_s: list[float] = []
    for index in range(num_steps):
        pair = [(our_s, ours), (reference_s, reference)]
        for times, function in pair if index % 2 == 0 else reversed(pair):
            times.append(timed(lambda f=function, i=index: f(i)))  # type: ignore[misc]
    return our_s, reference_s


def prompt(row: int, num_tokens: int, vocab_size: int) -> list[int]:
    return [(7919 * row + 104_729 * column + 17) % vocab_size for column in range(num_tokens)]


def bench_decode(
    ours: Ours, reference: Reference, batch: int, context: int, num_steps: int
) -> tuple[list[float], list[float]]:
    vocab_size = ours.engine.facts.vocab_size
    rows = [prompt(row, context, vocab_size) for row in range(batch)]
    num_tokens = context + num_steps + 2
    cache = DynamicCache(config=reference.model.config)
    first = ours.step(rows, 0, num_tokens)
    theirs = reference.step(torch.tensor(rows), cache)
    agree = first == theirs.tolist()
    state: dict[str, Any] = {"ours": first, "theirs": theirs}

    def our_step(index: int) -> None:
        state["ours"] = ours.step([[t] for t in state["ours"]], context + index, num_tokens)

    def reference_step(_: int) -> None:
        state["theirs"] = reference.step(state["theirs"].unsqueeze(1), cache)

    times = alternate(our_step, reference_step, num_steps)
    if not agree or state["ours"] != state["theirs"].tolist():
        sys.stdout.write(f"note: greedy tokens of the two differ at batch {batch}\n")
    return times


def bench_prefill(
    ours: Ours, reference: Reference, lengths: list[int], num_steps: int
) -> tuple[list[float], list[float]]:
    vocab_size = ours.engine.facts.vocab_size
    rows = [prompt(row, length, vocab_size) for row, length in enumerate(lengths)]
    longest = max(lengths)
    # On the left, as generate pads: the last column is every row's last token.
    padded = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = None
    if min(lengths) < longest:
        mask = (torch.arange(longest) >= longest - torch.tensor(lengths).unsqueeze(1)).long()
    ours.prefill(rows)
    return alternate(
        lambda _: ours.prefill(rows),
        lambda _: reference.step(padded, DynamicCache(config=reference.model.config), mask),
        num_steps,
    )


def mixed_lengths(batch: int, longest: int) -> list[int]:
    """Log-uniform from a sixteenth of ``longest`` to ``longest``, evenly spread, in mixed order."""
    ratio = [16 ** (-index / max(1, batch - 1)) for index in range(batch)]
    lengths = [max(1, round(longest * part)) for part in ratio]
    return lengths[::2] + lengths[1::2]


def report(
    kind: str,
    batch: int,
    num_tokens: int,
    num_counted_tokens: int,
    times: tuple[list[float], list[float]],
) -> dict[str, Any]:
    rate = num_counted_tokens
    ours_s, reference_s = (statistics.median(part) for part in times)
    result = {
        "kind": kind,
        "batch": batch,
        "context_tokens" if kind == "decode" else "prompt_tokens": num_tokens,
        "ours_tokens_per_s": rate / ours_s,
        "transformers_tokens_per_s": rate / reference_s,
        "ratio": reference_s / ours_s,
        "ratio_of_best": min(times[1]) / min(times[0]),
    }
    print(
        f"{kind:13s} batch {batch:3d} x {num_tokens:5d} tokens: "
        f"ours {result['ours_tokens_per_s']:8.1f} tok/s   "
        f"transformers {result['transformers_tokens_per_s']:8.1f} tok/s   "
        f"ratio {result['ratio']:.2f} (best against best {result['ratio_of_best']:.2f})",
        flush=True,
    )
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="transformers model folder")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--context", type=int, default=64, help="tokens before the decode steps")
    parser.add_argument(
        "--prompt-tokens", type=int, nargs="+", default=[64, 512], help="tokens per prompt"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--row-copies",
        choices=["auto", "yes", "no"],
        default="auto",
        help="second layout of some weights for single rows, as a decode worker's --row-copies",
    )
    parser.add_argument("--decode-steps", type=int, default=24)
    parser.add_argument("--prefill-steps", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()

    engine = Engine.load(
        options.model,
        num_threads=options.threads,
        has_row_copies={"auto": None, "yes": True, "no": False}[options.row_copies],
        kv_pool_nbytes=pool_nbytes(
            options.model,
            max(
                max(options.batches) * (options.context + options.decode_steps + 18),
                max(options.prompt_tokens) + MAX_PREFILL_ROWS,
            ),
        ),
    )
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.float32, attn_implementation="sdpa"
    )
    ours, reference = Ours(engine), Reference(model.eval())
    print(
        f"{engine.facts.name}, float32, {options.threads} threads, torch {torch.__version__}, "
        f"{'with' if engine.has_row_copies else 'without'} row copies"
    )
    results: list[dict[str, Any]] = []
    with torch.inference_mode():
        for batch in options.batches:
            times = bench_decode(ours, reference, batch, options.context, options.decode_steps)
            results.append(report("decode", batch, options.context, batch, times))
        for num_tokens in options.prompt_tokens:
            for batch in options.batches:
                if batch * num_tokens > MAX_PREFILL_ROWS:
                    print(f"prefill batch {batch} x {num_tokens} tokens: skipped, too long")
                    continue
                for kind, lengths in (
                    ("prefill", [num_tokens] * batch),
                    ("prefill mixed", mixed_lengths(batch, num_tokens)),
                ):
                    if kind == "prefill mixed" and batch == 1:
                        continue
                    times = bench_prefill(ours, reference, lengths, options.prefill_steps)
                    results.append(report(kind, batch, num_tokens, sum(lengths), times))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
