"""Drafts by prompt lookup: by hand, and against a search of the whole text."""

from __future__ import annotations

import random

import pytest

from lineclear.worker.drafts.prompt_lookup import PromptLookup


def index_of(tokens: list[int], max_ngram: int = 4, min_ngram: int = 2) -> PromptLookup:
    index = PromptLookup(max_ngram, min_ngram)
    index.extend(tokens)
    return index


def test_tokens_after_the_earlier_occurrence_are_drafted() -> None:
    assert index_of([5, 6, 7, 8, 9, 1, 5, 6]).propose(3) == [7, 8, 9]


def test_longest_occurrence_wins_over_a_later_one() -> None:
    #                 1 2 3 -> 4          2 3 -> 9      1 2 3
    assert index_of([1, 2, 3, 4, 0, 2, 3, 9, 0, 1, 2, 3]).propose(1) == [4]


def test_of_equal_lengths_the_latest_wins() -> None:
    assert index_of([1, 2, 3, 1, 2, 4, 0, 1, 2]).propose(1) == [4]


def test_occurrences_longer_than_max_ngram_are_equal() -> None:
    assert index_of([0, 1, 2, 3, 7, 9, 1, 2, 3, 8, 0, 1, 2, 3], max_ngram=3).propose(1) == [8]


def test_nothing_is_drafted_without_an_earlier_occurrence() -> None:
    assert index_of([1, 2, 3, 4]).propose(4) == []
    assert index_of([1]).propose(4) == []
    assert index_of([1, 2, 1]).propose(4) == [], "one equal token is less than min_ngram"


def test_repeated_tokens_draft_beyond_their_end() -> None:
    assert index_of([9, 1, 2, 3, 1, 2, 3]).propose(7) == [1, 2, 3, 1, 2, 3, 1]
    assert index_of([4, 4, 4]).propose(3) == [4, 4, 4]


def test_tokens_may_come_in_pieces() -> None:
    whole, pieces = [5, 6, 7, 8, 5, 6], PromptLookup(4, 2)
    for token in whole:
        pieces.extend([token])
    assert pieces.propose(4) == index_of(whole).propose(4) == [7, 8, 5, 6]


def searched(tokens: list[int], count: int, max_ngram: int, min_ngram: int) -> list[int]:
    """Return the drafts from a search of the whole text."""
    for size in range(max_ngram, min_ngram - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                drafts = list(tokens)
                for i in range(count):
                    drafts.append(drafts[end + i])
                return drafts[len(tokens) :]
    return []


@pytest.mark.parametrize(("max_ngram", "min_ngram"), [(4, 2), (3, 3), (5, 1)])
def test_drafts_equal_a_search_of_the_whole_text(max_ngram: int, min_ngram: int) -> None:
    rng = random.Random(max_ngram)
    num_found = 0
    for _ in range(300):
        tokens = [rng.randrange(12 if min_ngram == 1 else 4) for _ in range(rng.randint(1, 60))]
        found = index_of(tokens, max_ngram, min_ngram).propose(6)
        assert found == searched(tokens, 6, max_ngram, min_ngram), tokens
        num_found += bool(found)
    assert num_found > 50
