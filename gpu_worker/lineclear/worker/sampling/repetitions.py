"""Repetitions at the end of each row's sequence: their lengths, which n-gram bans need, too, and DRY's penalty.

DRY ("don't repeat yourself", p-e-w 2024; llama.cpp's definition): a token that followed an earlier occurrence of the
last tokens is penalized by multiplier * base^(length - allowed length), where length is that of the longest such
occurrence. Sequence breakers cut it: only tokens behind the last breaker count.

Everything is computed over distances: 0 is the last token of the row, 1 the one before. Blocks of 1, 2, 4, ... tokens
get names, so that one comparison covers a whole block (Karp, Miller and Rosenberg 1972). The work for each token of the
context does not depend on the tokens.
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

from .sampling_rows import SWITCHES, Change, Context, Feature, SamplingRows

MAX_REPEAT = 128
"""Longer repetitions count as this long. A power of two."""
_NO_NAME = MAX_REPEAT
"""Of blocks that do not occur in the last tokens."""
_LARGEST_LOG = 88.7
"""Of a float32."""


class Window(NamedTuple):
    tokens: Tensor
    """[num_rows, longest + 1]: the token at each distance, and any token behind the size."""
    sizes: Tensor
    """[num_rows, 1]: distances that count, at most `longest`."""


def window_of(context: Context, token_table: Tensor, sizes: Tensor) -> Window:
    """Return the last `sizes` [num_rows, 1] tokens of each row."""
    distances = torch.arange(context.max_length + 1, device=token_table.device)
    positions = (context.lengths - 1 - distances).clamp(min=0)
    return Window(token_table[context.slots[:, None], positions], sizes)


def repeat_lengths(window: Window, vocab_size: int) -> Tensor:
    """Return [num_rows, longest]: for each distance k >= 1, how many tokens from it on equal the last ones."""
    tokens, sizes = window
    distances = torch.arange(1, tokens.shape[1], device=tokens.device)
    lengths = torch.zeros((len(tokens), len(distances)), dtype=torch.int64, device=tokens.device)
    names = _block_names(tokens, vocab_size)
    for exponent in (*reversed(range(len(names))), 0):  # 64 + 32 + ... + 1 + 1 = MAX_REPEAT
        name = names[exponent]
        is_same = name.gather(1, distances + lengths) == name.gather(1, lengths)
        lengths.add_(is_same, alpha=1 << exponent)
    return torch.minimum(lengths, sizes - distances).clamp_(min=0)


def _block_names(tokens: Tensor, vocab_size: int) -> list[Tensor]:
    """Return uint8 [num_rows, more than longest] for each i: names of the blocks of 2**i tokens from each distance on.

    Two blocks have one name if their tokens are equal. Only blocks that occur in the last MAX_REPEAT tokens have a name
    of their own, which is one of their distances there.
    """
    num_rows = len(tokens)
    places = torch.arange(MAX_REPEAT, dtype=torch.uint8, device=tokens.device).expand(num_rows, -1)
    keys, num_keys, size = F.pad(tokens, (0, MAX_REPEAT), value=vocab_size), vocab_size + 1, 1
    names: list[Tensor] = []
    while size < MAX_REPEAT:
        num_places = MAX_REPEAT - size + 1
        table = torch.full((num_rows, num_keys), _NO_NAME, dtype=torch.uint8, device=tokens.device)
        name = table.scatter_(1, keys[:, :num_places], places[:, :num_places]).gather(1, keys)
        names.append(name)
        keys = torch.add(name[:, size:], name[:, :-size].long(), alpha=_NO_NAME + 1)
        num_keys = (_NO_NAME + 1) ** 2
        size *= 2
    return names


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
    """Return [num_rows, 1]: tokens behind the last breaker of the last MAX_REPEAT; without one, the window's size."""
    longest = max(1, breakers.sequences.shape[2])
    tokens, sizes = window.tokens[:, : MAX_REPEAT + longest - 1], window.sizes
    distances = torch.arange(tokens.shape[1], device=tokens.device)
    # [num_rows, distances]: length of the longest breaker that starts at each distance; 0: none.
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
