"""DRY ("don't repeat yourself", p-e-w 2024; llama.cpp's definition): a penalty for tokens that continue a repetition.

A token that followed an earlier occurrence of the last tokens is penalized by multiplier * base^(length - allowed
length), where length is that of the longest such occurrence. Sequence breakers cut it: only tokens behind the last
breaker count.

Everything is computed over distances, as in `repetitions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from lineclear.wire.sampling import Sampling, Use

from .repetitions import MAX_REPEAT, Window, repeat_lengths, window_of
from .sampling_rows import SWITCHES, Change, Feature, SamplingRows

_LARGEST_LOG = 88.7
"""Of a float32."""


class _Breakers(NamedTuple):
    """Sequence breakers of one slot."""

    is_breaker: npt.NDArray[np.bool_]
    """[vocabulary]: tokens that are a breaker alone."""
    sequences: Sequence[Sequence[int]]


class _RowBreakers(NamedTuple):
    """Sequence breakers of some rows, on the device."""

    is_breaker: Tensor
    """[num_rows, vocabulary] bool."""
    sequences: Tensor
    """[num_rows, most, longest]: breakers of several tokens, padded at the end."""
    sequence_lens: Tensor
    """[num_rows, most]; 0 for none."""


def _breakers(sampling: Sampling, vocab_size: int) -> _Breakers:
    is_breaker = np.zeros(vocab_size, np.bool_)
    is_breaker[list(sampling.dry_breaker_ids)] = True
    return _Breakers(is_breaker, sampling.dry_breaker_sequences)


def _penalize_repetition(rows: SamplingRows, of_rows: list[_Breakers]) -> Change:
    context, breakers = rows.context(), _row_breakers(rows, of_rows)
    last_n, allowed = rows.parameter("dry_penalty_last_n"), rows.parameter("dry_allowed_length")
    base, multiplier = rows.parameter("dry_base"), rows.parameter("dry_multiplier")

    def change(logits: Tensor, token_table: Tensor) -> None:
        sizes = torch.where(last_n < 0, context.lengths, torch.minimum(context.lengths, last_n))
        window = window_of(context, token_table, sizes)
        lengths = torch.minimum(repeat_lengths(window, logits.shape[1]), _distance_of_breaker(window, breakers))
        largest = torch.where(base > 1.000001, _LARGEST_LOG / base.log().clamp(min=1e-6), float("inf"))
        penalties = multiplier * base ** torch.minimum(lengths - allowed, largest.floor())
        # The token behind an occurrence that ends at distance k is at distance k - 1.
        behind = window.tokens[:, :-1]
        penalties.masked_fill_((lengths < allowed) | breakers.is_breaker.gather(1, behind), 0.0)
        changed = logits[context.rows]
        logits[context.rows] = changed - torch.zeros_like(changed).scatter_reduce_(1, behind, penalties, "amax")

    return change


def _row_breakers(rows: SamplingRows, of_rows: list[_Breakers]) -> _RowBreakers:
    most = max(len(x.sequences) for x in of_rows)
    longest = max((len(sequence) for x in of_rows for sequence in x.sequences), default=0)
    sequences = np.zeros((len(of_rows), most, longest), np.int64)
    lengths = np.zeros((len(of_rows), most), np.int64)
    for row, breakers in enumerate(of_rows):
        for number, sequence in enumerate(breakers.sequences):
            sequences[row, number, : len(sequence)] = sequence
            lengths[row, number] = len(sequence)
    return _RowBreakers(*map(rows.put, (np.stack([x.is_breaker for x in of_rows]), sequences, lengths)))


def _distance_of_breaker(window: Window, breakers: _RowBreakers) -> Tensor:
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


DRY = Feature(SWITCHES[Use.DRY], _breakers, _penalize_repetition)
