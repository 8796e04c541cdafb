"""Cosines and sines of rotary position embeddings (RoPE, Su et al. 2021), computed once per position.

The embedding of a position never changes while a model is served: the compatibility probe limits the context length for
models whose frequencies depend on the length.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from lineclear.worker.decoder.decoder_layers import Rotary

_SERIAL_ELEMENTS = 1 << 14
"""Values computed at once. torch divides more of them among threads, and the last bits depend on where it cuts."""
_VECTOR_ELEMENTS = 32
"""torch computes the rest of a division by this number otherwise than the values before it."""


class RotaryCaches:
    """The caches of a model's rotary positions, which are filled together, and a step's rows of them."""

    def __init__(self, rotaries: Sequence[Rotary], dtype: torch.dtype, max_positions: int) -> None:
        self._caches = [RotaryCache(rotary, dtype, max_positions) for rotary in rotaries]
        self.num_filled = 0 if self._caches else max_positions
        self.rows: list[tuple[Tensor, Tensor]] = []
        """Cosines and sines of a step's tokens, for each of the rotary positions; the last ones rotate nothing."""

    def allocate_rows(self, capacity: int) -> None:
        """Allocate `rows` for this number of tokens."""
        widths = [*(cache.width for cache in self._caches), 0]
        self.rows = [(torch.empty(capacity, width), torch.empty(capacity, width)) for width in widths]

    def tables(self) -> list[tuple[Tensor, Tensor]]:
        """Return each table, and the rows of it that a step needs."""
        tables = [table for cache in self._caches for table in (cache.cosine, cache.sine)]
        return list(zip(tables, chain(*self.rows), strict=False))

    def extend(self, end: int) -> None:
        for cache in self._caches:
            cache.extend(end)
        self.num_filled = min(cache.num_filled for cache in self._caches)


class RotaryCache:
    """Cosines and sines [positions, width] of the angles of rotary positions, filled as positions are needed."""

    def __init__(self, rotary: Rotary, dtype: torch.dtype, max_positions: int) -> None:
        """`dtype`: the model's, to which `rotary` may round. Its frequencies may change from `max_positions` on."""
        self._rotary, self._dtype, self._max_positions = rotary, dtype, max_positions
        self.num_filled = 0
        """Positions that are computed."""
        self.width = int(self._compute(0, 1)[0].shape[-1])
        self._chunk = max(_SERIAL_ELEMENTS // (2 * self.width) // _VECTOR_ELEMENTS, 1) * _VECTOR_ELEMENTS  # positions
        # Unwritten memory takes no pages.
        self.cosine, self.sine = (torch.empty(max_positions, self.width) for _ in range(2))

    @torch.inference_mode()
    def extend(self, end: int) -> None:
        """Fill the positions before `end`."""
        while self.num_filled < end:
            start, self.num_filled = self.num_filled, min(self._max_positions, self.num_filled + self._chunk)
            chunk = slice(start, self.num_filled)
            self.cosine[chunk], self.sine[chunk] = self._compute(start, self.num_filled)

    def _compute(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        return self._rotary.angles(torch.arange(start, end), self._dtype)
