"""The part of a linear layer that this rank holds, with tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

Pieces = Sequence[tuple[int, int]]
"""Half-open intervals of features."""
_NAME = "lineclear_shard"


class Shard(NamedTuple):
    """The features of the whole layer, and those that this rank holds; None: all of them."""

    in_features: int
    out_features: int
    inputs: Pieces | None = None
    outputs: Pieces | None = None


def mark(module: nn.Linear, shard: Shard) -> None:
    """Note what `module` holds of its layer."""
    setattr(module, _NAME, shard)  # a plain attribute, not a parameter


def shard_of(module: nn.Linear) -> Shard:
    """Return what `module` holds of its layer: all of it without tensor parallelism."""
    found: Shard | None = getattr(module, _NAME, None)
    return found or Shard(module.in_features, module.out_features)


def take(tensor: Tensor, dim: int, pieces: Pieces | None) -> Tensor:
    """Return a copy of these features of a dimension; all of them: the tensor itself."""
    if pieces is None:
        return tensor
    return torch.cat([tensor.narrow(dim, start, end - start) for start, end in pieces], dim)


def equal_piece(size: int, rank: int, count: int, groups: int = 1) -> Pieces:
    """Return the part of `rank` of a dimension of `groups` equal groups, each divided into `count` equal parts."""
    part = size // groups // count
    return [(start, start + part) for start in range(rank * part, size, size // groups)]
