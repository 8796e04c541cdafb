"""The bisection of truncation.py as a Triton kernel: one program for each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096
NUM_WARPS = 16


@triton.jit
def largest_reaching_kernel(
    keys, weights, targets, found, width,
    HAS_WEIGHTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the largest k to `found` at which the keys >= k of a row weigh its target, 0 if none does."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    places = tl.arange(0, TILE)
    largest = tl.zeros([], tl.int32)
    if target > 0:
        for passed in range(31):
            candidate = largest | (1 << (30 - passed))
            sums = tl.zeros([TILE], tl.float64)
            for start in range(0, width, TILE):
                is_key = start + places < width
                at = row * width + start + places
                reaches = is_key & (tl.load(keys + at, is_key, -1) >= candidate)
                if HAS_WEIGHTS:
                    sums += tl.load(weights + at, reaches, 0.0).to(tl.float64)
                else:
                    sums += reaches.to(tl.float64)
            if tl.sum(sums, 0) >= target:
                largest = candidate
    tl.store(found + row, largest)


def largest_reaching(keys: Tensor, weights: Tensor | None, targets: Tensor) -> Tensor:
    """See `truncation.largest_reaching`; targets are float64."""
    found = torch.empty(targets.shape, dtype=torch.int32, device=keys.device)
    weighed = keys if weights is None else weights
    operands = keys.contiguous(), weighed.contiguous(), targets, found, keys.shape[-1]
    largest_reaching_kernel[(len(keys),)](*operands, weights is not None, TILE, num_warps=NUM_WARPS)
    return found
