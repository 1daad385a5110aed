"""The decode loop: batches, limits, preemption, resumption, refusals."""

import asyncio
from typing import Any

import pytest

from kvproto.errors import ErrorCode
from kvproto.handshake import Identity
from kvproto.messages import Abort, AbortAck, Finished, PrefillWorker
from kvproto.tcp import connect
from tests.decode_svc import fake_prefill
from tests.decode_svc.conftest import make_generate
from tests.reference import greedy_reference


def _prompt(seed: int, length: int) -> list[int]:
    return [(seed * 31 + i * 17 + 2) % 256 for i in range(length)]


async def test_a_short_prompt_needs_no_prefill_worker(
    load_engine: Any, start_worker: Any, tiny_model_dir: Any
) -> None:
    prompts = {f"s{n}": _prompt(n, n) for n in (1, 2, 15, 16)}
    references = greedy_reference(tiny_model_dir("llama"), list(prompts.values()), 8)
    async with start_worker(load_engine()) as worker:
        for sequence_id, prompt in prompts.items():
            await worker.generate(sequence_id, prompt, [], ignore_eos=False)
        outcomes = await worker.outcomes(len(prompts))
        for sequence_id, expected in zip(prompts, references, strict=True):
            assert outcomes[sequence_id].tokens == expected
            assert outcomes[sequence_id].finished.timings["carrier"] == "local"
        await worker.assert_nothing_is_left()


async def test_a_pool_for_half_of_the_need_preempts_and_changes_no_token(
    load_engine: Any, start_worker: Any, fake_worker: Any, tiny_model_dir: Any
) -> None:
    prompts = {f"s{i}": _prompt(i, 24) for i in range(6)}
    references = greedy_reference(tiny_model_dir("llama"), list(prompts.values()), 40)
    good = await fake_worker("good", fake_prefill.good)
    # 64 tokens at the end each, 6 sequences: 24 blocks of 16 tokens wanted, 12 given.
    engine = load_engine(kv_pool_nbytes=12 * 16 * 4 * 2 * 2 * 16 * 4)
    async with start_worker(engine) as worker:
        for sequence_id, prompt in prompts.items():
            await worker.generate(
                sequence_id, prompt, [good.address], max_output_tokens=40, ignore_eos=False
            )
        outcomes = await worker.outcomes(len(prompts))
        for sequence_id, expected in zip(prompts, references, strict=True):
            assert outcomes[sequence_id].tokens == expected, sequence_id
        num_preemptions = sum(
            outcome.finished.timings["num_preemptions"] for outcome in outcomes.values()
        )
        assert num_preemptions > 0
        await worker.assert_nothing_is_left()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_a_resumed_stream_equals_an_uninterrupted_one(
    load_engine: Any, start_worker: Any, fake_worker: Any, temperature: float
) -> None:
    good = await fake_worker("good", fake_prefill.good)
    prompt = _prompt(3, 30)
    options = {"temperature": temperature, "seed": 1234, "max_output_tokens": 20}
    async with start_worker(load_engine()) as worker:
        await worker.generate("whole", prompt, [good.address], **options)
        whole = (await worker.outcomes(1))["whole"].tokens
        assert len(whole) == 20
        for num_emitted in (1, 7, 19):
            name = f"resumed-{num_emitted}"
            await worker.generate(
                name,
                prompt + whole[:num_emitted],
                [good.address],
                num_prompt_tokens=len(prompt),
                **options,
            )
            assert (await worker.outcomes(1))[name].tokens == whole[num_emitted:]


async def test_the_seed_decides_and_the_batch_does_not(load_engine: Any, start_worker: Any) -> None:
    options = {"temperature": 1.0, "max_output_tokens": 12}
    prompt = _prompt(5, 10)
    async with start_worker(load_engine()) as worker:
        await worker.generate("alone", prompt, [], seed=7, **options)
        alone = (await worker.outcomes(1))["alone"].tokens
        for seed in range(5, 10):
            await worker.generate(f"s{seed}", prompt, [], seed=seed, **options)
        together = await worker.outcomes(5)
        assert together["s7"].tokens == alone
        assert len({tuple(outcome.tokens) for outcome in together.values()}) > 1


