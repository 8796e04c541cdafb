"""A real server settles ties, and only the tie itself is excused."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace

import pytest
from campaigns.answers import Complete, ReceivedAnswer, Tally, Tolerance, differences, find_tie
from campaigns.questions import Answer, Question, toy_answer
from campaigns.ties import settle
from support.engine_harness import short_directory
from support.toy_service import VOCABULARY, ToyService, text_of, toy_service

from lineclear.client import Client, FinishReason, Sampling

_NEAR = Tolerance(tie=1.5)
"""The toy worker's second candidate is the next token, with a log probability lower by 1."""
_PROMPT = (5, 6, 7)
_SAMPLING = Sampling(seed=3, max_tokens=40, ignore_eos=True, temperature=0.0)


@pytest.fixture(scope="module")
def service() -> Iterator[ToyService]:
    folder = short_directory()
    with toy_service(folder) as running:
        yield running
    shutil.rmtree(folder)


def _right() -> Answer:
    return toy_answer(_PROMPT, _SAMPLING, 2)


def _with_ties(*places: int) -> Answer:
    """Return the answer that takes the second candidate at `places`."""
    whole = _right()
    for at in places:
        _, candidates = whole.logprobs[at]
        token, logprob = candidates[1]
        tokens, logprobs = (*whole.token_ids[:at], token), (*whole.logprobs[:at], (logprob, candidates))
        left = len(whole.token_ids) - len(tokens)
        if left:
            rest = toy_answer((*_PROMPT, *tokens), _SAMPLING.replace(max_tokens=left), 2)
            tokens, logprobs = (*tokens, *rest.token_ids), (*logprobs, *rest.logprobs)
        whole = replace(whole, token_ids=tokens, logprobs=logprobs)
    return replace(whole, text=text_of(whole.token_ids))


def _settled(service: ToyService, answer: Answer, tokens: tuple[int, ...] | None = None) -> Tally:
    received = ReceivedAnswer()
    received.tokens, received.text = list(answer.token_ids if tokens is None else tokens), answer.text
    done = Complete(Question(_PROMPT, _SAMPLING, _right(), 2), received, answer)
    assert find_tie(done.question.right, received.tokens, _NEAR) is not None
    tally = Tally(tied=[done, done])
    with Client(service.target) as client:
        settle(tally, client, _NEAR)
    return tally


@pytest.mark.parametrize("places", [(0,), (7,), (39,), (3, 4, 20), (5, 39)])
def test_tokens_after_a_tie_are_recomputed(service: ToyService, places: tuple[int, ...]) -> None:
    tally = _settled(service, _with_ties(*places))
    assert tally.is_clean, tally
    assert tally.ends == {"length": 2}


def test_wrong_token_after_a_tie_is_found(service: ToyService) -> None:
    right = _with_ties(7)
    for at in (8, 20, 39):
        wrong = (right.token_ids[at] + 2) % VOCABULARY
        altered = replace(right, token_ids=(*right.token_ids[:at], wrong, *right.token_ids[at + 1 :]))
        assert _settled(service, altered).altered == 2


def test_other_fields_after_a_tie_are_compared(service: ToyService) -> None:
    right = _with_ties(7)
    logprob, top = right.logprobs[20]
    for field, value in (
        ("text", right.text[:-1]),
        ("finish_reason", FinishReason.STOP_EOS),
        ("logprobs", (*right.logprobs[:20], (logprob - 0.01, top), *right.logprobs[21:])),
    ):
        assert _settled(service, replace(right, **{field: value})).wrong[field] == 2, field
    short, long = right.token_ids[:-1], (*right.token_ids, 5)
    assert _settled(service, replace(right, token_ids=short)).lost == 2
    assert _settled(service, replace(right, token_ids=long)).duplicated == 2
    assert _settled(service, right, tokens=short).wrong["tokens of the result"] == 2


def test_only_near_candidates_may_swap() -> None:
    def answer(*top: tuple[int, float]) -> Answer:
        return Answer((4,), "", FinishReason.LENGTH, None, ((-0.7, top),))

    near, right = Tolerance(logprob=0.1), answer((4, -0.7), (9, -1.5), (3, -2.0))
    assert differences(right, answer((4, -0.7), (9, -1.55), (3, -1.95)), near) == []
    assert differences(right, answer((4, -0.7), (9, -1.5), (8, -2.05)), near) == []
    for wrong in (
        answer((4, -0.7), (8, -1.5), (3, -2.0)),  # another candidate, far from the end of the list
        answer((4, -0.7), (3, -1.5), (9, -2.0)),
        answer((4, -0.7), (9, -1.5)),
        answer((4, -0.7), (4, -1.5), (3, -2.0)),
        answer((9, -1.5), (4, -0.7), (3, -2.0)),
    ):
        assert differences(right, wrong, near) == ["logprobs"]
