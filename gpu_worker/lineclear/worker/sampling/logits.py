"""Logits of a step's sampling rows, with the argmax of each row.

Nearly every step needs the argmax, and it is cheapest while a row is still in the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lineclear.worker.kernels.native_library import ELEMENTS, selected_library

_ARGMAX_WIDTH = 128


class Logits(NamedTuple):
    """Logits of all sampling rows of a step. The model owns the memory; it is valid until the next step."""

    values: Tensor
    """[num_rows, vocabulary]."""
    max_values: Tensor
    """[num_rows]: the maximum of each row; NaN if the row has one."""
    max_ids: Tensor
    """[num_rows] int64: the token id of the maximum, the lowest among equals. Where `bad` is given, 0 in bad rows."""
    host_max: tuple[list[float], list[int]] | None = None
    """`max_values` and `max_ids` as lists, on a CPU: for a few rows a list costs less than a tensor."""
    bad: Tensor | None = None
    """[num_rows] bool: the maximum is not finite. On other devices, where a captured graph computes it; else None."""


def with_argmax(values: Tensor) -> Logits:
    """Return `values` [num_rows, vocabulary] as Logits.

    Without the kernel, torch reduces chunks first: a maximum without an index is several times as fast.
    """
    count, vocabulary = values.shape
    native = selected_library()
    if native is not None and values.device.type == "cpu" and values.dtype in ELEMENTS and values.is_contiguous():
        max_values, ids = torch.empty(count), torch.empty(count, dtype=torch.int64)
        element = ELEMENTS[values.dtype]
        native.lineclear_argmax(element, count, vocabulary, values.data_ptr(), max_values.data_ptr(), ids.data_ptr())
        return _logits(values, max_values, ids)
    if vocabulary % _ARGMAX_WIDTH:
        return _logits(values, *values.max(dim=-1))
    chunks = values.view(count, vocabulary // _ARGMAX_WIDTH, _ARGMAX_WIDTH)
    chunk = chunks.amax(dim=-1).max(dim=-1).indices
    max_values, index_in_chunk = chunks[torch.arange(count, device=values.device), chunk].max(dim=-1)
    return _logits(values, max_values, chunk * _ARGMAX_WIDTH + index_in_chunk)


def _logits(values: Tensor, max_values: Tensor, ids: Tensor) -> Logits:
    if is_on_host(values):
        return Logits(values, max_values, ids, (max_values.tolist(), ids.tolist()))
    bad = ~torch.isfinite(max_values)
    return Logits(values, max_values, ids.masked_fill_(bad, 0), bad=bad)


def is_on_host(tensor: Tensor) -> bool:
    """Return whether the tensor can be read without a wait for its device."""
    return tensor.device.type == "cpu"


def bad_rows(logits: Logits) -> Tensor:
    """Return [num_rows] bool: models may return -inf for ids that they never produce, but not for all of them."""
    return ~torch.isfinite(logits.max_values) if logits.bad is None else logits.bad
