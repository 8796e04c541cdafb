"""A matrix of 8-bit floating-point numbers, with a scale for each group of inputs.

`GroupedWeight` cannot hold it: the values of E4M3 in one group differ by a factor of up to 2^17, and 8-bit integers
with one scale would round small values more coarsely than E4M3 does. So the numbers are kept, and products are exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Float8Weight:
    """A matrix [outputs, inputs] whose element is `value * scale` of its row and group."""

    codes: Tensor
    """float8_e4m3fn or float8_e5m2 [outputs, inputs]."""
    scale: Tensor
    """float32 [outputs, groups]."""
    group_size: int
    """Consecutive inputs of a group; the last group may have fewer."""

    @property
    def shape(self) -> tuple[int, int]:
        """Return (outputs, inputs)."""
        outputs, inputs = self.codes.shape
        return outputs, inputs

    @property
    def num_bytes(self) -> int:
        """Return the memory that it takes."""
        return self.codes.nbytes + self.scale.nbytes

    def rows(self, rows: slice | Tensor) -> Float8Weight:
        """Return the matrix of these outputs. One of a slice shares this one's memory."""
        return replace(self, codes=self.codes[rows], scale=self.scale[rows])

    def to(self, device: torch.device) -> Float8Weight:
        """Return the matrix on a device."""
        return replace(self, codes=self.codes.to(device), scale=self.scale.to(device))

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the matrix, computed in float32 and rounded once to `dtype`."""
        wide = self.codes.float()
        if self.scale.shape[1] == 1:
            return wide.mul_(self.scale).to(dtype)
        return wide.mul_(self.scale.repeat_interleave(self.group_size, 1)[:, : wide.shape[1]]).to(dtype)
