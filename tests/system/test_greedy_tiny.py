"""The three-process system says, token for token, what one process of transformers says."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.reference import greedy_reference
from tests.system.cluster import Cluster
from tests.system.completions import complete_all
from tests.tiny_models import CONFIGS, EOS_TOKEN_ID

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

# One family over TCP; the others find out by themselves that they share a host.
_KV_CARRIERS = {"llama": "tcp"}
# Around the block size, the sliding window (32), the token budget (64) and well beyond them.
_LENGTHS = (1, 2, 15, 16, 17, 18, 31, 32, 33, 47, 63, 64, 65, 66, 130, 200, 333, 512, 700, 1000)


@pytest.mark.parametrize("family", sorted(CONFIGS))
async def test_greedy_output_equals_transformers(
    family: str,
    tiny_model_dir: Callable[[str], Path],
    start_cluster: Callable[..., Cluster],
) -> None:
    rng = random.Random(family)
    prompts = [[rng.randrange(EOS_TOKEN_ID) for _ in range(length)] for length in _LENGTHS]
    expected = greedy_reference(tiny_model_dir(family), prompts, max_tokens=12)
    assert len({tuple(tokens) for tokens in expected}) > len(prompts) // 2, "a dull model"
    kv_carrier = _KV_CARRIERS.get(family, "auto")
    cluster = start_cluster(
        tiny_model_dir(family),
        worker_flags={
            "prefill": ["--max-step-tokens", "64"],
            "decode": ["--kv-carrier", kv_carrier],
        },
    )
    carrier = "mapped" if kv_carrier == "auto" else kv_carrier
    for num_in_flight in (1, 3, 16):
        answers = await complete_all(cluster, prompts, max_tokens=12, num_in_flight=num_in_flight)
        for length, tokens, (output, timings) in zip(_LENGTHS, expected, answers, strict=True):
            assert output == tokens, f"{length} tokens, {num_in_flight} in flight"
            assert timings["carrier"] == ("local" if length <= 16 else carrier)
    await cluster.wait_idle()
    handed_off = 3 * sum(length > 16 for length in _LENGTHS)
    assert cluster.metrics("decode-0")["pd_decode_handoffs_total"] == handed_off
    assert cluster.metrics("prefill-0")['pd_prefill_outcomes_total{outcome="done"}'] == handed_off
    [path] = cluster.health("decode-0")["prefill_workers"].values()
    assert path["carrier"] == carrier
    assert path["bandwidth_bytes_per_s"] > 0
    cluster.stop()
