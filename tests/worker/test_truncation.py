"""Truncations equal transformers' warpers, or slow Python written from llama.cpp's definitions."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sampling import random_logits, run
from torch import Tensor

from lineclear.wire.sampling import Sampling
from lineclear.worker.sampling import truncation
from lineclear.worker.sampling.sampling_metadata import SamplingTable
from lineclear.worker.sampling.truncation import truncated_weights

BASE = Sampling(temperature=1.0)


def distributions(logits: Tensor, parameters: list[Sampling], position: int = 1) -> Tensor:
    """Return what the sampler draws from; every row has a truncation."""
    table = SamplingTable(len(parameters), logits.shape[-1], torch.device("cpu"))
    for slot, sampling in enumerate(parameters):
        table.set_slot(slot, sampling)
    slots = list(range(len(parameters)))
    (draws,) = table.select(slots, [position] * len(slots), np.ones(len(slots), np.int64)).draws
    assert draws.rows.tolist() == slots
    weights = truncated_weights(logits.clone(), draws)
    return weights / weights.sum(dim=-1, keepdim=True)


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [w / math.fsum(weights) for w in weights]


def by_warpers(logits: Tensor, s: Sampling) -> Tensor:
    warpers: list[Callable[..., Tensor]] = [tf.TemperatureLogitsWarper(s.temperature)]
    if s.top_k:
        warpers.append(tf.TopKLogitsWarper(s.top_k))
    if s.top_p < 1:
        warpers.append(tf.TopPLogitsWarper(s.top_p))
    if s.min_p:
        warpers.append(tf.MinPLogitsWarper(s.min_p))
    if s.typical_p < 1:
        warpers.append(tf.TypicalLogitsWarper(s.typical_p))
    for warper in warpers:
        logits = warper(torch.zeros(1, 1, dtype=torch.int64), logits)
    return torch.softmax(logits, dim=-1)


@pytest.mark.parametrize("vocabulary", [50, 6000])
def test_truncations_together_equal_transformers(vocabulary: int) -> None:
    rng = random.Random(vocabulary)
    parameters = [
        Sampling(
            temperature=rng.choice([0.01, 0.3, 0.8, 1.0, 2.0, 10.0]),
            top_k=rng.choice([0, 0, 1, 2, 20, 300, vocabulary]),
            top_p=rng.choice([1.0, 1.0, 0.01, 0.5, 0.9, 0.999]),
            min_p=rng.choice([0.0, 0.0, 0.05, 0.5, 1.0]),
            typical_p=rng.choice([1.0, 1.0, 0.1, 0.2, 0.5, 0.9, 0.99]),
        )
        for _ in range(120)
    ]
    parameters = [s for s in parameters if 0 < s.top_k < vocabulary or s.top_p < 1 or s.min_p or s.typical_p < 1]
    logits = random_logits(len(parameters), vocabulary)
    found = distributions(logits, parameters)
    for row, s in enumerate(parameters):
        wanted = by_warpers(logits[row : row + 1], s)[0]
        assert torch.equal(found[row] > 0, wanted > 0), s
        torch.testing.assert_close(found[row], wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("scale", [0.0, 0.5, 2.0, 6.0])
def test_typical_p_of_a_large_vocabulary_is_found_without_sorting(scale: float) -> None:
    """From one token to all of them: a few hundred candidates, or the radix selection."""
    parameters = [replace(BASE, typical_p=p) for p in (0.01, 0.3, 0.9, 0.999)]
    logits = torch.randn(1, 9000, generator=torch.Generator().manual_seed(3)).mul(scale).repeat(4, 1)
    found = distributions(logits, parameters)
    for row, s in enumerate(parameters):
        assert torch.equal(found[row] > 0, by_warpers(logits[:1], s)[0] > 0), s


@pytest.mark.parametrize("vocabulary", [3000, 9000])
@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.5), (700, 0.5)])
def test_tokens_that_tie_are_kept(top_k: int, top_p: float, vocabulary: int) -> None:
    logits = torch.full((1, vocabulary), -math.inf)
    logits[:, 100:1100] = 0.0
    found = distributions(logits, [replace(BASE, top_k=top_k, top_p=top_p)])
    assert (found[0] > 0).nonzero()[:, 0].tolist() == list(range(100, 1100))


def test_search_of_a_large_vocabulary_equals_sorting() -> None:
    """Tokens that cannot be drawn make a vocabulary large, which is searched and not sorted."""
    rng = random.Random(0)
    choices = [(k, p) for k in (0, 1, 2, 280) for p in (1e-6, 0.3, 0.9, 0.999999, 1.0) if k or p < 1.0]
    for seed in range(100):
        size = rng.choice([300, 1000, 3000])
        logits = random_logits(1, size, seed) * rng.choice([0, 0.1, 2])
        top_k, top_p = rng.choice(choices)
        sampling = replace(BASE, top_k=top_k, top_p=top_p)
        searched = distributions(torch.nn.functional.pad(logits, (0, 5000), value=-math.inf), [sampling])
        assert torch.equal(searched[:, :size] > 0, distributions(logits, [sampling]) > 0), (seed, sampling)


def test_bisection_on_other_devices_keeps_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random rows, rows of equal tokens, and one that is not finite."""
    rng = random.Random(1)
    parameters = [
        replace(
            BASE,
            top_k=rng.choice([0, 0, 1, 2, 40, 700]),
            top_p=rng.choice([1e-6, 0.3, 0.9, 0.999999, 1.0]),
            typical_p=rng.choice([1.0, 1.0, 0.2, 0.95]),
            min_p=0.001,
        )
        for _ in range(200)
    ]
    logits = random_logits(len(parameters), 3000) * torch.tensor([[rng.choice([0, 0.1, 1, 5])] for _ in parameters])
    logits[:, 7::5] = -math.inf
    logits[rng.randrange(200)] = math.nan
    by_sorting = distributions(logits, parameters)
    monkeypatch.setattr(truncation, "is_on_host", lambda tensor: False)
    torch.testing.assert_close(distributions(logits, parameters), by_sorting, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan])
