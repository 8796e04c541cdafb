"""Sampling means what transformers' logits processors mean, and its draws follow the distribution they leave."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.sampling import all_logprobs, random_logits, run
from worker.test_truncation import by_warpers

from lineclear.wire.sampling import SCALARS, Sampling
from lineclear.worker.sampling import sampling_metadata
from lineclear.worker.sampling.logits import with_argmax
from lineclear.worker.sampling.sampling_metadata import uniform

EXAMPLES: dict[str, float] = {
    "temperature": 0.1,
    "top_k": 2,
    "top_p": 0.3,
    "min_p": 0.5,
    "repetition_penalty": 3.0,
    "presence_penalty": 4.0,
    "frequency_penalty": 4.0,
    "typical_p": 0.2,
    "top_n_sigma": 0.5,
    "xtc_probability": 0.9,
    "xtc_threshold": 0.01,
    "dynatemp_range": 5.0,
    "dynatemp_exponent": 0.1,
    "dry_multiplier": 50.0,
    "dry_base": 9.0,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 2,
    "no_repeat_ngram_size": 1,
    "exponential_decay_start": 7,
    "exponential_decay_factor": 1.5,
    "forced_first_id": 5,
    "seed": 77,
    "min_tokens": 9,
    "logprobs": 3,
}
"""A value of each parameter that changes answers. A new scalar parameter needs an entry here."""
COMPANIONS: dict[str, dict[str, float]] = {
    "exponential_decay_start": {"exponential_decay_factor": 1.5},
    "xtc_threshold": {"xtc_probability": 1.0},
    "dynatemp_exponent": {"dynatemp_range": 0.9},
    "dry_base": {"dry_multiplier": 0.1},
    "dry_allowed_length": {"dry_multiplier": 2.0},
    "dry_penalty_last_n": {"dry_multiplier": 2.0},
}
"""What else a parameter needs for an effect."""
BASE = Sampling(temperature=1.0, seed=1, stop_ids=tuple(range(20)))


def sample_with(changes: list[dict[str, float]]) -> tuple[list[int], int]:
    """Return the tokens of one row per element, at varying positions, and the number of reported log-probabilities."""
    likely = int(random_logits(1, 40).argmax())
    history = [([*range(i % 8), likely, 5, 5, *range(i % 8)], 3 + i % 8 if i % 3 else 1) for i in range(len(changes))]
    sampled = run(random_logits(1, 40).repeat(len(changes), 1), [replace(BASE, **x) for x in changes], history)
    return sampled.tokens.tolist(), 0 if sampled.logprobs is None else len(sampled.logprobs)


@pytest.mark.parametrize("name", SCALARS)
def test_each_scalar_parameter_has_an_effect(name: str) -> None:
    companions = COMPANIONS.get(name, {})
    assert sample_with([{name: EXAMPLES[name], **companions}] * 64) != sample_with([companions] * 64)


@pytest.mark.parametrize("name", SCALARS)
def test_each_scalar_parameter_stays_in_its_row(name: str) -> None:
    tokens, _ = sample_with([{name: EXAMPLES[name]} if i % 2 else {} for i in range(64)])
    assert tokens[::2] == sample_with([{}] * 64)[0][::2]


@pytest.mark.usefixtures("each_way")
def test_greedy_takes_the_lowest_id_on_a_tie() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0], [1.0, 1.0, 1.0, 1.0], [-1.0, -3.0, -2.0, -1.0]])
    found = run(logits, [Sampling()] * 3)
    assert found.tokens.tolist() == found.host_tokens == [1, 0, 0]


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_equals_torch_in_every_library(dtype: torch.dtype) -> None:
    for width in (1, 15, 16, 17, 511, 512, 513, 1000, 32_000, 50_000, 51_200):  # in one piece, and in many
        logits = random_logits(9, width, seed=width).to(dtype)
        logits[1] = 0.0
        logits[2] = float("-inf")
        logits[3, width // 2] = float("nan")
        logits[4, [width // 3, width - 1]] = float("nan")
        logits[5, width - 1] = float("inf")
        logits[6, width // 4 :] = logits[6].max()
        logits[7] = float("nan")
        _, best, ids, known, _ = with_argmax(logits)
        wanted, where = logits.float().max(dim=-1)
        torch.testing.assert_close(best.float(), wanted, rtol=0, atol=0, equal_nan=True)
        assert ids.tolist() == where.tolist()
        assert known is not None
        assert repr(known) == repr((best.tolist(), ids.tolist()))


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = torch.zeros(3, 8)
    s = Sampling(presence_penalty=0.5, frequency_penalty=0.25, logprobs=8)
    history = [([1, 1, 2, 3, 3, 3, 4], 3), ([1, 1, 2], 3), ([7, 6], 1)]
    found = run(logits, [s, s, s], history)
    changed = [
        torch.tensor([0, 0, 0, -1.25, -0.75, 0, 0, 0]),
        torch.zeros(8),
        torch.tensor([0, 0, 0, 0, 0, 0, -0.75, 0]),
    ]
    for row, wanted in enumerate(changed):
        torch.testing.assert_close(all_logprobs(found, row, 8), torch.log_softmax(wanted, dim=-1))


def test_bias_banned_and_allowed_ids() -> None:
    logits = torch.tensor([[9.0, 1.0, 2.0, 3.0, 4.0, 5.0]]).repeat(6, 1)
    parameters = [
        Sampling(banned_ids=(0, 5)),
        Sampling(allowed_ids=(1, 2)),
        Sampling(allowed_ids=(1, 2), banned_ids=(2,)),
        Sampling(logit_bias=((3, 100.0), (0, -100.0))),
        Sampling(allowed_ids=(1, 3), logit_bias=((1, 50.0),)),
        Sampling(),
    ]
    assert run(logits, parameters).tokens.tolist() == [4, 2, 1, 3, 1, 0]


def test_stop_tokens_are_banned_until_min_tokens() -> None:
    logits = torch.tensor([[0.0, 1.0, 9.0]]).repeat(3, 1)
    s = Sampling(stop_ids=(2,), min_tokens=2)
    history = [([0, 0], 2), ([0, 0, 1], 2), ([0, 0, 1, 1], 2)]
    assert run(logits, [s] * 3, history).tokens.tolist() == [1, 1, 2]


def test_row_without_allowed_tokens_is_stuck() -> None:
    found = run(torch.zeros(2, 4), [Sampling(allowed_ids=(1,), banned_ids=(1,), temperature=1.0), Sampling()])
    assert found.bad is not None
    assert not found.bad.any()
    assert found.stuck is not None
    assert found.stuck.tolist() == [True, False]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [5000, 5120])
def test_bad_row_does_not_affect_other_rows(poison: float, dtype: torch.dtype, vocabulary: int) -> None:
    logits = random_logits(4, vocabulary).to(dtype)
    parameters = [Sampling(temperature=1.0, top_p=0.9, seed=i, logprobs=2) for i in range(4)]
    clean = run(logits, parameters)
    logits[1, 4321] = poison
    found = run(logits, parameters)
    assert found.bad.tolist() == [False, True, False, False]
    assert found.tokens.tolist() == [clean.tokens[0].item(), 0, clean.tokens[2].item(), clean.tokens[3].item()]
    assert run(logits, [Sampling()] * 4).bad.tolist() == [False, True, False, False]


def test_minus_infinity_logits_do_not_make_a_row_bad() -> None:
    logits = random_logits(2, 20)
    logits[:, 7:] = -math.inf
    found = run(logits, [Sampling(temperature=1.0, seed=3), Sampling()])
    assert not found.bad.any()
    assert found.tokens.max() < 7


def test_logprobs_precede_temperature_and_truncation() -> None:
    logits = random_logits(3, 100)
    parameters = [
        Sampling(temperature=0.3, top_k=1, logprobs=5),
        Sampling(),
        Sampling(temperature=1.5, top_p=0.5, seed=9, logprobs=0),
    ]
    found = run(logits, parameters)
    wanted = torch.log_softmax(logits, dim=-1)
    assert found.logprobs is not None
    assert found.top_ids is not None
    torch.testing.assert_close(found.logprobs, wanted[[0, 2], found.tokens[[0, 2]]])
    assert found.top_ids[0].tolist() == wanted[0].topk(5).indices.tolist()


def test_logprobs_of_given_ids_follow_bans_and_precede_truncation() -> None:
    logits = random_logits(3, 100)
    parameters = [
        Sampling(temperature=0.3, top_k=1, logprobs=0, logprob_ids=(9, 4, 9), banned_ids=(4,)),
        Sampling(logprobs=2),
        Sampling(logprobs=0, logprob_ids=(99,)),
    ]
    found = run(logits, parameters)
    changed = logits.clone()
    changed[0, 4] = -math.inf
    wanted = torch.log_softmax(changed, dim=-1)
    assert found.id_logprobs is not None
    torch.testing.assert_close(found.id_logprobs, wanted[[0, 0, 0, 2], [9, 4, 9, 99]])


def test_equal_logprobs_are_sorted_by_id() -> None:
    found = run(torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0]]), [Sampling(logprobs=4)])
    assert found.top_ids is not None
    assert found.top_ids.tolist() == [[1, 2, 4, 0]]


def test_noise_is_uniform_over_seeds_and_positions() -> None:
    seeds, positions = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(500, dtype=np.int64))
    noise = uniform(seeds.ravel(), positions.ravel())
    assert 0 <= noise.min() < 1e-4
    assert 1 - 1e-4 < noise.max() < 1
    assert len(np.unique(noise)) == noise.size
    assert chi_square(np.histogram(noise, bins=64, range=(0, 1))[0], np.full(64, 1 / 64)) < bound(63)
    grid = noise.reshape(500, 200)
    for a, b in ((grid[:, 1:], grid[:, :-1]), (grid[1:], grid[:-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.015


def test_noise_never_changes() -> None:
    """Stored seeds must give the same answers in every release: a change here breaks what users rely on."""
    noise = uniform(np.array([0, 1, 2**64 - 1], np.uint64), np.array([0, 1, 2**20], np.int64))
    assert noise.tolist() == [0.28176129772258496, 0.36818951565166946, 0.1602476128897703]


def chi_square(observed: Any, probabilities: Any) -> float:
    expected = np.asarray(probabilities) * observed.sum()
    return float(((observed - expected) ** 2 / expected).sum())


def bound(degrees: int) -> float:
    """Exceeded by chance about once in a hundred thousand (Wilson and Hilferty's approximation)."""
    return degrees * (1 - 2 / (9 * degrees) + 4.3 * math.sqrt(2 / (9 * degrees))) ** 3


@pytest.mark.parametrize(
    "s",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.7, top_k=6),
        Sampling(temperature=1.3, top_p=0.8),
        Sampling(temperature=1.0, min_p=0.1),
        Sampling(temperature=2.0, top_k=9, top_p=0.9, min_p=0.05),
    ],
    ids=lambda s: f"t{s.temperature}k{s.top_k}p{s.top_p}m{s.min_p}",
)
def test_draws_follow_the_distribution(s: Sampling) -> None:
    logits = random_logits(1, 12, seed=4) / 2
    draws = 10_000
    tokens = run(logits.repeat(draws, 1), [replace(s, seed=i) for i in range(draws)]).tokens
    observed = torch.bincount(tokens, minlength=12).numpy()
    probabilities = by_warpers(logits, s)[0].double().numpy()
    assert (observed[probabilities == 0] == 0).all()
    kept = probabilities > 0
    assert chi_square(observed[kept], probabilities[kept] / probabilities.sum()) < bound(int(kept.sum()) - 1)