async def test_a_stop_token_ends_the_stream(load_engine: Any, start_worker: Any) -> None:
    prompt = _prompt(9, 12)
    async with start_worker(load_engine()) as worker:
        await worker.generate("a", prompt, [])
        tokens = (await worker.outcomes(1))["a"].tokens
        await worker.generate("b", prompt, [], stop_token_ids=[tokens[3]])
        outcome = (await worker.outcomes(1))["b"]
        assert outcome.tokens == tokens[: tokens.index(tokens[3]) + 1]
        assert outcome.finished.reason == "stop"


async def test_sequences_join_and_leave_between_steps(load_engine: Any, start_worker: Any) -> None:
    async with start_worker(load_engine(), max_num_seqs=2) as worker:
        for index, num_tokens in enumerate((30, 3, 5, 4)):
            await worker.generate(f"s{index}", _prompt(index, 6), [], max_output_tokens=num_tokens)
        outcomes = await worker.outcomes(4)
        # The long one holds one of two places all the time; the others pass through the second.
        assert list(outcomes) == ["s1", "s2", "s3", "s0"]
        await worker.assert_nothing_is_left()


async def test_a_cancelled_sequence_leaves_the_batch(load_engine: Any, start_worker: Any) -> None:
    async with start_worker(load_engine()) as worker:
        await worker.generate("long", _prompt(1, 5), [], max_output_tokens=1500)
        await worker.generate("short", _prompt(2, 5), [], max_output_tokens=5)
        assert list(await worker.outcomes(1)) == ["short"]
        await worker.router.send(Abort("long", 0, code=ErrorCode.CANCELLED, message="gone"))
        outcome = (await worker.outcomes(1))["long"]
        assert outcome.finished.reason == "abort"
        await worker.assert_nothing_is_left()


async def test_a_deadline_needs_no_traffic(load_engine: Any, start_worker: Any) -> None:
    async with start_worker(load_engine()) as worker:
        await worker.generate("s", _prompt(1, 5), [], max_output_tokens=2000, timeout_s=0.3)
        outcome = (await worker.outcomes(1))["s"]
        assert outcome.finished.reason == "error"
        assert outcome.finished.code == ErrorCode.DEADLINE_EXCEEDED
        await worker.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("tokens", "options", "code", "word"),
    [
        (_prompt(1, 2304), {}, ErrorCode.PROMPT_TOO_LONG, "2304"),
        ([1, 2, 260], {}, ErrorCode.MALFORMED, "260"),
        ([1, 2, 3], {"num_prompt_tokens": 4}, ErrorCode.MALFORMED, "num_prompt_tokens"),
        (
            [1, 2, 3],
            {"num_prompt_tokens": 1, "max_output_tokens": 2},
            ErrorCode.MALFORMED,
            "max_output_tokens",
        ),
        ([1, 2, 3], {"top_p": 0.0}, ErrorCode.MALFORMED, "top_p"),
    ],
)
async def test_bad_sequences_are_refused_by_name(
    load_engine: Any,
    start_worker: Any,
    tokens: list[int],
    options: dict[str, Any],
    code: ErrorCode,
    word: str,
) -> None:
    async with start_worker(load_engine()) as worker:
        await worker.generate("s", tokens, [], **options)
        finished = (await worker.outcomes(1))["s"].finished
        assert finished.reason == "error"
        assert finished.code == code
        assert word in finished.message


async def test_limits_of_the_table_and_repeated_ids(load_engine: Any, start_worker: Any) -> None:
    async with start_worker(load_engine(), max_sequences=2) as worker:
        await worker.generate("a", _prompt(1, 5), [], max_output_tokens=500)
        await worker.generate("a", _prompt(1, 5), [])
        await worker.generate("b", _prompt(1, 5), [], max_output_tokens=500)
        await worker.generate("c", _prompt(1, 5), [])
        codes = []
        async with asyncio.timeout(10):
            while len(codes) < 2:
                message = await worker.router.receive()
                if isinstance(message, Finished):
                    codes.append((message.sequence_id, message.code))
        assert codes == [("a", ErrorCode.MALFORMED), ("c", ErrorCode.OVERLOADED)]


