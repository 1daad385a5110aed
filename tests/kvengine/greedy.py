"""The two ways to run prompts greedily: transformers' `generate`, and the engine in odd batches."""

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from kvengine.engine import Engine
from kvengine.forward_batch import Span
from kvengine.sampler import SamplingParams, sample
from tests.kvengine.families import VOCAB_SIZE


def make_prompts(lengths: Sequence[int], vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
    generator = random.Random(5)
    return [[generator.randrange(2, vocab_size) for _ in range(length)] for length in lengths]


def transformers_greedy(
    model_dir: Path, prompts: Sequence[Sequence[int]], num_new_tokens: int
) -> list[list[int]]:
    """The reference: plain `generate`, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


def engine_greedy(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    num_new_tokens: int,
    *,
    seed: int,
    chunk_sizes: Sequence[int] = (1, 3, 16, 33, 1000),
    is_fragmented: bool = True,
) -> list[list[int]]:
    """Run all prompts at once in a random interleaving of prefill chunks and decode steps."""
    generator = random.Random(seed)
    block_size = engine.kv_pool.layout.block_size
    free = list(range(engine.num_blocks))
    if is_fragmented:
        generator.shuffle(free)
    tables = []
    for prompt in prompts:
        num_blocks = -(-(len(prompt) + num_new_tokens) // block_size)
        tables.append([free.pop(0) for _ in range(num_blocks)])
    sequences = [list(prompt) for prompt in prompts]
    cached = [0] * len(prompts)
    lengths = [len(prompt) + num_new_tokens for prompt in prompts]
    while any(len(tokens) < length for tokens, length in zip(sequences, lengths, strict=True)):
        unfinished = [i for i, tokens in enumerate(sequences) if len(tokens) < lengths[i]]
        chosen = generator.sample(unfinished, generator.randint(1, len(unfinished)))
        spans, sampled = [], []
        for i in chosen:
            chunk = sequences[i][cached[i] :][: generator.choice(chunk_sizes)]
            is_last = cached[i] + len(chunk) == len(sequences[i])
            spans.append(Span(chunk, cached[i], tables[i], needs_logits=is_last))
            cached[i] += len(chunk)
            if is_last:
                sampled.append(i)
        logits = engine.forward(spans)
        params = [SamplingParams()] * len(sampled)
        tokens = sample(logits, params, [len(sequences[i]) for i in sampled])
        for i, token in zip(sampled, tokens, strict=True):
            sequences[i].append(token)
    return [tokens[len(prompt) :] for tokens, prompt in zip(sequences, prompts, strict=True)]
