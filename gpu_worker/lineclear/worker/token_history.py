"""Changes of logits that depend on the tokens of the row's sequence, read from the token table on the device.

The host has not seen the tokens of the step before. Each function works on whole columns: no loop over rows or over the
vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .repetitions import repeat_lengths, window_of
from .sampling_metadata import BadWords, Context

_FEW_PASSES = 16
"""Longest n-grams that are compared token by token, which is quicker than `repeat_lengths` for short ones."""
_MINUS_INFINITY = float("-inf")


def penalize(logits: Tensor, context: Context, token_table: Tensor) -> Tensor:
    """Apply the repetition, presence and frequency penalty to `logits` [num_rows, vocabulary]."""
    repetition = context.parameters["repetition_penalty"]
    history, positions = _history(context, token_table)
    # Shorter sequences are padded with their own first token, which is penalized in any case.
    seen = torch.where(positions < context.lengths, history, history[:, :1])
    score = logits.gather(1, seen)
    score = torch.where(score < 0, score * repetition, score / repetition)
    logits = logits.scatter(1, seen, score)

    in_output = (positions >= context.prompt_lens) & (positions < context.lengths)
    counts = torch.zeros_like(logits).scatter_add_(1, seen, in_output.to(logits.dtype))
    frequency, presence = context.parameters["frequency_penalty"], context.parameters["presence_penalty"]
    return logits - frequency * counts - presence * (counts > 0)


def ban_ngrams(logits: Tensor, context: Context, token_table: Tensor) -> Tensor:
    """Ban each token that would complete an n-gram of the sequence a second time (transformers' NoRepeatNGram)."""
    size = context.parameters["no_repeat_ngram_size"]
    if context.max_values["no_repeat_ngram_size"] > _FEW_PASSES:
        window = window_of(context, token_table, context.lengths)
        is_repeated = repeat_lengths(window, logits.shape[1]) >= size - 1
        return logits.scatter_add_(1, window.tokens[:, :-1], _minus_infinity_where(is_repeated))
    history, ends = _history(context, token_table)
    # [num_rows, length]: the n-gram that ends here begins with the last n - 1 tokens.
    matches = (ends >= size - 1) & (ends < context.lengths)
    for distance in range(1, min(int(context.max_values["no_repeat_ngram_size"]), context.max_length)):
        last = history.gather(1, (context.lengths - distance).clamp(min=0))
        matches[:, distance:] &= (history[:, :-distance] == last) | (distance >= size)
    return logits.scatter_add_(1, history, _minus_infinity_where(matches))


def ban_bad_words(logits: Tensor, words: BadWords, token_table: Tensor) -> None:
    """Ban the last token of each word whose other tokens are the end of the output so far (vLLM's bad_words)."""
    offsets = torch.arange(words.prefixes.shape[1], device=logits.device)
    positions = (words.lengths - words.prefix_lens + offsets).clamp(0, token_table.shape[1] - 1)
    same = token_table[words.slots, positions] == words.prefixes
    matches = (same | (offsets >= words.prefix_lens)).all(dim=1)
    matches &= (words.lengths - words.prefix_lens >= words.prompt_lens)[:, 0]
    # Two words may end with the same token: a sum does not depend on their order.
    logits.index_put_((words.last.rows, words.last.ids), _minus_infinity_where(matches), accumulate=True)


def _history(context: Context, token_table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens of each row [num_rows, max_length], with any ids behind its length, and the positions."""
    positions = torch.arange(context.max_length, device=token_table.device)
    return token_table[context.slots, : context.max_length], positions


def _minus_infinity_where(condition: Tensor) -> Tensor:
    return torch.zeros(condition.shape, device=condition.device).masked_fill_(condition, _MINUS_INFINITY)
