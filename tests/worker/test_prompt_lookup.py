"""Drafts by prompt lookup: by hand, and against a search of the whole text."""

from __future__ import annotations

import random

import pytest

from lineclear.worker.drafts.prompt_lookup import PromptLookup


def index_of(tokens: list[int], max_ngram: int = 4, min_ngram: int = 2) -> PromptLookup:
    index = PromptLookup(max_ngram, min_ngram)
    index.extend(tokens)
    return index


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([5, 6, 7, 8, 9, 1, 5, 6], [7, 8, 9]),
        ([1, 2, 3, 4, 0, 2, 3, 9, 0, 1, 2, 3], [4, 0, 2]),  # the longest occurrence wins over a later one
        ([1, 2, 3, 1, 2, 4, 0, 1, 2], [4, 0, 1]),  # of equal lengths the latest wins
        ([1, 2, 3, 4], []),
        ([1], []),
        ([1, 2, 1], []),  # one equal token is less than min_ngram
        ([9, 1, 2, 3, 1, 2, 3], [1, 2, 3]),
        ([4, 4, 4], [4, 4, 4]),  # beyond the end
    ],
    ids=str,
)
def test_tokens_after_the_best_occurrence_are_drafted(tokens: list[int], drafts: list[int]) -> None:
    assert index_of(tokens).propose(3) == drafts


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
    for _ in range(200):
        tokens = [rng.randrange(12 if min_ngram == 1 else 4) for _ in range(rng.randint(1, 60))]
        found = index_of(tokens, max_ngram, min_ngram).propose(6)
        assert found == searched(tokens, 6, max_ngram, min_ngram), tokens
        num_found += bool(found)
    assert num_found > 50
