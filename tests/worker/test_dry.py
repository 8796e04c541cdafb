"""DRY equals slow Python written from llama.cpp's definition."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sampling import all_logprobs, random_logits, run
from support.tensor_work import count_elements

from lineclear.wire.sampling import Sampling
from lineclear.worker.sampling.repetitions import MAX_REPEAT

VOCABULARY = 6
tokens = st.integers(0, VOCABULARY - 1)
samplings = st.builds(
    Sampling,
    dry_multiplier=st.sampled_from([0.5, 0.8, 3.0]),
    dry_base=st.sampled_from([1.0, 1.75, 3.0]),
    dry_allowed_length=st.integers(1, 4),
    dry_penalty_last_n=st.sampled_from([-1, -1, 0, 3, 10, 1000]),
    dry_breaker_ids=st.lists(tokens, max_size=1).map(tuple),
    dry_breaker_sequences=st.lists(st.lists(tokens, min_size=2, max_size=4).map(tuple), max_size=2).map(tuple),
    logprobs=st.just(VOCABULARY),
)


def by_llama_cpp(said: list[int], s: Sampling) -> dict[int, float]:
    """Return the penalty of each token."""
    window = len(said) if s.dry_penalty_last_n < 0 else min(len(said), s.dry_penalty_last_n)
    last = said[len(said) - window :]

    def at(distance: int) -> int:
        return last[len(last) - 1 - distance]

    limit = window
    breakers = [(i,) for i in s.dry_breaker_ids] + list(s.dry_breaker_sequences)
    for distance in range(window):
        found = [
            len(b)
            for b in breakers
            if len(b) <= distance + 1 and all(at(distance - offset) == b[offset] for offset in range(len(b)))
        ]
        if found:
            limit = distance - (max(found) - 1)
            break
    longest: dict[int, int] = {}
    for lag in range(1, window):
        length = 0
        while length + lag < window and length < MAX_REPEAT and at(length) == at(length + lag):
            length += 1
        length = min(length, limit)
        if length >= s.dry_allowed_length:
            token = at(lag - 1)
            longest[token] = max(longest.get(token, 0), length)
    return {
        token: s.dry_multiplier * s.dry_base ** (length - s.dry_allowed_length)
        for token, length in longest.items()
        if token not in s.dry_breaker_ids
    }


def check(said: list[list[int]], parameters: list[Sampling]) -> None:
    """Compare the probabilities of each text's next token."""
    logits = random_logits(len(said), VOCABULARY)
    found = run(logits, parameters, [(text, 1) for text in said])
    for row, text in enumerate(said):
        wanted = logits[row].double()
        for token, penalty in by_llama_cpp(text, parameters[row]).items():
            wanted[token] -= penalty
        probabilities = torch.softmax(wanted, dim=-1).float()
        torch.testing.assert_close(all_logprobs(found, row, VOCABULARY).exp(), probabilities, rtol=1e-4, atol=1e-6)


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_penalty_equals_llama_cpp(data: st.DataObject) -> None:
    said = data.draw(st.lists(st.lists(tokens, min_size=1, max_size=40), min_size=1, max_size=5))
    check(said, [data.draw(samplings) for _ in said])


@pytest.mark.parametrize("length", [1, 2, 63, 64, 127, 128, 129, 130, 200, 400])
def test_long_repetitions_equal_llama_cpp(length: int) -> None:
    for period in (1, 2, 63, 64, 65, 127, 128, 129):
        rng = random.Random(1000 * period + length)
        pattern = [rng.randrange(VOCABULARY) for _ in range(period)]
        said = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(20))] + (pattern * length)[:length]
        said[-1 - rng.randrange(len(said))] = rng.randrange(VOCABULARY)
        breakers = ((), (tuple(said[:20]),), (tuple(said[-130:-110]), tuple(said[-140:-130])))[length % 3]
        sampling = Sampling(
            dry_multiplier=0.5,
            dry_base=1.02,
            dry_allowed_length=1,
            dry_breaker_sequences=tuple(breaker for breaker in breakers if len(breaker) > 1),
            logprobs=VOCABULARY,
        )
        check([said, said + said[:7]], [sampling] * 2)


@pytest.mark.parametrize("num_breakers", [0, 16])
def test_work_does_not_depend_on_the_tokens(num_breakers: int) -> None:
    sequences = tuple((1,) * 19 + (2 + number,) for number in range(num_breakers))
    sampling = Sampling(dry_multiplier=1.0, dry_allowed_length=1, dry_breaker_sequences=sequences)
    size = 8192
    rng = random.Random(1)
    repeated, mixed = [1] * size, [rng.randrange(32) for _ in range(size)]
    work = [
        count_elements(lambda said=said: run(torch.zeros(1, 32), [sampling], [(said, 1)])) for said in (repeated, mixed)
    ]
    assert work[0] == work[1]
    assert work[0] < 120 * size  # about as many passes over the context, however long the repetitions are


def test_example_by_hand() -> None:
    # a b c ... a b c: the next would be d, 3 tokens repeat, 2 are allowed: 0.8 * 1.75.
    sampling = Sampling(dry_multiplier=0.8, dry_base=1.75, dry_allowed_length=2, logprobs=8)
    found = run(torch.zeros(1, 8), [sampling], [([1, 2, 3, 4, 5, 1, 2, 3], 4)])
    changed = torch.zeros(8)
    changed[4] = -0.8 * 1.75
    torch.testing.assert_close(all_logprobs(found, 0, 8), torch.log_softmax(changed, dim=-1))


def test_long_repetition_stays_finite() -> None:
    sampling = Sampling(dry_multiplier=100.0, dry_base=10.0, logprobs=1)
    found = run(torch.zeros(1, 8), [sampling], [([1] * 3000, 1)])
    assert found.bad is not None
    assert not found.bad.any()
    assert found.tokens.tolist() == [0]
    assert found.logprobs is not None
    assert math.isfinite(found.logprobs.item())
