"""Real workers and raw clients: a prompt's KV into a file, and days later on from there."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from kvproto.client import (
    BlockingDecodeClient,
    BlockingPrefillClient,
    DecodeClient,
    KvFile,
    PrefillClient,
)
from kvproto.errors import ErrorCode, LocalProtocolError, PeerError
from tests.system.cluster import Cluster
from tests.system.completions import complete_all
from tests.tiny_models import CONFIGS, EOS_TOKEN_ID

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

# Shorter than a block, around one, the window (32), a step (64), and beyond.
_LENGTHS = (3, 18, 33, 65, 66, 200, 700)


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def cluster(
    request: pytest.FixtureRequest,
    tiny_model_dir: Callable[[str], Path],
    start_cluster: Callable[..., Cluster],
) -> Cluster:
    return start_cluster(
        tiny_model_dir(request.param), worker_flags={"prefill": ["--max-step-tokens", "64"]}
    )


def prompts_of(seed: str) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(EOS_TOKEN_ID) for _ in range(length)] for length in _LENGTHS]


def pdctl(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ops.pdctl", "kv", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


async def test_tokens_from_files_are_those_of_the_ordinary_path(
    cluster: Cluster, tmp_path: Path
) -> None:
    prompts = prompts_of("files")
    answers = await complete_all(cluster, prompts, max_tokens=12, num_in_flight=3)
    async with PrefillClient(*cluster.worker_address("prefill-0")) as client:
        for index, prompt in enumerate(prompts):
            await client.prefill_to_file(
                tmp_path / f"{index}.kv", prompt[:-1], next_tokens=prompt[-1:]
            )
        streamed = [
            (rows.layer, rows.first_token, rows.num_tokens)
            async for rows in client.stream(prompts[-1])
        ]
    assert len(streamed) > len({layer for layer, _, _ in streamed}), "in chunks"
    async with DecodeClient(*cluster.worker_address("decode-0")) as client:
        for index, (expected, _) in enumerate(answers):
            with KvFile.open(tmp_path / f"{index}.kv") as file:
                file.verify()
                generation = client.generate(file.cache, max_output_tokens=12)
                assert [token async for token in generation] == expected, _LENGTHS[index]
                assert generation.timings["carrier"] == "tcp", "a client's KV is used"
    await cluster.wait_idle()


async def test_converted_kv_is_taken_and_its_error_is_small(cluster: Cluster) -> None:
    [prompt] = [prompt for prompt in prompts_of("int8") if len(prompt) == 200]
    for dtype, bound in (("float16", 1e-3), ("bfloat16", 1e-2), ("int8", 2e-2)):
        async with PrefillClient(
            *cluster.worker_address("prefill-0"), dtype=dtype
        ) as prefill_client:
            cache = await prefill_client.prefill(prompt[:-1])
        assert cache.geometry.dtype == dtype
        assert 0 < cache.wire_error < bound
        async with DecodeClient(*cluster.worker_address("decode-0")) as decode_client:
            generation = decode_client.generate(cache, prompt, max_output_tokens=4)
            assert len([token async for token in generation]) <= 4
            assert generation.finish_reason in {"stop", "length"}


async def test_abandoned_transfers_leave_the_workers_idle(cluster: Cluster) -> None:
    prompt = prompts_of("abandoned")[-1]
    async with PrefillClient(*cluster.worker_address("prefill-0")) as client:
        stream = client.stream(prompt)
        await anext(stream)
        await stream.aclose()
        cache = await client.prefill(prompt[:-1])
    async with DecodeClient(*cluster.worker_address("decode-0")) as client:
        generation = client.generate(cache, prompt, max_output_tokens=500, ignore_eos=True)
        await anext(generation)
        await generation.aclose()
    await cluster.wait_idle()


async def test_what_workers_refuse_is_said(cluster: Cluster) -> None:
    async with PrefillClient(*cluster.worker_address("prefill-0")) as client:
        with pytest.raises(PeerError) as caught:
            await client.prefill([1] * 5000)
        assert caught.value.code == ErrorCode.PROMPT_TOO_LONG
        cache = await client.prefill([1] * 40)
    cache.facts["weights_digest"] = "another"
    async with DecodeClient(*cluster.worker_address("decode-0")) as client:
        with pytest.raises(LocalProtocolError, match="the KV was computed with weights_digest"):
            await anext(client.generate(cache, [*cache.tokens, 1], max_output_tokens=1))


async def test_the_command_line_saves_inspects_verifies_and_loads(
    cluster: Cluster, tmp_path: Path
) -> None:
    text = "The KV of a prompt may lie in a file for as long as one likes."
    tokens = Tokenizer.from_file(str(cluster.model_dir / "tokenizer.json")).encode(text).ids
    [(expected, _)] = await complete_all(cluster, [tokens], max_tokens=8, num_in_flight=1)
    prefill, decode = (
        ":".join(map(str, cluster.worker_address(name))) for name in ("prefill-0", "decode-0")
    )
    path = tmp_path / "prompt.kv"
    saved = pdctl(
        *("save", "--prefill", prefill, "--prompt", text, "--model", cluster.model_dir, path)
    )
    assert (saved.returncode, saved.stderr) == (0, "")
    assert saved.stdout.startswith(f"{path}: KV of {len(tokens) - 1} tokens of ")
    facts = json.loads(pdctl("inspect", path, "--json").stdout)
    assert facts["tokens"] + facts["next_tokens"] == tokens
    assert facts["num_tokens"] == len(tokens) - 1
    verified = pdctl("verify", path)
    assert (verified.returncode, verified.stderr) == (0, "")
    loaded = pdctl("load", path, "--decode", decode, "--max-output-tokens", 8)
    assert [*map(int, loaded.stdout.split())] == expected
    assert loaded.stderr == f"length after {len(expected)} tokens\n" or "stop" in loaded.stderr
    as_text = pdctl(
        *("load", path, "--decode", decode, "--max-output-tokens", 8, "--model", cluster.model_dir)
    )
    assert as_text.returncode == 0
    numbers = tmp_path / "tokens.json"
    numbers.write_text(json.dumps(tokens), encoding="utf-8")
    small = pdctl(
        *("save", "--prefill", prefill, "--tokens", numbers, "--dtype", "int8", tmp_path / "s.kv")
    )
    assert "of int8 in" in small.stdout
    assert "relative RMS error 0." in small.stdout


def test_the_blocking_clients_do_the_same(cluster: Cluster) -> None:
    prompt = prompts_of("blocking")[2]
    with BlockingPrefillClient(*cluster.worker_address("prefill-0")) as prefill_client:
        cache = prefill_client.prefill(prompt[:-1])
    with BlockingDecodeClient(*cluster.worker_address("decode-0")) as decode_client:
        tokens = list(decode_client.generate(cache, prompt, max_output_tokens=3))
    assert 1 <= len(tokens) <= 3
