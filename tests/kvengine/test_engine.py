"""The engine against transformers' own `generate`, token for token, and its contract."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvengine.engine import Engine
from kvengine.errors import InvalidBatch, PoolTooSmall
from kvengine.forward_batch import Span
from tests.kvengine.families import CONFIGS, VOCAB_SIZE
from tests.kvengine.greedy import engine_greedy, make_prompts, transformers_greedy

LENGTHS = (1, 2, 7, 8, 9, 23, 24, 25, 40, 97)


@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_equals_transformers(
    family: str, model_dirs: dict[str, Path], load_engine: Callable[..., Engine]
) -> None:
    prompts = make_prompts(LENGTHS)
    expected = transformers_greedy(model_dirs[family], prompts, 12)
    engine = load_engine(family)
    assert engine.fallbacks == ()
    for seed in (1, 2):
        assert engine_greedy(engine, prompts, 12, seed=seed) == expected
    whole = engine_greedy(engine, prompts, 12, seed=3, chunk_sizes=(1000,), is_fragmented=False)
    assert whole == expected


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_slow_layers_compute_the_same(
    family: str, model_dirs: dict[str, Path], load_engine: Callable[..., Engine]
) -> None:
    prompts = make_prompts(LENGTHS)
    expected = transformers_greedy(model_dirs[family], prompts, 6)
    engine = load_engine(family, use_fast_layers=False)
    assert engine_greedy(engine, prompts, 6, seed=4) == expected


def test_bfloat16_runs(load_engine: Callable[..., Engine]) -> None:
    engine = load_engine(dtype="bfloat16")
    prompt = make_prompts([40])[0]
    blocks = [9, 3, 4, 5, 20, 8]
    whole = engine.forward([Span(prompt, 0, blocks)])
    engine.forward([Span(prompt[:-1], 0, blocks, needs_logits=False)])
    stepped = engine.forward([Span(prompt[-1:], len(prompt) - 1, blocks)])
    torch.testing.assert_close(whole, stepped, rtol=0.1, atol=0.5)


def test_logits_come_in_span_order_and_only_where_wanted(
    load_engine: Callable[..., Engine],
) -> None:
    engine = load_engine()
    prompts = make_prompts([5, 1, 9, 1])
    alone = [engine.forward([Span(p, 0, [0, 1])])[0] for p in prompts]
    spans = [Span(p, 0, [2 * i, 2 * i + 1], needs_logits=i != 2) for i, p in enumerate(prompts)]
    logits = engine.forward(spans)
    assert logits.shape == (3, VOCAB_SIZE)
    for row, i in enumerate((0, 1, 3)):
        torch.testing.assert_close(logits[row], alone[i], rtol=1e-4, atol=1e-4)
    none = engine.forward([Span(prompts[0], 0, [0], needs_logits=False)])
    assert none.shape == (0, VOCAB_SIZE)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_on_layer_comes_right_after_the_write(
    family: str, load_engine: Callable[..., Engine]
) -> None:
    engine = load_engine(family)
    prompt = make_prompts([12])[0]
    engine.forward([Span(prompt, 0, [4, 6], needs_logits=False)])
    final = [bytes(b) for layer in range(3) for b in engine.kv_pool.buffers(layer, [4, 6], 0, 12)]
    engine.kv_pool.region[:] = bytes(len(engine.kv_pool.region))
    seen: list[int] = []
    written: list[bytes] = []
    later: list[bool] = []

    def on_layer(layer: int) -> None:
        seen.append(layer)
        written.extend(bytes(b) for b in engine.kv_pool.buffers(layer, [4, 6], 0, 12))
        later.extend(
            any(b) for i in range(layer + 1, 3) for b in engine.kv_pool.buffers(i, [4, 6], 0, 12)
        )

    engine.forward([Span(prompt, 0, [4, 6], needs_logits=False)], on_layer)
    assert seen == [0, 1, 2]
    assert written == final
    assert not any(later)


def test_an_error_of_on_layer_ends_the_pass(load_engine: Callable[..., Engine]) -> None:
    engine = load_engine()

    def on_layer(layer: int) -> None:
        raise ConnectionError(f"layer {layer}")

    with pytest.raises(ConnectionError, match="layer 0"):
        engine.forward([Span([3, 4], 0, [0])], on_layer)


def test_only_the_given_blocks_are_written(load_engine: Callable[..., Engine]) -> None:
    engine = load_engine()
    engine.kv_pool.region[:] = b"\x5a" * len(engine.kv_pool.region)
    engine.forward([Span(make_prompts([11])[0], 0, [3, 7]), Span([5], 2, [9])])
    block_nbytes = engine.facts.geometry.write_nbytes(0, 8) // 2
    touched = {
        block
        for layer in range(3)
        for block in range(engine.num_blocks)
        for buffer in engine.kv_pool.buffers(layer, [block], 0, 8)
        if bytes(buffer) != b"\x5a" * block_nbytes
    }
    assert touched == {3, 7, 9}


@pytest.mark.parametrize(
    ("span", "message"),
    [
        (Span([], 0, [0]), "no tokens"),
        (Span([VOCAB_SIZE], 0, [0]), "vocabulary"),
        (Span([-1], 0, [0]), "vocabulary"),
        (Span([3], 500, [0] * 100), "model length"),
        (Span([3], 8, [0]), "block table"),
        (Span([3], 0, [10_000]), "outside the pool"),
        (Span([3], 0, [-1]), "outside the pool"),
    ],
)
def test_bad_spans_are_refused(
    span: Span, message: str, load_engine: Callable[..., Engine]
) -> None:
    engine = load_engine(max_model_len=100)
    with pytest.raises(InvalidBatch, match=message):
        engine.forward([Span([3], 0, [0]), span])


def test_an_empty_batch_is_refused(load_engine: Callable[..., Engine]) -> None:
    with pytest.raises(InvalidBatch, match="no spans"):
        load_engine().forward([])


def test_a_pool_too_small_says_how_much_is_needed(load_engine: Callable[..., Engine]) -> None:
    token_nbytes = load_engine().facts.geometry.kv_token_nbytes
    with pytest.raises(PoolTooSmall, match=f"at least {104 * token_nbytes} bytes"):
        load_engine(kv_pool_nbytes=96 * token_nbytes, max_model_len=100)
    with pytest.raises(PoolTooSmall, match="at least"):
        load_engine(kv_pool_nbytes=7 * token_nbytes)


def test_model_length_is_what_the_pool_holds(load_engine: Callable[..., Engine]) -> None:
    engine = load_engine()
    token_nbytes = engine.facts.geometry.kv_token_nbytes
    assert engine.facts.max_model_len == 512
    assert load_engine(kv_pool_nbytes=85 * token_nbytes).facts.max_model_len == 80
    assert load_engine(max_model_len=100).facts.max_model_len == 100


def test_warm_up_leaves_a_working_engine(load_engine: Callable[..., Engine]) -> None:
    engine = load_engine()
    before = engine.forward([Span([3, 4, 5], 0, [0])])
    engine.warm_up()
    torch.testing.assert_close(engine.forward([Span([3, 4, 5], 0, [0])]), before)


@pytest.mark.model
@pytest.mark.timeout(600)
def test_default_model_equals_transformers(default_model_dir: Path) -> None:
    lengths = (1, 2, 3, 5, 8, 13, 16, 17, 31, 32, 33, 64, 65, 100, 128, 200, 333, 512, 1025, 2000)
    prompts = make_prompts(lengths, vocab_size=40_000)
    expected = transformers_greedy(default_model_dir, prompts, 32)
    engine = Engine.load(default_model_dir, num_threads=2, kv_pool_nbytes=1 << 28)
    assert engine.fallbacks == ()
    mixed = engine_greedy(engine, prompts, 32, seed=1, chunk_sizes=(64, 256, 3000))
    assert mixed == expected


@pytest.mark.parametrize(("wish", "is_kept"), [(True, True), (False, False), (None, True)])
def test_row_copies_change_no_token(
    wish: bool | None, is_kept: bool, model_dirs: dict[str, Path]
) -> None:
    """A tiny model's copies always fit; with them one row takes another layout than two."""
    engine = Engine.load(
        model_dirs["llama"], num_threads=1, kv_pool_nbytes=4 << 20, has_row_copies=wish
    )
    assert engine.has_row_copies is is_kept
    alone = engine.forward([Span([5, 6, 7], 0, [0]), Span([8, 9], 0, [1])])
    for row, tokens in enumerate(([5, 6, 7], [8, 9])):
        for index, token in enumerate(tokens):
            one_by_one = engine.forward([Span([token], index, [2])])
        torch.testing.assert_close(one_by_one[0], alone[row], rtol=1e-4, atol=1e-4)


def test_no_copies_where_memory_is_short(
    model_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvengine.engine.available_nbytes", lambda: 0)
    monkeypatch.setattr("kvengine.engine.row_copies_nbytes", lambda _: 1)
    engine = Engine.load(
        model_dirs["llama"], num_threads=1, kv_pool_nbytes=4 << 20, has_row_copies=None
    )
    assert not engine.has_row_copies
