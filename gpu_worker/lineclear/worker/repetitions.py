"""Lengths of the repetitions at the end of each row's sequence, for DRY and repeated n-grams.

Everything is computed over distances: 0 is the last token of the row, 1 the one before. Blocks of 1, 2, 4, ... tokens
get names, so that one comparison covers a whole block (Karp, Miller and Rosenberg 1972). The work for each token of the
context does not depend on the tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .sampling_rows import Context

MAX_REPEAT = 128
"""Longer repetitions count as this long. A power of two."""
_NO_NAME = MAX_REPEAT
"""Of blocks that do not occur in the last tokens."""


class Window(NamedTuple):
    """The last tokens of each row."""

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
