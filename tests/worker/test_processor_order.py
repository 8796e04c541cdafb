"""All changes of logits together equal the reference implementations, one after the other in the documented order."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as tf
from support.sampling import all_logprobs, random_logits, run
from torch import Tensor
from worker.test_dry import by_llama_cpp

from lineclear.wire.sampling import Sampling

VOCABULARY, ROWS = 24, 60


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
        **maybe(exponential_decay_start=2, exponential_decay_factor=1.5),
        **maybe(no_repeat_ngram_size=2),
        **maybe(bad_words=(ids(2), ids(3))),
        **maybe(allowed_ids=ids(16)),
        **maybe(banned_ids=ids(3)),
        **maybe(min_tokens=rng.choice([1, 30])),
        stop_ids=ids(2),
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
    if s.bad_words and output:
        logits = tf.NoBadWordsLogitsProcessor([list(word) for word in s.bad_words])(torch.tensor([output]), logits)
    if s.allowed_ids:
        others = sorted(set(range(VOCABULARY)) - set(s.allowed_ids))
        logits = tf.SuppressTokensLogitsProcessor(others)(context, logits)
    if s.banned_ids:
        logits = tf.SuppressTokensLogitsProcessor(list(s.banned_ids))(context, logits)
    least = tf.MinNewTokensLengthLogitsProcessor(prompt_len, s.min_tokens, list(s.stop_ids))
    changed: Tensor = least(context, logits)
    return changed


@pytest.mark.parametrize("seed", range(8))
def test_all_changes_together_equal_the_references_in_order(seed: int) -> None:
    rng = random.Random(seed)
    parameters = [drawn(rng) for _ in range(ROWS)]
    history = [([rng.randrange(VOCABULARY) for _ in range(rng.randint(4, 30))], rng.randint(1, 4)) for _ in parameters]
    logits = random_logits(ROWS, VOCABULARY, seed)
    sampled = run(logits, [replace(s, logprobs=VOCABULARY) for s in parameters], history)
    compared = 0
    for row, (sampling, (said, prompt_len)) in enumerate(zip(parameters, history, strict=True)):
        wanted = by_references(logits[row : row + 1].clone(), said, prompt_len, sampling)
        if torch.isfinite(wanted).any():
            found = all_logprobs(sampled, row, VOCABULARY)
            torch.testing.assert_close(found, torch.log_softmax(wanted, dim=-1)[0], rtol=1e-4, atol=1e-4)
            assert sampled.tokens[row] == wanted.argmax(), "greedy takes the highest changed logit"
            compared += 1
    assert compared > ROWS // 2
