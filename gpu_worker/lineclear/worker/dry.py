"""DRY ("don't repeat yourself", p-e-w 2024; llama.cpp's definition): a penalty for tokens that continue a repetition.

A token that followed an earlier occurrence of the last tokens is penalized by multiplier * base^(length - allowed
length), where length is that of the longest such occurrence. Sequence breakers cut it: only tokens behind the last
breaker count.

Everything is computed over distances, as in `repetitions`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .repetitions import MAX_REPEAT, Window, repeat_lengths, window_of
from .sampling_metadata import Breakers, Context

_LARGEST_LOG = 88.7
"""Of a float32."""


def penalize_repetition(logits: Tensor, context: Context, breakers: Breakers, token_table: Tensor) -> Tensor:
    """Return `logits` [num_rows, vocabulary] with the penalty subtracted."""
    last_n = context.parameters["dry_penalty_last_n"]
    sizes = torch.where(last_n < 0, context.lengths, torch.minimum(context.lengths, last_n))
    window = window_of(context, token_table, sizes)
    allowed = context.parameters["dry_allowed_length"]
    lengths = torch.minimum(repeat_lengths(window, logits.shape[1]), _distance_of_breaker(window, breakers))
    base = context.parameters["dry_base"]
    largest = torch.where(base > 1.000001, _LARGEST_LOG / base.log().clamp(min=1e-6), float("inf"))
    penalties = context.parameters["dry_multiplier"] * base ** torch.minimum(lengths - allowed, largest.floor())
    # The token behind an occurrence that ends at distance k is at distance k - 1.
    behind = window.tokens[:, :-1]
    penalties.masked_fill_((lengths < allowed) | breakers.is_breaker.gather(1, behind), 0.0)
    return logits - torch.zeros_like(logits).scatter_reduce_(1, behind, penalties, "amax")


def _distance_of_breaker(window: Window, breakers: Breakers) -> Tensor:
    """Return [num_rows, 1]: the number of tokens behind the last breaker; the size of the window if it has none.

    A breaker before the last MAX_REPEAT tokens is not searched for: no repetition reaches it.
    """
    longest = max(1, breakers.sequences.shape[2])
    tokens, sizes = window.tokens[:, : MAX_REPEAT + longest - 1], window.sizes
    distances = torch.arange(tokens.shape[1], device=tokens.device)
    # [num_rows, distances]: length of the longest breaker that begins at each distance; 0: none.
    lengths = (breakers.is_breaker.gather(1, tokens) & (distances < sizes)).long()
    if breakers.sequences.numel():
        # [num_rows, 1, distances, longest]: the tokens from each distance on, in the order of the text.
        texts = F.pad(tokens, (longest - 1, 0), value=-1).unfold(1, longest, 1).flip(-1)[:, None]
        counts = breakers.sequence_lens[:, :, None]
        is_padding = torch.arange(longest, device=tokens.device) >= counts[..., None]
        matches = ((texts == breakers.sequences[:, :, None]) | is_padding).all(-1)
        matches &= (counts > 0) & (distances < sizes[:, None])
        lengths = torch.maximum(lengths, (matches * counts).amax(1))
    is_head = lengths > 0
    first = is_head.long().argmax(dim=1, keepdim=True)
    behind = first - (lengths.gather(1, first) - 1)
    return torch.where(is_head.any(dim=1, keepdim=True), behind, sizes)
