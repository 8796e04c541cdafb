"""Changes of logits that depend on the tokens of the row's sequence, read from the token table on the device.

The host has not seen the tokens of the step before. Each function works on whole columns: no loop over rows or over the
vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lineclear.wire.sampling import Sampling, Use
from lineclear.worker.attention.base import IntArray

from .repetitions import repeat_lengths, window_of
from .sampling_rows import SWITCHES, Change, Context, Feature, SamplingRows

_FEW_PASSES = 16
"""Longest n-grams that are compared token by token, which is quicker than `repeat_lengths` for short ones."""
_MINUS_INFINITY = float("-inf")


def _penalize(rows: SamplingRows, _: list[bool]) -> Change:
    """Apply the repetition, presence and frequency penalty."""
    context, repetition = rows.context(), rows.parameter("repetition_penalty")
    frequency, presence = rows.parameter("frequency_penalty"), rows.parameter("presence_penalty")

    def change(all_logits: Tensor, token_table: Tensor) -> None:
        logits = all_logits[context.rows]
        history, positions = _history(context, token_table)
        # Shorter sequences are padded with their own first token, which is penalized in any case.
        seen = torch.where(positions < context.lengths, history, history[:, :1])
        score = logits.gather(1, seen)
        score = torch.where(score < 0, score * repetition, score / repetition)
        logits = logits.scatter(1, seen, score)

        in_output = (positions >= context.prompt_lens) & (positions < context.lengths)
        counts = torch.zeros_like(logits).scatter_add_(1, seen, in_output.to(logits.dtype))
        all_logits[context.rows] = logits - frequency * counts - presence * (counts > 0)

    return change


def _ban_ngrams(rows: SamplingRows, _: list[bool]) -> Change:
    """Ban each token that would complete an n-gram of the sequence a second time (transformers' NoRepeatNGram)."""
    context, size = rows.context(), rows.parameter("no_repeat_ngram_size")
    longest = int(rows.scalars["no_repeat_ngram_size"].max())

    def change(logits: Tensor, token_table: Tensor) -> None:
        if longest > _FEW_PASSES:
            window = window_of(context, token_table, context.lengths)
            tokens = window.tokens[:, :-1]
            matches = repeat_lengths(window, logits.shape[1]) >= size - 1
        else:
            tokens, matches = _short_ngrams(context, token_table, size, longest)
        logits[context.rows] = logits[context.rows].scatter_add_(1, tokens, _minus_infinity_where(matches))

    return change


def _short_ngrams(context: Context, token_table: Tensor, size: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Return the tokens of each row, and whether the n-gram that ends there starts with the last n - 1 tokens."""
    history, ends = _history(context, token_table)
    matches = (ends >= size - 1) & (ends < context.lengths)  # [num_rows, length]
    for distance in range(1, min(longest, context.max_length)):
        last = history.gather(1, (context.lengths - distance).clamp(min=0))
        matches[:, distance:] &= (history[:, :-distance] == last) | (distance >= size)
    return history, matches


class _BadWords(NamedTuple):
    """Words of several tokens, each in one row."""

    prefixes: IntArray
    """[num_words, longest]: all tokens but the last, padded at the end."""
    prefix_lens: IntArray
    last: IntArray


def _bad_words(sampling: Sampling, vocab_size: int) -> _BadWords:
    words = sampling.bad_words
    prefix_lens = np.array([len(word) - 1 for word in words], np.int64)
    prefixes = np.zeros((len(words), int(prefix_lens.max())), np.int64)
    for row, word in enumerate(words):
        prefixes[row, : len(word) - 1] = word[:-1]
    return _BadWords(prefixes, prefix_lens, np.array([word[-1] for word in words], np.int64))


def _ban_bad_words(rows: SamplingRows, of_rows: list[_BadWords]) -> Change:
    """Ban the last token of each word whose other tokens are the end of the output so far (vLLM's bad_words)."""
    width = max(words.prefixes.shape[1] for words in of_rows)
    padded = [np.pad(words.prefixes, ((0, 0), (0, width - words.prefixes.shape[1]))) for words in of_rows]
    by_word = rows.take(np.repeat(np.arange(len(of_rows)), [len(words.last) for words in of_rows]))
    context, prefixes = by_word.context(), rows.put(np.concatenate(padded))
    prefix_lens = rows.column(np.concatenate([words.prefix_lens for words in of_rows]))
    last = context.rows, rows.put(np.concatenate([words.last for words in of_rows]))

    def change(logits: Tensor, token_table: Tensor) -> None:
        offsets = torch.arange(width, device=logits.device)
        positions = (context.lengths - prefix_lens + offsets).clamp(0, token_table.shape[1] - 1)
        same = token_table[context.slots[:, None], positions] == prefixes
        matches = (same | (offsets >= prefix_lens)).all(dim=1)
        matches &= (context.lengths - prefix_lens >= context.prompt_lens)[:, 0]
        # Two words may end with the same token: a sum does not depend on their order.
        logits.index_put_(last, _minus_infinity_where(matches), accumulate=True)

    return change


def _history(context: Context, token_table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens of each row [num_rows, max_length], with any ids behind its length, and the positions."""
    positions = torch.arange(context.max_length, device=token_table.device)
    return token_table[context.slots, : context.max_length], positions


def _minus_infinity_where(condition: Tensor) -> Tensor:
    return torch.zeros(condition.shape, device=condition.device).masked_fill_(condition, _MINUS_INFINITY)


PENALTIES = Feature(SWITCHES[Use.PENALTY], lambda *_: True, _penalize)
NGRAMS = Feature(SWITCHES[Use.NGRAM], lambda *_: True, _ban_ngrams)
BAD_WORDS = Feature(["bad_words"], _bad_words, _ban_bad_words)
