"""Changes of logits by the context mean what the reference implementations mean, in the documented order."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from support.sampling import History, all_logprobs, random_logits, run
from support.tensor_work import count_elements
from torch import Tensor
from worker.test_dry import by_llama_cpp
from worker.test_sampler import drawn_sampling

from lineclear.wire.sampling import Sampling
from lineclear.worker.sampling.logits import with_argmax
from lineclear.worker.sampling.sampler import sample
from lineclear.worker.sampling.sampling_metadata import SamplingTable

VOCABULARY = 14
"""Few tokens, so that sequences repeat."""


def drawn(rng: random.Random) -> Sampling:
    """Return parameters of which each is set in half of the rows."""

    def maybe(**fields: Any) -> dict[str, Any]:
        return fields if rng.random() < 0.5 else {}

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.sample(range(VOCABULARY), count))

    return Sampling(
        **maybe(logit_bias=tuple((i, rng.uniform(-5, 5)) for i in ids(6))),
        **maybe(repetition_penalty=rng.choice([0.5, 1.3, 2.0])),
        **maybe(frequency_penalty=rng.choice([-1.0, 0.5]), presence_penalty=rng.choice([0.0, 1.0])),
        **maybe(dry_multiplier=2.0, dry_allowed_length=1, dry_breaker_ids=ids(1)),
        **maybe(exponential_decay_start=rng.randint(0, 30), exponential_decay_factor=rng.uniform(1, 3)),
        **maybe(no_repeat_ngram_size=rng.randint(1, 5)),
        **maybe(bad_words=tuple({tuple(rng.choices(range(VOCABULARY), k=rng.randint(2, 5))) for _ in range(5)})),
        **maybe(allowed_ids=ids(11)),
        **maybe(banned_ids=ids(2)),
        **maybe(begin_banned_ids=ids(2)),
        **maybe(min_tokens=rng.choice([1, 30])),
        stop_ids=ids(rng.randint(1, 3)),
    )


def by_references(logits: Tensor, said: list[int], prompt_len: int, s: Sampling) -> Tensor:
    """Return the changed logits [1, vocabulary]."""
    context, output = torch.tensor([said]), said[prompt_len:]
    for token, bias in s.logit_bias:
        logits[0, token] += bias
    logits = tf.RepetitionPenaltyLogitsProcessor(s.repetition_penalty)(context, logits)
    for token in set(output):
        logits[0, token] -= s.frequency_penalty * output.count(token) + s.presence_penalty
    if s.dry_multiplier:
        for token, penalty in by_llama_cpp(said, s).items():
            logits[0, token] -= penalty
    if s.exponential_decay_factor > 1:
        rule = s.exponential_decay_start, s.exponential_decay_factor
        logits = tf.ExponentialDecayLengthPenalty(rule, list(s.stop_ids), prompt_len)(context, logits)
    if s.no_repeat_ngram_size:
        logits = tf.NoRepeatNGramLogitsProcessor(s.no_repeat_ngram_size)(context, logits)
    if s.bad_words and output:  # transformers looks at the prompt too; here, as in vLLM, a word must be in the output
        logits = tf.NoBadWordsLogitsProcessor([list(word) for word in s.bad_words])(torch.tensor([output]), logits)
    if s.allowed_ids:
        others = sorted(set(range(VOCABULARY)) - set(s.allowed_ids))
        logits = tf.SuppressTokensLogitsProcessor(others)(context, logits)
    if s.banned_ids:
        logits = tf.SuppressTokensLogitsProcessor(list(s.banned_ids))(context, logits)
    if s.begin_banned_ids:
        logits = tf.SuppressTokensAtBeginLogitsProcessor(sorted(s.begin_banned_ids), prompt_len)(context, logits)
    least = tf.MinNewTokensLengthLogitsProcessor(prompt_len, s.min_tokens, list(s.stop_ids))
    changed: Tensor = least(context, logits)
    return changed


def check(parameters: list[Sampling], history: History, seed: int) -> int:
    """Compare each row with the references, which get one sequence at a time. Return the number of compared rows."""
    logits = random_logits(len(parameters), VOCABULARY, seed)
    sampled = run(logits, [replace(s, logprobs=VOCABULARY) for s in parameters], history)
    compared = 0
    for row, (sampling, (said, prompt_len)) in enumerate(zip(parameters, history, strict=True)):
        wanted = by_references(logits[row : row + 1].clone(), said, prompt_len, sampling)
        if torch.isfinite(wanted).any():  # else the row is bad, and its logprobs mean nothing
            found = all_logprobs(sampled, row, VOCABULARY)
            torch.testing.assert_close(found, torch.log_softmax(wanted, dim=-1)[0], rtol=1e-4, atol=1e-4)
            assert sampled.tokens[row] == wanted.argmax(), "greedy takes the highest changed logit"
            compared += 1
    return compared


@pytest.mark.parametrize("seed", range(12))
def test_all_changes_together_equal_the_references_in_order(seed: int) -> None:
    rng = random.Random(seed)
    parameters = [drawn(rng) for _ in range(60)]
    history = []
    for _ in parameters:
        said = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 40))]
        history.append((said, rng.choice([len(said), rng.randint(1, len(said))])))
    assert check(parameters, history, seed) > 30


@pytest.mark.parametrize("sizes", [(1, 2, 40), (17, 18, 3), (64, 65, 66), (99, 100, 1)])
def test_long_ngrams_equal_transformers(sizes: tuple[int, ...]) -> None:
    rng = random.Random(sum(sizes))
    history: History = []
    for size in sizes:
        pattern = [rng.randrange(VOCABULARY) for _ in range(rng.choice((1, 5, size + 3)))]
        said = (pattern * 150)[: size + rng.randrange(150)] or [1]
        said[rng.randrange(len(said) // 2 + 1)] = rng.randrange(VOCABULARY)
        history.append((said, 1))
    check([Sampling(no_repeat_ngram_size=size) for size in sizes], history, 0)


def test_work_of_ngrams_is_bounded() -> None:
    sampling, said = Sampling(no_repeat_ngram_size=100), [1] * 8192
    work = count_elements(lambda: run(torch.zeros(1, VOCABULARY), [sampling], [(said, 1)]))
    assert work < 120 * len(said)  # about as many passes over the context, not several for each token of an n-gram


@pytest.mark.parametrize(
    "parameters",
    [
        {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1},
        {"no_repeat_ngram_size": 16},
        {"bad_words": tuple((number,) * 64 for number in range(256))},
        {"logit_bias": tuple((number, 1.0) for number in range(300))},
        {"allowed_ids": tuple(range(4096))},
        {"banned_ids": tuple(range(4096))},
        {"logprobs": 20, "logprob_ids": tuple(range(128))},
        {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 1.0, "typical_p": 0.5, "top_n_sigma": 1.0, "xtc_probability": 1.0},
    ],
    ids=lambda parameters: "-".join(parameters),
)
def test_work_at_the_bounds_is_a_few_passes(parameters: dict[str, Any]) -> None:
    size, said = 4096, [1] * 4096
    work = count_elements(lambda: run(torch.zeros(1, size), [Sampling(**parameters)], [(said, 1)]))
    passes = work / (size + len(said) + sum(map(len, parameters.get("bad_words", ()))))
    assert passes < 50, f"{passes:.0f} passes over the vocabulary, the context and the bad words"


def test_bad_word_bans_its_last_token_behind_the_others() -> None:
    word = Sampling(bad_words=((3, 4, 5), (6, 5)))
    said = [([1, 3, 4], 1), ([1, 3, 4], 2), ([3, 4], 1), ([1, 9, 6], 1), ([1, 4], 1), ([1], 1)]
    logits = torch.zeros(6, VOCABULARY)
    logits[:, 5] = 9.0
    assert run(logits, [word] * 6, said).tokens.tolist() == [0, 5, 5, 0, 5, 5]


def test_exponential_decay_stays_finite() -> None:
    logits = torch.zeros(2, VOCABULARY)
    logits[:, 2] = -9.0
    logits[1, 2] = float("-inf")  # an id that the model never produces
    sampling = Sampling(exponential_decay_factor=10.0, stop_ids=(2,), logprobs=VOCABULARY)
    sampled = run(logits, [sampling] * 2, [([1] * 90, 1)] * 2)
    assert sampled.bad is not None
    assert sampled.bad.tolist() == [False, False]
    assert sampled.tokens.tolist() == [2, 0]


def test_first_token_is_forced_and_the_next_are_free() -> None:
    history: History = [([1, 2, 3], prompt_len) for prompt_len in (3, 2, 1)]
    logits = random_logits(3, VOCABULARY)
    free = run(logits, [Sampling()] * 3, history).tokens.tolist()
    assert run(logits, [Sampling(forced_first_id=5)] * 3, history).tokens.tolist() == [5, *free[1:]]
    assert 5 not in free


def test_forced_token_overrides_bans_of_the_context() -> None:
    sampling = Sampling(forced_first_id=4, no_repeat_ngram_size=1, bad_words=((4, 4),), allowed_ids=(2, 3))
    assert run(torch.zeros(1, VOCABULARY), [sampling], [([4, 4], 2)]).tokens.tolist() == [4]


@pytest.mark.parametrize("number", range(12))
def test_positions_of_one_slot_in_one_step_equal_steps(number: int) -> None:
    """Verified drafts are several rows of one slot: each sees the tokens before its own position only."""
    rng = random.Random(number)
    sampling, said = drawn_sampling(rng), [rng.randrange(VOCABULARY) for _ in range(30)]
    logits = random_logits(10, VOCABULARY, seed=number)
    table = SamplingTable(1, VOCABULARY, torch.device("cpu"))
    table.set_slot(0, sampling)
    lengths = list(range(20, 30))
    rows = table.select([0] * 10, lengths, np.array([20], np.int64))
    together = sample(with_argmax(logits.clone()), rows, torch.tensor([said])).tokens.tolist()
    alone = [
        run(logits[i : i + 1], [sampling], [(said[:length], 20)]).tokens.item() for i, length in enumerate(lengths)
    ]
    assert together == alone
