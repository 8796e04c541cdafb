"""What a model says of the next token of each row: a logit for every token, and which of them is the highest.

The highest is nearly always asked for, and found while a row still lies in the cache. What is made of it is decided in
`sampling`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .kernels import ELEMENTS, library

_BEST_WIDTH = 128


class Logits(NamedTuple):
    """Of all rows of a step that sample. The model's own memory: good until its next step."""

    values: Tensor
    """[num_rows, vocabulary]."""
    best: Tensor
    """[num_rows]: the highest of each row; NaN where there is one."""
    ids: Tensor
    """[num_rows] int64: the token that has it, the lowest id among equals."""
    host_best: tuple[list[float], list[int]] | None = None
    """`best` and `ids`, where the host has them already: on a CPU. For a few rows a list costs less than a tensor."""


def of(values: Tensor) -> Logits:
    """These, and the best of them.

    Without the kernel, maxima of pieces first: without an index to carry they are several times as fast.
    """
    count, vocabulary = values.shape
    native = library()
    if native is not None and values.device.type == "cpu" and values.dtype in ELEMENTS and values.is_contiguous():
        best, ids = torch.empty(count), torch.empty(count, dtype=torch.int64)
        element = ELEMENTS[values.dtype]
        native.lineclear_best(element, count, vocabulary, values.data_ptr(), best.data_ptr(), ids.data_ptr())
        return _of(values, best, ids)
    if vocabulary % _BEST_WIDTH:
        return _of(values, *values.max(dim=-1))
    pieces = values.view(count, vocabulary // _BEST_WIDTH, _BEST_WIDTH)
    piece = pieces.amax(dim=-1).max(dim=-1).indices
    best, inside = pieces[torch.arange(count, device=values.device), piece].max(dim=-1)
    return _of(values, best, piece * _BEST_WIDTH + inside)


def _of(values: Tensor, best: Tensor, ids: Tensor) -> Logits:
    return Logits(values, best, ids, (best.tolist(), ids.tolist()) if values.device.type == "cpu" else None)
