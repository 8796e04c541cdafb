"""Changes of logits by the context mean what the reference implementations mean, and stay in their row."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sampling import History, all_logprobs, random_logits, run
from support.tensor_work import count_elements
from torch import Tensor

from lineclear.wire.sampling import Sampling
from lineclear.worker.logits import with_argmax
from lineclear.worker.sampler import sample
from lineclear.worker.sampling_metadata import SamplingTable

VOCABULARY = 12
"""Few tokens, so that sequences repeat."""
ALL = Sampling(logprobs=VOCABULARY)
tokens = st.integers(0, VOCABULARY - 1)
histories = st.lists(
    st.tuples(st.lists(tokens, min_size=1, max_size=40), st.integers(1, 40)).map(
        lambda h: (h[0], min(h[1], len(h[0])))
    ),
    min_size=1,
    max_size=6,
)


def logprobs(logits: Tensor, parameters: list[Sampling], history: History) -> list[Tensor]:
    sampled = run(logits, [replace(s, logprobs=VOCABULARY) for s in parameters], history)
    return [all_logprobs(sampled, row, VOCABULARY) for row in range(len(parameters))]


def agree(
    parameters: list[Sampling],
    history: History,
    processors: Callable[[Sampling, int], Sequence[Any]],
    *,
    output_only: bool = False,
) -> None:
    """Compare each row with transformers, which gets one sequence at a time."""
    logits = random_logits(len(parameters), VOCABULARY)
    found = logprobs(logits, parameters, history)
    for row, (sampling, (said, prompt_len)) in enumerate(zip(parameters, history, strict=True)):
        scores = logits[row : row + 1].clone()
        ids = torch.tensor([said[prompt_len:] if output_only else said], dtype=torch.int64)
        for processor in processors(sampling, prompt_len):
            scores = processor(ids, scores)
        if torch.isfinite(scores).any():  # else the row is bad, and its logprobs mean nothing
            torch.testing.assert_close(found[row], torch.log_softmax(scores, dim=-1)[0])


@settings(deadline=None, max_examples=150)
@given(history=histories, sizes=st.lists(st.integers(0, 6), min_size=6, max_size=6))
def test_no_repeat_ngram_equals_transformers(history: History, sizes: list[int]) -> None:
    parameters = [Sampling(no_repeat_ngram_size=sizes[row]) for row in range(len(history))]
    agree(
        parameters,
        history,
        lambda s, _: [tf.NoRepeatNGramLogitsProcessor(s.no_repeat_ngram_size)] if s.no_repeat_ngram_size else [],
    )


@pytest.mark.parametrize("sizes", [(1, 2, 40), (17, 18, 3), (64, 65, 66), (99, 100, 1)])
def test_long_ngrams_equal_transformers(sizes: tuple[int, ...]) -> None:
    rng = random.Random(sum(sizes))
    history: History = []
    for size in sizes:
        pattern = [rng.randrange(VOCABULARY) for _ in range(rng.choice((1, 5, size + 3)))]
        said = (pattern * 150)[: size + rng.randrange(150)] or [1]
        said[rng.randrange(len(said) // 2 + 1)] = rng.randrange(VOCABULARY)
        history.append((said, 1))
    agree(
        [Sampling(no_repeat_ngram_size=size) for size in sizes],
        history,
        lambda s, _: [tf.NoRepeatNGramLogitsProcessor(s.no_repeat_ngram_size)],
    )


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


@settings(deadline=None, max_examples=150)
@given(data=st.data(), history=histories)
def test_bad_words_equal_transformers_over_the_output(data: st.DataObject, history: History) -> None:
    """transformers looks at the prompt too; here, as in vLLM, a word must be in the output as a whole."""
    words = st.lists(st.lists(tokens, min_size=2, max_size=5).map(tuple), max_size=5, unique=True).map(tuple)
    parameters = [Sampling(bad_words=data.draw(words)) for _ in history]

    def processors(sampling: Sampling, _: int) -> list[Any]:
        return [tf.NoBadWordsLogitsProcessor([list(w) for w in sampling.bad_words])] if sampling.bad_words else []

    agree(parameters, history, processors, output_only=True)


def test_bad_word_bans_its_last_token_behind_the_others() -> None:
    word = Sampling(bad_words=((3, 4, 5), (6, 5)))
    said = [([1, 3, 4], 1), ([1, 3, 4], 2), ([3, 4], 1), ([1, 9, 6], 1), ([1, 4], 1), ([1], 1)]
    logits = torch.zeros(6, VOCABULARY)
    logits[:, 5] = 9.0
    assert run(logits, [word] * 6, said).tokens.tolist() == [0, 5, 5, 0, 5, 5]


@settings(deadline=None, max_examples=150)
@given(
    history=histories,
    start=st.integers(0, 30),
    factor=st.floats(1.0, 3.0, width=32),
    ends=st.sets(tokens, min_size=1, max_size=3),
    penalty=st.sampled_from([1.0, 1.5]),
)
def test_exponential_decay_equals_transformers(
    history: History, start: int, factor: float, ends: set[int], penalty: float
) -> None:
    sampling = Sampling(
        exponential_decay_start=start,
        exponential_decay_factor=factor,
        stop_ids=tuple(ends),
        repetition_penalty=penalty,
    )

    def processors(s: Sampling, prompt_len: int) -> list[Any]:
        decay = tf.ExponentialDecayLengthPenalty((start, factor), sorted(ends), prompt_len)
        return [tf.RepetitionPenaltyLogitsProcessor(penalty), decay]

    agree([sampling] * len(history), history, processors)


def test_exponential_decay_stays_finite() -> None:
    logits = torch.zeros(2, VOCABULARY)
    logits[:, 2] = -9.0
    logits[1, 2] = float("-inf")  # an id that the model never produces
    sampling = Sampling(exponential_decay_factor=10.0, stop_ids=(2,), logprobs=VOCABULARY)
    sampled = run(logits, [sampling] * 2, [([1] * 90, 1)] * 2)
    assert sampled.bad is not None
    assert sampled.bad.tolist() == [False, False]
    assert sampled.tokens.tolist() == [2, 0]


@settings(deadline=None, max_examples=100)
@given(history=histories, banned=st.sets(tokens, max_size=5), forced=st.none() | tokens)
def test_first_token_rules_equal_transformers(history: History, banned: set[int], forced: int | None) -> None:
    sampling = Sampling(begin_banned_ids=tuple(banned), forced_first_id=-1 if forced in (None, *banned) else forced)

    def processors(s: Sampling, prompt_len: int) -> list[Any]:
        found: list[Any] = [tf.SuppressTokensAtBeginLogitsProcessor(sorted(banned), prompt_len)] if banned else []
        return found

    logits = random_logits(len(history), VOCABULARY)
    if sampling.forced_first_id < 0:
        agree([sampling] * len(history), history, processors)
        return
    drawn = run(logits, [sampling] * len(history), history).tokens.tolist()
    free = run(logits, [Sampling()] * len(history), history).tokens.tolist()
    for row, (said, prompt_len) in enumerate(history):
        assert drawn[row] == (forced if len(said) == prompt_len else free[row])


def test_forced_token_overrides_bans_of_the_context() -> None:
    sampling = Sampling(forced_first_id=4, no_repeat_ngram_size=1, bad_words=((4, 4),), allowed_ids=(2, 3))
    assert run(torch.zeros(1, VOCABULARY), [sampling], [([4, 4], 2)]).tokens.tolist() == [4]


# --- all changes together ------------------------------------------------------------------------------------------


def drawn_sampling(rng: random.Random) -> Sampling:
    """Return parameters of which each changes logits by the context, or is neutral."""
    choices: dict[str, tuple[Any, Any]] = {
        "repetition_penalty": (1.0, 1.4),
        "frequency_penalty": (0.0, 0.5),
        "dry_multiplier": (0.0, 0.8),
        "dry_breaker_sequences": ((), ((1, 2), (3, 4, 5))),
        "xtc_probability": (0.0, 0.5),
        "typical_p": (1.0, 0.7),
        "no_repeat_ngram_size": (0, 3),
        "bad_words": ((), ((1, 2), (3, 4, 5))),
        "begin_banned_ids": ((), (1, 2, 3)),
        "forced_first_id": (-1, 7),
        "exponential_decay_factor": (1.0, 1.5),
        "temperature": (0.0, 0.8),
    }
    values = {name: rng.choice(values) for name, values in choices.items()}
    return Sampling(**values, stop_ids=(9,), seed=rng.getrandbits(64), logprobs=rng.choice([-1, 3]))


def test_rows_are_independent() -> None:
    rng = random.Random(4)
    parameters = [drawn_sampling(rng) for _ in range(60)]
    history = []
    for _ in range(60):
        said = [rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 50))]
        history.append((said, rng.randint(1, len(said))))
    logits = random_logits(60, VOCABULARY)
    together = run(logits, parameters, history).tokens.tolist()
    alone = [run(logits[i : i + 1], [parameters[i]], [history[i]]).tokens.item() for i in range(60)]
    assert together == alone


@pytest.mark.parametrize("number", range(8))
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
