import math

import numpy as np
import pytest
import torch

from kvengine.errors import InvalidBatch
from kvengine.sampler import SamplingParams, sample, uniform


def logits_of(probabilities: list[float]) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def draw(logits: torch.Tensor, params: SamplingParams, num: int) -> list[int]:
    rows = logits.expand(num, -1)
    return sample(rows, [params] * num, list(range(num)))


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float((((counts - expected) ** 2) / expected).sum())


def test_uniform_is_uniform_over_positions_and_seeds() -> None:
    for numbers in (
        [uniform(3, position) for position in range(4000)],
        [uniform(seed, 17) for seed in range(4000)],
    ):
        counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
        # 19 degrees of freedom: 43.8 is exceeded once in a thousand.
        assert chi_square(counts, np.full(20, 200.0)) < 43.8


def test_uniform_takes_any_seed() -> None:
    values = {uniform(seed, 1) for seed in (0, 1, (1 << 64) - 1, 1 << 63)}
    assert len(values) == 4
    assert uniform(-1, 1) == uniform((1 << 64) - 1, 1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_distribution_follows_the_temperature(temperature: float) -> None:
    base = [0.4, 0.3, 0.2, 0.07, 0.03]
    num = 4000
    weights = np.array(base) ** (1 / temperature)
    expected = num * weights / weights.sum()
    tokens = draw(logits_of(base), SamplingParams(temperature=temperature, seed=9), num)
    counts = np.bincount(tokens, minlength=5)
    # 4 degrees of freedom: 18.5 is exceeded once in a thousand.
    assert chi_square(counts, expected) < 18.5


def test_top_k_keeps_the_most_likely_and_renormalises() -> None:
    tokens = draw(
        logits_of([0.1, 0.4, 0.2, 0.3]), SamplingParams(temperature=1.0, top_k=2, seed=1), 3000
    )
    counts = np.bincount(tokens, minlength=4)
    assert counts[0] == counts[2] == 0
    # 1 degree of freedom: 10.8 is exceeded once in a thousand.
    assert chi_square(counts[[1, 3]], 3000 * np.array([4 / 7, 3 / 7])) < 10.8


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    tokens = draw(
        logits_of([0.1, 0.4, 0.2, 0.3]), SamplingParams(temperature=1.0, top_p=0.65, seed=1), 3000
    )
    counts = np.bincount(tokens, minlength=4)
    assert counts[0] == counts[2] == 0
    assert chi_square(counts[[1, 3]], 3000 * np.array([4 / 7, 3 / 7])) < 10.8


def test_top_k_and_top_p_combine() -> None:
    # Of the two kept by top_k, the first alone has 4/7 and reaches top_p.
    params = SamplingParams(temperature=1.0, top_k=2, top_p=0.5, seed=1)
    assert set(draw(logits_of([0.1, 0.4, 0.2, 0.3]), params, 200)) == {1}


def test_a_nucleus_wider_than_the_first_guess() -> None:
    logits = torch.zeros(5000)
    tokens = draw(logits, SamplingParams(temperature=1.0, top_p=0.9, seed=4), 400)
    assert len(set(tokens)) > 300


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, seed=3),
        SamplingParams(temperature=1.5, top_k=1, seed=3),
        SamplingParams(temperature=1.5, top_p=1e-9, seed=3),
        SamplingParams(temperature=1e-6, seed=3),
    ],
)
def test_ways_to_be_greedy(params: SamplingParams) -> None:
    logits = torch.randn(50, 999, generator=torch.Generator().manual_seed(2))
    assert sample(logits, [params] * 50, list(range(50))) == logits.argmax(-1).tolist()


def test_batch_composition_does_not_change_a_row() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(2))
    params = [
        SamplingParams(temperature=0.7 + 0.1 * i, top_p=1 - 0.05 * i, top_k=20 * i, seed=i)
        for i in range(6)
    ]
    positions = [10 + i for i in range(6)]
    together = sample(logits, params, positions)
    order = [4, 0, 5, 2, 1, 3]
    shuffled = sample(logits[order], [params[i] for i in order], [positions[i] for i in order])
    assert [together[i] for i in order] == shuffled
    alone = [sample(logits[i : i + 1], [params[i]], [positions[i]])[0] for i in range(6)]
    assert together == alone


def test_resumed_equals_uninterrupted() -> None:
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(2))
    params = SamplingParams(temperature=1.0, seed=77)
    whole = sample(logits, [params] * 40, list(range(40)))
    tail = sample(logits[25:], [params] * 15, list(range(25, 40)))
    assert whole[25:] == tail
    assert len(set(whole)) > 20


def test_seed_and_position_both_matter() -> None:
    logits = torch.zeros(1, 1000)
    chosen = {
        sample(logits, [SamplingParams(temperature=1.0, seed=seed)], [position])[0]
        for seed in range(5)
        for position in range(5)
    }
    assert len(chosen) > 20


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((1000,), -math.inf)
    logits[[3, 700]] = 0.0
    assert set(draw(logits, SamplingParams(temperature=1.0, seed=5), 200)) == {3, 700}


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(InvalidBatch, match="temperature"):
        SamplingParams(temperature=-0.1)
    with pytest.raises(InvalidBatch, match="temperature"):
        SamplingParams(temperature=math.nan)
    with pytest.raises(InvalidBatch, match="top_p"):
        SamplingParams(top_p=0.0)
    with pytest.raises(InvalidBatch, match="top_k"):
        SamplingParams(top_k=-1)
    with pytest.raises(InvalidBatch, match="one of each per row"):
        sample(torch.zeros(2, 5), [SamplingParams()], [0, 1])
    assert sample(torch.zeros(0, 5), [], []) == []
