"""Thresholds of rows by bisection, without sorting them and without a wait of the host: for devices other than CPUs.

Floats that are not negative are ordered like their bits, so the largest float at which a sum is reached is found bit by
bit. Triton does so in one launch that reads a row from the cache of the device; without Triton it takes torch some
hundred operations, each over all rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .triton_support import is_usable

_HIGHEST_BIT = 30
"""Of a float32 that is not negative."""


def largest_reaching(keys: Tensor, weights: Tensor | None, targets: Tensor) -> Tensor:
    """Return [num_rows, 1] int32: the largest k of each row such that its keys >= k weigh the target or more together.

    keys [num_rows, vocabulary] int32, weights the same in float32 (None: 1 each), targets [num_rows, 1]. 0 where the
    target is not positive, and where all weights together do not reach it. Sums are in the type of the targets.
    """
    if keys.is_cuda and is_usable():
        from .triton_threshold import largest_reaching as by_triton

        return by_triton(keys, weights, targets)
    weighed = torch.ones((), device=keys.device) if weights is None else weights
    found = torch.zeros_like(targets, dtype=torch.int32)
    for bit in range(_HIGHEST_BIT, -1, -1):
        candidate = found | 1 << bit
        reached = torch.where(keys >= candidate, weighed, 0.0).sum(dim=-1, keepdim=True, dtype=targets.dtype)
        found = torch.where((reached >= targets) & (targets > 0), candidate, found)
    return found
