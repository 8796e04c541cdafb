"""Rotary positions: a model's own embedding of them, asked once for each position instead of at every step.

How far a position turns is the same in every step of a model that is served: where it would depend on the length of
the sequence, the probe ends the context before it does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CHUNK = 1024  # positions asked for at once: about a millisecond


class RotaryCache:
    """Cosines and sines [positions, width] of a transformers rotary embedding, filled in as positions come up."""

    def __init__(self, rotary: Any, dtype: torch.dtype, max_positions: int) -> None:
        """`dtype` is the model's, which `rotary` may round to.

        No position from `max_positions` on is asked of it: the frequencies may be others from there.
        """
        self._rotary = rotary
        self._dtype = dtype
        self._limit = max_positions
        self._known = 0
        self.width = int(self._ask(0, 1)[0].shape[-1])
        # Memory that nobody has written yet costs nothing.
        self.cosine, self.sine = (torch.empty(max_positions, self.width) for _ in range(2))

    def extend(self, end: int) -> None:
        """Fill in the positions before `end`."""
        while self._known < end:
            self._extend_to()

    @torch.inference_mode()
    def _extend_to(self) -> None:
        begin, self._known = self._known, min(self._limit, self._known + _CHUNK)
        piece = slice(begin, self._known)
        self.cosine[piece], self.sine[piece] = self._ask(begin, self._known)

    def _ask(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        cosine, sine = self._rotary(torch.empty(0, dtype=self._dtype), torch.arange(begin, end)[None])
        return cosine[0], sine[0]
