"""The other implementation: transformers' own ``generate`` in one process."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def greedy_reference(
    model_dir: Path, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[list[int]]:
    """Greedy output token ids of each prompt, the end-of-sequence token included."""
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, local_files_only=True
    )
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs
