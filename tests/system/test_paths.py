"""The path that KV takes between real processes: chosen, refused, converted, and a stuck writer."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from tests.reference import greedy_reference
from tests.system.cluster import Cluster
from tests.system.completions import client_of, complete, complete_all

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

_PROMPTS = [[(7 * i + 3 * k) % 256 for i in range(60 + 20 * k)] for k in range(3)]
_LONG_PROMPT = [(11 * i + 5) % 256 for i in range(1500)]

Start = Callable[..., Cluster]


async def test_workers_with_different_folders_fall_back_to_tcp(
    tiny_model_dir: Callable[[str], Path], start_cluster: Start, tmp_path: Path
) -> None:
    model_dir = tiny_model_dir("llama")
    cluster = start_cluster(
        model_dir, worker_flags={"decode": ["--mapped-dir", str(tmp_path / "elsewhere")]}
    )
    answers = await complete_all(cluster, _PROMPTS, max_tokens=6, num_in_flight=3)
    assert [tokens for tokens, _ in answers] == greedy_reference(model_dir, _PROMPTS, max_tokens=6)
    assert {timings["carrier"] for _, timings in answers} == {"tcp"}
    assert "no owner listens" in cluster.processes["decode-0"].log()
    cluster.stop()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--min-handoff-bandwidth", "100000GiB"], "min_handoff_bandwidth"),
        (["--kv-carrier", "mapped", "--mapped-dir", "{tmp}/elsewhere"], "kv_carrier is mapped"),
    ],
)
async def test_a_path_that_is_not_wanted_is_refused_by_name(
    tiny_model_dir: Callable[[str], Path],
    start_cluster: Start,
    tmp_path: Path,
    flags: list[str],
    reason: str,
) -> None:
    decode_flags = [flag.format(tmp=tmp_path) for flag in flags]
    cluster = start_cluster(tiny_model_dir("llama"), worker_flags={"decode": decode_flags})
    async with client_of(cluster) as client:
        with pytest.raises(openai.APIStatusError, match=reason):
            await complete(client, "llama", _PROMPTS[0], 4)
    await cluster.wait_idle()
    cluster.stop()


async def test_kv_that_travels_as_int8_reports_its_error(
    tiny_model_dir: Callable[[str], Path], start_cluster: Start
) -> None:
    cluster = start_cluster(
        tiny_model_dir("llama"), worker_flags={"decode": ["--kv-wire-dtype", "int8"]}
    )
    [(tokens, timings), *_] = await complete_all(cluster, _PROMPTS, max_tokens=6, num_in_flight=1)
    assert len(tokens) == 6
    assert timings["carrier"] == "tcp"
    # 4 layers, 2 regions, 2 heads of 16 elements and a scale of 4 bytes each.
    assert timings["handoff_nbytes"] == (len(_PROMPTS[0]) - 1) * 4 * 2 * 2 * (16 + 4)
    assert 0 < timings["wire_error"] < 0.02
    assert 0 < cluster.metrics("decode-0")["pd_decode_handoff_wire_error"] < 0.02
    cluster.stop()


async def test_a_stopped_writer_keeps_its_blocks_in_quarantine_until_it_ends(
    tiny_model_dir: Callable[[str], Path], start_cluster: Start
) -> None:
    model_dir = tiny_model_dir("llama")
    cluster = start_cluster(
        model_dir,
        worker_flags={
            "prefill": ["--max-step-tokens", "4"],
            "decode": ["--stall-timeout-s", "1", "--abort-timeout-s", "0.5"],
        },
    )
    prefill = cluster.processes["prefill-0"]
    async with asyncio.timeout(90), client_of(cluster) as client:
        request = asyncio.create_task(complete(client, "llama", _LONG_PROMPT, 4))
        while cluster.metrics("prefill-0")["pd_prefill_computed_tokens_total"] < 100:
            await asyncio.sleep(0.01)
        prefill.send(signal.SIGSTOP)
        with pytest.raises(openai.APIStatusError):
            await request
        # Nobody may have these blocks: the process could go on writing at any moment.
        held = cluster.health("decode-0")["leases"]["num_quarantined_blocks"]
        assert held == -(-(len(_LONG_PROMPT) - 1) // 16)
        assert cluster.metrics("decode-0")["pd_decode_quarantined_blocks"] == held
        prefill.kill()
        while cluster.health("decode-0")["leases"]["num_quarantined_blocks"]:
            await asyncio.sleep(0.05)
        prefill.start()
        cluster.wait_ready()
        tokens, timings = await complete(client, "llama", _PROMPTS[0], 6)
    assert [tokens] == greedy_reference(model_dir, _PROMPTS[:1], max_tokens=6)
    assert timings["carrier"] == "mapped"
    await cluster.wait_idle()
    cluster.stop()