async def test_one_router_leaves_room_for_others(load_engine: Any, start_worker: Any) -> None:
    async with start_worker(load_engine(), max_sequences_per_peer=1) as worker:
        await worker.generate("a", _prompt(1, 5), [], max_output_tokens=200)
        await worker.generate("b", _prompt(1, 5), [])
        async with asyncio.timeout(10):
            while not isinstance(message := await worker.router.receive(), Finished):
                pass
        assert (message.sequence_id, message.code) == ("b", ErrorCode.OVERLOADED)
        assert "1 sequences of router-under-test (max_sequences_per_peer)" in message.message
        # Another one finds room.
        identity = Identity(role="client", instance_id="another")
        other = await connect("127.0.0.1", worker.port, identity=identity, timeout_s=10)
        await other.send(make_generate("c", _prompt(1, 5), []))
        async with asyncio.timeout(10):
            while not isinstance(message := await other.receive(), Finished):
                pass
        assert (message.sequence_id, message.reason) == ("c", "length")
        await other.close()


async def test_a_draining_worker_finishes_what_it_has(load_engine: Any, start_worker: Any) -> None:
    async with start_worker(load_engine()) as worker:
        await worker.generate("old", _prompt(1, 5), [], max_output_tokens=50)
        async with asyncio.timeout(10):
            while not worker.decoder.load().num_running:
                await asyncio.sleep(0.005)
        worker.decoder.is_draining = True
        await worker.generate("new", _prompt(1, 5), [])
        outcomes = await worker.outcomes(2)
        assert outcomes["new"].finished.code == ErrorCode.SHUTTING_DOWN
        assert len(outcomes["old"].tokens) == 50


async def test_a_client_may_not_name_addresses(load_engine: Any, start_worker: Any) -> None:
    async with start_worker(load_engine(), role="client") as worker:
        await worker.router.send(
            make_generate("s", _prompt(1, 40), [PrefillWorker("x", "127.0.0.1", 9)])
        )
        finished = (await worker.outcomes(1))["s"].finished
        assert finished.code == ErrorCode.MALFORMED
        assert "prefill_workers" in finished.message


async def test_a_stranger_cannot_cancel_a_sequence(load_engine: Any, start_worker: Any) -> None:
    async with start_worker(load_engine()) as worker:
        await worker.generate("mine", _prompt(1, 5), [], max_output_tokens=60)
        stranger = await connect(
            "127.0.0.1",
            worker.port,
            identity=Identity(role="client", instance_id="stranger"),
            timeout_s=10,
        )
        await stranger.send(Abort("mine", 0, code=ErrorCode.CANCELLED, message="not yours"))
        async with asyncio.timeout(10):
            assert isinstance(await stranger.receive(), AbortAck)
        assert len((await worker.outcomes(1))["mine"].tokens) == 60
        stranger.abort("done")


async def test_preempted_without_a_prefill_worker_it_is_computed_here(
    load_engine: Any, start_worker: Any, tiny_model_dir: Any
) -> None:
    prompts = {f"s{i}": _prompt(i, 10) for i in range(4)}
    references = greedy_reference(tiny_model_dir("llama"), list(prompts.values()), 50)
    # 60 tokens at the end each: 16 blocks wanted, 8 given.
    engine = load_engine(kv_pool_nbytes=8 * 16 * 4 * 2 * 2 * 16 * 4)
    async with start_worker(engine) as worker:
        for sequence_id, prompt in prompts.items():
            await worker.generate(sequence_id, prompt, [], max_output_tokens=50, ignore_eos=False)
        outcomes = await worker.outcomes(len(prompts))
        assert sum(o.finished.timings["num_preemptions"] for o in outcomes.values()) > 0
        for sequence_id, expected in zip(prompts, references, strict=True):
            assert outcomes[sequence_id].tokens == expected, sequence_id
            assert outcomes[sequence_id].finished.timings["first_step_s"] >= 0
        await worker.assert_nothing_is_left()