def test_draws_of_one_seed_over_positions_follow_the_distribution() -> None:
    logits = random_logits(1, 12, seed=4) / 2
    history = [([0] * n, 1) for n in range(1, 3001)]
    tokens = run(logits.repeat(3000, 1), [Sampling(temperature=1.0, seed=77)] * 3000, history).tokens
    probabilities = torch.softmax(logits[0].double(), dim=-1).numpy()
    assert chi_square(torch.bincount(tokens, minlength=12).numpy(), probabilities) < bound(11)


@pytest.mark.parametrize("vocabulary", [12, 6000])
def test_rows_are_independent(vocabulary: int) -> None:
    """Rows with any of all parameters, at any position: what is drawn together is what each row draws alone."""
    rng = random.Random(vocabulary)
    parameters = [drawn_sampling(rng) for _ in range(80)]
    history = []
    for _ in parameters:
        said = [rng.randrange(12) for _ in range(rng.randint(2, 50))]
        history.append((said, rng.randint(1, len(said))))
    logits = random_logits(len(parameters), vocabulary)
    together = run(logits, parameters, history).tokens.tolist()
    assert together == [
        run(logits[i : i + 1], [parameters[i]], [history[i]]).tokens.item() for i in range(len(parameters))
    ]


def drawn_sampling(rng: random.Random) -> Sampling:
    """Return parameters of which each changes the row's distribution, or is neutral."""
    choices: dict[str, tuple[Any, ...]] = {
        "temperature": (0.0, 0.5, 1.0, 5.0),
        "top_k": (0, 1, 40),
        "top_p": (1.0, 0.9, 0.99999),
        "min_p": (0.0, 0.02),
        "typical_p": (1.0, 0.7),
        "top_n_sigma": (0.0, 1.5),
        "dynatemp_range": (0.0, 0.4),
        "xtc_probability": (0.0, 0.5),
        "repetition_penalty": (1.0, 1.4),
        "frequency_penalty": (0.0, 0.5),
        "dry_multiplier": (0.0, 0.8),
        "dry_breaker_sequences": ((), ((1, 2), (3, 4, 5))),
        "no_repeat_ngram_size": (0, 3),
        "bad_words": ((), ((1, 2), (3, 4, 5))),
        "begin_banned_ids": ((), (1, 2, 3)),
        "forced_first_id": (-1, -1, 7),
        "exponential_decay_factor": (1.0, 1.5),
        "logprobs": (-1, 3),
    }
    values = {name: rng.choice(values) for name, values in choices.items()}
    return Sampling(**values, stop_ids=(9,), seed=rng.getrandbits(64))


