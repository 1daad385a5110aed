"""The real model through three processes equals one process of transformers, token for token."""

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.reference import greedy_reference
from tests.system.cluster import Cluster
from tests.system.completions import complete_all

pytestmark = [pytest.mark.model, pytest.mark.system, pytest.mark.timeout(900)]

_LENGTHS = (1, 2, 3, 8, 15, 16, 17, 18, 31, 32, 48, 64, 65, 100, 150, 256, 257, 512, 1000, 2000)
_MAX_TOKENS = 16


def _prompts(model_dir: Path) -> list[list[int]]:
    """Windows of a real text, so that the model knows what it is talking about."""
    text = 2 * (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
    tokens = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)(text)["input_ids"]
    return [tokens[37 * index : 37 * index + length] for index, length in enumerate(_LENGTHS)]


async def test_greedy_output_equals_transformers(
    default_model_dir: Path, start_cluster: Callable[..., Cluster]
) -> None:
    prompts = _prompts(default_model_dir)
    assert [len(prompt) for prompt in prompts] == list(_LENGTHS)
    expected = greedy_reference(default_model_dir, prompts, _MAX_TOKENS)
    cluster = start_cluster(default_model_dir)
    for num_in_flight in (1, 3, 16):
        answers = await complete_all(
            cluster, prompts, max_tokens=_MAX_TOKENS, num_in_flight=num_in_flight
        )
        for length, tokens, (output, timings) in zip(_LENGTHS, expected, answers, strict=True):
            assert output == tokens, f"{length} tokens, {num_in_flight} in flight"
            if length > 16:
                # 2 regions, 30 layers, 3 KV heads of 64 float32 numbers, and the last prompt
                # token is left to the decode worker.
                assert timings["handoff_nbytes"] == (length - 1) * 2 * 30 * 3 * 64 * 4
    await cluster.wait_idle()
