"""Cosines and sines of rotary position embeddings (RoPE, Su et al. 2021), computed once per position.

The embedding of a position never changes while a model is served: the compatibility probe limits the context length for
models whose frequencies depend on the length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_SERIAL_ELEMENTS = 1 << 14
"""Values computed at once. torch divides more of them among threads, and the last bits depend on where it cuts."""
_VECTOR_ELEMENTS = 32
"""torch computes the rest of a division by this number otherwise than the values before it."""


class RotaryCache:
    """Cosines and sines [positions, width] of a transformers rotary embedding, filled as positions are needed."""

    def __init__(self, rotary: Any, dtype: torch.dtype, max_positions: int) -> None:
        """`dtype`: the model's, to which `rotary` may round.

        Never calls `rotary` for positions from `max_positions` on: its frequencies may change there.
        """
        self._rotary = rotary
        self._dtype = dtype
        self._max_positions = max_positions
        self.num_filled = 0
        """Positions that are computed."""
        self.width = int(self._compute(0, 1)[0].shape[-1])
        self._chunk = max(_SERIAL_ELEMENTS // self.width // _VECTOR_ELEMENTS, 1) * _VECTOR_ELEMENTS  # positions
        # Unwritten memory takes no pages.
        self.cosine, self.sine = (torch.empty(max_positions, self.width) for _ in range(2))

    def extend(self, end: int) -> None:
        """Fill the positions before `end`."""
        while self.num_filled < end:
            self._fill_chunk()

    @torch.inference_mode()
    def _fill_chunk(self) -> None:
        start, self.num_filled = self.num_filled, min(self._max_positions, self.num_filled + self._chunk)
        chunk = slice(start, self.num_filled)
        self.cosine[chunk], self.sine[chunk] = self._compute(start, self.num_filled)

    def _compute(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        cosine, sine = self._rotary(torch.empty(0, dtype=self._dtype), torch.arange(start, end)[None])
        return cosine[0], sine[0]