@pytest.mark.parametrize("sampling", [replace(BASE, top_k=300), replace(BASE, top_k=300, typical_p=0.5)])
def test_row_without_a_token_leaves_the_others_alone(value: float, sampling: Sampling) -> None:
    """Its NaN are negative integers to the radix selection."""
    logits = random_logits(2, 6000)
    logits[0] = value
    sampled = run(logits, [sampling, sampling])
    assert sampled.bad is not None
    assert sampled.bad.tolist() == [True, False]
    assert sampled.tokens[1] == run(logits[1:], [sampling]).tokens[0]


logit_lists = st.lists(
    st.floats(-20, 20, width=32, allow_subnormal=False) | st.just(-math.inf), min_size=2, max_size=40
).filter(lambda x: sum(map(math.isfinite, x)) >= 2)


def by_sigma(logits: list[float], count: float) -> set[int]:
    """Return the kept ids by llama.cpp's top-n-sigma."""
    finite = [x for x in logits if x != -math.inf]
    mean = math.fsum(finite) / len(finite)
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in finite) / len(finite))
    return {i for i, x in enumerate(logits) if x != -math.inf and x >= max(finite) - count * deviation}


@settings(deadline=None, max_examples=200)
@given(logits=logit_lists, count=st.floats(0.0625, 5, width=32), temperature=st.sampled_from([0.5, 1.0, 3.0]))
def test_top_n_sigma_equals_llama_cpp_at_any_temperature(logits: list[float], count: float, temperature: float) -> None:
    found = distributions(torch.tensor([logits]), [replace(BASE, temperature=temperature, top_n_sigma=count)])[0]
    kept = {i for i, p in enumerate(found.tolist()) if p > 0}
    surely, perhaps = by_sigma(logits, count * 0.9999), by_sigma(logits, count * 1.0001)
    possible = {i for i, p in enumerate(torch.softmax(torch.tensor(logits) / temperature, -1).tolist()) if p > 0}
    assert surely & possible <= kept <= perhaps


def by_xtc(probabilities: list[float], threshold: float) -> set[int]:
    """Return the kept ids by llama.cpp's XTC, when it acts."""
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
    above = [i for i in order if probabilities[i] >= threshold]
    removed = set(above[:-1])
    return {i for i in order if i not in removed and probabilities[i] > 0}


