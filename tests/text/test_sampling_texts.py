"""Texts in sampling parameters reach the engine as token sequences."""

from __future__ import annotations

import pytest
from support.answers import engine_request, invalid_fields
from support.serving import TOKENIZER, Serving, text_request
from support.small_tokenizers import KINDS, definition

from lineclear.errors import InvalidRequest, TokenOutOfVocabulary
from lineclear.scheduler.requests.validate.sampling import with_bad_words, with_breakers
from lineclear.scheduler.text.sampling_texts import DEFAULT_BREAKERS, BreakerIndex, bad_word_ids
from lineclear.scheduler.text.tokenizer import Tokenizer
from lineclear.wire.messages import Sampling


def by_vllm(tokenizer: Tokenizer, word: str) -> list[tuple[int, ...]]:
    """Follow vLLM's SamplingParams.update_from_tokenizer."""
    found: list[list[int]] = []
    for prefix in ("", " "):
        ids = tokenizer.encode_sealed(prefix + word.lstrip())
        if not prefix or (ids[0] != found[-1][0] and len(ids) == len(found[-1])):
            found.append(ids)
    return [tuple(ids) for ids in found]


@pytest.mark.parametrize("kind", KINDS)
def test_bad_words_are_tokenized_as_by_vllm(kind: str) -> None:
    """And behind a space too where that gives another number of tokens."""
    tokenizer = Tokenizer(definition(KINDS[kind]()))
    for word in ("fox", " fox", "the lazy dog", "Zwölf", "x", "quick brown"):
        bare, *others = bad_word_ids(tokenizer, word)
        assert [bare, *(ids for ids in others if len(ids) == len(bare))] == by_vllm(tokenizer, word)
        assert others in ([], [tuple(tokenizer.encode_sealed(" " + word.lstrip()))])


def test_word_of_other_tokens_behind_a_space_is_kept() -> None:
    class Encoder:
        def encode_sealed(self, text: str) -> list[int]:
            return {"the": [1, 2], " the": [3], "a": [4], " a": [5, 4]}[text]

    assert bad_word_ids(Encoder(), "the") == [(1, 2), (3,)]
    assert bad_word_ids(Encoder(), "a") == [(4,)]


@pytest.mark.parametrize(
    "words",
    [
        ["fox", "The quick brown", "fox"],
        [f"{i} quick brown foxes jump over the lazy dog".ljust(128, "x") for i in range(256)],
    ],
    ids=["few", "tokenized in a thread"],
)
async def test_bad_words_of_one_token_are_banned_ids(s: Serving, words: list[str]) -> None:
    sampling = {"bad_words": words, "banned_token_ids": [7]}
    found = (await engine_request(s, text_request(sampling=sampling))).sampling
    sequences = {sequence for word in words for sequence in bad_word_ids(TOKENIZER, word)}
    assert set(found.banned_ids) == {7} | {ids[0] for ids in sequences if len(ids) == 1}
    assert set(found.bad_words) == {ids for ids in sequences if len(ids) > 1} != set()


async def test_bad_words_that_leave_no_token_are_rejected(s: Serving) -> None:
    only = tuple(TOKENIZER.encode_sealed("x"))
    assert len(only) == 1
    assert only in bad_word_ids(TOKENIZER, "x")
    for others in ({"allowed_token_ids": only}, {"forced_first_token_id": only[0]}):
        request = text_request(sampling={"bad_words": ["x"], **others})
        assert await invalid_fields(s.generate(request)) == ["sampling.bad_words"]
    assert s.engine.submitted == []


def test_texts_without_usable_tokens_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"bad_words\[1\]: has no tokens"):
        with_bad_words(Sampling(), [[(5,)], []], 512)
    with pytest.raises(TokenOutOfVocabulary, match=r"bad_words\[0\]"):
        with_bad_words(Sampling(), [[(5, 512)]], 512)
    with pytest.raises(InvalidRequest, match="16385 tokens of the vocabulary, the limit is 16384"):
        with_breakers(Sampling(), range(16_385), (), 100_000)


@pytest.mark.parametrize("kind", KINDS)
def test_breakers_are_all_tokens_with_their_text(kind: str) -> None:
    tokenizer = Tokenizer(definition(KINDS[kind]()))
    index = BreakerIndex(tokenizer)
    for texts in (["\n"], ["e", "fox"], ["the lazy dog"], [","], []):
        found = index.find(texts)
        for token_id in range(tokenizer.vocab_size):
            piece = tokenizer.piece(token_id, first=False)
            text = "" if piece is None or tokenizer.is_special(token_id) else piece.decode("utf-8", "replace")
            assert (token_id in found.ids) == any(breaker in text for breaker in texts or DEFAULT_BREAKERS)
    assert index.find(["none"]) == ((), ())
    assert index.find(["the lazy dog"]).sequences == (tuple(tokenizer.encode_sealed("the lazy dog")),)


async def test_breakers_reach_the_engine_with_dry_only(s: Serving) -> None:
    without, with_dry = {"dry_sequence_breakers": ["e"]}, {"dry_sequence_breakers": ["e"], "dry_multiplier": 0.5}
    assert (await engine_request(s, text_request(sampling=without))).sampling.dry_breaker_ids == ()
    found = (await engine_request(s, text_request(sampling=with_dry))).sampling.dry_breaker_ids
    assert found == BreakerIndex(TOKENIZER).find(["e"]).ids != ()
