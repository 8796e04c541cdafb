"""The part of a linear layer that this rank holds, with tensor parallelism, and how the parts come together.

The default process group of torch.distributed has the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, distributed, nn

Pieces = Sequence[tuple[int, int]]
"""Half-open intervals of features."""
Agree = Callable[[bool], bool]
"""Returns whether all ranks pass True. `bool` is that of a worker without ranks."""
_NAME = "lineclear_shard"


class Shard(NamedTuple):
    """The features of the whole layer, and those that this rank holds; None: all of them."""

    in_features: int
    out_features: int
    inputs: Pieces | None = None
    outputs: Pieces | None = None


def mark(module: nn.Module, shard: Shard) -> None:
    """Note what `module` holds of its layer."""
    setattr(module, _NAME, shard)  # a plain attribute, not a parameter


def is_divided(module: nn.Module) -> bool:
    """Return whether `module` holds a part of its layer."""
    return hasattr(module, _NAME)


def shard_of(module: nn.Linear) -> Shard:
    """Return what `module` holds of its layer: all of it without tensor parallelism."""
    found: Shard | None = getattr(module, _NAME, None)
    return found or Shard(module.in_features, module.out_features)


def add_over_ranks(sums: Tensor) -> Tensor:
    """Add the partial sums of all ranks, in place; return them."""
    distributed.all_reduce(sums)
    return sums


def gather_over_ranks(part: Tensor, size: int) -> Tensor:
    """Return the first `size` features [..., size] of those of which each rank has an equal part [..., features]."""
    count = distributed.get_world_size()
    parts = part.new_empty(count * part.shape[0], *part.shape[1:])
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor  # before torch 2.13
    gather(parts, part.contiguous())
    return parts.view(count, *part.shape).movedim(0, -2).flatten(-2)[..., :size].contiguous()


def take(tensor: Tensor, dim: int, pieces: Pieces | None) -> Tensor:
    """Return a copy of these features of a dimension; all of them: the tensor itself."""
    if pieces is None:
        return tensor
    return torch.cat([tensor.narrow(dim, start, end - start) for start, end in pieces], dim)


def equal_piece(size: int, rank: int, count: int, groups: int = 1) -> Pieces:
    """Return the part of `rank` of a dimension of `groups` equal groups, each divided into `count` equal parts."""
    part = size // groups // count
    return [(start, start + part) for start in range(rank * part, size, size // groups)]