@settings(deadline=None, max_examples=200)
@given(
    logits=st.lists(st.integers(-300, 300), min_size=2, max_size=40, unique=True),
    threshold=st.sampled_from([0.01, 0.05, 0.1, 0.3, 0.5]),
    top_k=st.sampled_from([0, 3, 10]),
)
def test_xtc_equals_llama_cpp(logits: list[int], threshold: float, top_k: int) -> None:
    row = [x / 100 for x in logits]  # distinct probabilities: llama.cpp's choice among equal ones depends on its sort
    sampling = replace(BASE, xtc_probability=1.0, xtc_threshold=threshold, top_k=top_k)
    found = distributions(torch.tensor([row]), [sampling])[0].tolist()
    before = by_warpers(torch.tensor([row]), replace(BASE, top_k=top_k))[0].tolist()
    if all(abs(p - threshold) > 1e-6 for p in before):
        assert {i for i, p in enumerate(found) if p > 0} == by_xtc(before, threshold)


def test_xtc_keeps_all_tokens_that_tie() -> None:
    sampling = replace(BASE, xtc_probability=1.0, xtc_threshold=0.1)
    found = distributions(torch.tensor([[3.0, 2.0, 2.0, 0.0]]), [sampling])[0]
    assert (found > 0).tolist() == [False, True, True, True]


def test_xtc_acts_with_its_probability_by_seed_and_position() -> None:
    logits = torch.tensor([[2.0, 1.9, 0.0]])
    parameters = [replace(BASE, seed=seed, xtc_probability=0.3, xtc_threshold=0.2) for seed in range(3000)]
    acted = [distributions(logits.repeat(3000, 1), parameters, position)[:, 0] == 0 for position in (5, 6)]
    for column in acted:
        assert 0.26 < column.float().mean() < 0.34
    both = (acted[0] & acted[1]).float().mean()
    assert 0.07 < both < 0.11, "positions are not independent"
    again = distributions(logits.repeat(3000, 1), parameters, 5)[:, 0] == 0
    assert torch.equal(again, acted[0])


def test_xtc_noise_is_not_the_noise_of_the_draw() -> None:
    """Else the tokens drawn after an exclusion would have one end of the distribution only."""
    logits = torch.tensor([[3.0, 2.9] + [1.0] * 30]).repeat(4000, 1)
    parameters = [replace(BASE, seed=seed, xtc_probability=0.5, xtc_threshold=0.05) for seed in range(4000)]
    acted = distributions(logits, parameters)[:, 0] == 0
    tokens = run(logits, parameters).tokens[acted]
    wanted = distributions(logits[:1], [replace(parameters[0], xtc_probability=1.0)])[0]
    share = torch.bincount(tokens, minlength=32) / len(tokens)
    assert (share - wanted).abs().max() < 0.03


def by_dynamic_temperature(logits: list[float], s: Sampling) -> list[float]:
    """Return the distribution by llama.cpp's temp_ext."""
    finite = [x for x in logits if x != -math.inf]
    entropy = -math.fsum(p * math.log(p) for p in softmax(finite) if p > 0)
    lowest, highest = max(0.0, s.temperature - s.dynatemp_range), s.temperature + s.dynatemp_range
    share = min(1.0, entropy / math.log(len(finite))) ** s.dynatemp_exponent
    temperature = max(0.01, lowest + (highest - lowest) * share)
    return softmax([x / temperature for x in logits])


@settings(deadline=None, max_examples=200)
@given(
    logits=logit_lists,
    temperature=st.sampled_from([0.1, 0.7, 1.0, 1.5]),
    reach=st.sampled_from([0.05, 0.5, 1.5]),
    exponent=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_dynamic_temperature_equals_llama_cpp(
    logits: list[float], temperature: float, reach: float, exponent: float
) -> None:
    sampling = Sampling(temperature=temperature, dynatemp_range=reach, dynatemp_exponent=exponent)
    found = distributions(torch.tensor([logits]), [sampling])[0]
    wanted = torch.tensor(by_dynamic_temperature(logits, sampling))
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=1e-3)