def test_draw_inverts_the_running_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.array([0.0, 0.2499, 0.25, 0.4999, 0.5, 1 - 2**-52])
    monkeypatch.setattr(sampling_metadata, "uniform", lambda *_: noise)
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, 0.0, 0.0, -math.inf]])
    found = run(logits.repeat(len(noise), 1), [Sampling(temperature=1.0)] * len(noise))
    assert found.tokens.tolist() == [1, 1, 3, 3, 4, 5]


def test_draw_over_a_wide_row_equals_a_plain_running_sum() -> None:
    logits, seeds = random_logits(20, 3001), range(20)
    running = torch.softmax(logits, dim=-1).double().cumsum(dim=-1)
    noise = torch.from_numpy(uniform(np.arange(20, dtype=np.uint64), np.ones(20, np.int64)))[:, None]
    wanted = (running <= noise * running[:, -1:]).sum(dim=-1)
    assert run(logits, [Sampling(temperature=1.0, seed=seed) for seed in seeds]).tokens.tolist() == wanted.tolist()


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("vocabulary", [256, 100])
def test_argmax_of_zero_rows(vocabulary: int) -> None:
    """The first chunks of a prompt alone are such a step."""
    found = with_argmax(torch.empty(0, vocabulary))
    assert found.max_values.shape == found.max_ids.shape == (0,)
