"""DRY ("don't repeat yourself", p-e-w 2024; llama.cpp's definition): a penalty for tokens that continue a repetition.

A token that followed an earlier occurrence of the last tokens is penalized by multiplier * base^(length - allowed
length), where length is that of the longest such occurrence. Sequence breakers cut it: only tokens behind the last
breaker count.

Everything is computed over distances: 0 is the last token of the row, 1 the one before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .sampling_metadata import Breakers, Context

MAX_REPEAT = 128
"""Longer repetitions count as this long: the work of a step is this many passes over the context."""
_LARGEST_LOG = 88.7
"""Of a float32."""


class _Window(NamedTuple):
    tokens: Tensor
    """[num_rows, longest]: the token at each distance."""
    sizes: Tensor
    """[num_rows, 1]: distances that count."""


def penalize_repetition(logits: Tensor, context: Context, breakers: Breakers, token_table: Tensor) -> Tensor:
    """Return `logits` [num_rows, vocabulary] with the penalty subtracted."""
    window = _window(context, token_table)
    allowed = context.parameters["dry_allowed_length"]
    lengths = _repeat_lengths(window, _distance_of_breaker(window, breakers))
    # The token behind an occurrence that ends at distance k is at distance k - 1.
    longest = torch.zeros(logits.shape, dtype=torch.int64, device=logits.device)
    longest.scatter_reduce_(1, window.tokens[:, :-1], lengths * (lengths >= allowed), "amax")
    base = context.parameters["dry_base"]
    largest = torch.where(base > 1.000001, _LARGEST_LOG / base.log().clamp(min=1e-6), float("inf"))
    penalty = context.parameters["dry_multiplier"] * base ** torch.minimum(longest - allowed, largest.floor())
    return logits - penalty.masked_fill_((longest == 0) | breakers.is_breaker, 0.0)


def _window(context: Context, token_table: Tensor) -> _Window:
    last_n = context.parameters["dry_penalty_last_n"]
    sizes = torch.where(last_n < 0, context.lengths, torch.minimum(context.lengths, last_n))
    distances = torch.arange(context.max_length, device=token_table.device)
    positions = (context.lengths - 1 - distances).clamp(min=0)
    return _Window(token_table[context.slots[:, None], positions], sizes)


def _repeat_lengths(window: _Window, limit: Tensor) -> Tensor:
    """Return [num_rows, longest - 1]: for each distance k >= 1, how many tokens before it equal the last ones."""
    tokens, sizes = window
    width = tokens.shape[1]
    distances = torch.arange(1, width, device=tokens.device)
    is_same = torch.ones((len(tokens), width - 1), dtype=torch.bool, device=tokens.device)
    lengths = torch.zeros(is_same.shape, dtype=torch.int64, device=tokens.device)
    for offset in range(min(MAX_REPEAT, width - 1)):
        end = width - 1 - offset
        is_same[:, :end] &= tokens[:, offset : offset + 1] == tokens[:, offset + 1 :]
        is_same[:, end:] = False
        is_same &= (distances + offset < sizes) & (offset < limit)
        lengths += is_same
        if tokens.device.type == "cpu" and not is_same.any():
            break
    return lengths


def _distance_of_breaker(window: _Window, breakers: Breakers) -> Tensor:
    """Return [num_rows, 1]: the number of tokens behind the last breaker; the size of the window if it has none."""
    tokens, sizes = window
    distances = torch.arange(tokens.shape[1], device=tokens.device)
    # [num_rows, longest]: length of the longest breaker that begins at each distance; 0: none.
    lengths = (breakers.is_breaker.gather(1, tokens) & (distances < sizes)).long()
    for number in range(breakers.sequences.shape[1]):
        sequence, count = breakers.sequences[:, number], breakers.sequence_lens[:, number, None]
        matches = (count > 0) & (distances >= count - 1) & (distances < sizes)
        for offset in range(sequence.shape[1]):
            same = tokens[:, : tokens.shape[1] - offset] == sequence[:, offset : offset + 1]
            matches[:, offset:] &= same | (offset >= count)
            if tokens.device.type == "cpu" and not matches.any():
                break
        lengths = torch.maximum(lengths, matches * count)
    is_head = lengths > 0
    first = is_head.long().argmax(dim=1, keepdim=True)
    behind = first - (lengths.gather(1, first) - 1)
    return torch.where(is_head.any(dim=1, keepdim=True), behind, sizes)
