"""Calls that add the products of adapters to the outputs of fused linear layers (kernels/lora.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lineclear.worker.decoder.decoder_layers import Part
from lineclear.worker.kernels.call_graph import Call, DynamicInt, DynamicPointer, Kernel, fields, pointer, pointer_to
from lineclear.worker.kernels.native_library import ELEMENTS

from .adapter_set import AdapterSet


class _Part(ctypes.Structure):
    """`LineclearLoraPart` in kernels/lora.cpp."""

    _fields_ = (
        *fields(ctypes.c_int64, "rank", "offset", "outputs"),
        *fields(ctypes.c_void_p, "a", "b"),
        *fields(ctypes.c_double, "scale"),
    )


class AdapterCalls:
    """Makes the calls of one version of the adapters, and keeps what their kernels read."""

    def __init__(self, library: Any, adapters: AdapterSet, rows: DynamicInt, row_adapters: DynamicPointer) -> None:
        self._kernel = Kernel(library, "lineclear_lora")
        self._adapters, self._rows, self._row_adapters = adapters, rows, row_adapters
        self._kept: list[Any] = []

    def calls(self, parts: Sequence[Part], x: Tensor, out: Tensor) -> list[Call]:
        """Return the calls that add the products of x [rows, inputs] to out [rows, outputs of all parts]."""
        table = (_Part * (len(parts) * (self._adapters.max_index + 1)))()
        max_rank = 0
        for index in range(self._adapters.max_index + 1):
            offset = 0
            for place, part in enumerate(parts):
                entry = table[index * len(parts) + place]
                entry.offset, entry.outputs = offset, part.outputs
                offset += part.outputs
                if (factors := self._adapters.factors(index, part.module)) is not None:
                    entry.rank, entry.scale = len(factors.a), factors.scale
                    entry.a, entry.b = factors.a.data_ptr(), factors.b.data_ptr()
                    self._kept.append(factors)
                    max_rank = max(max_rank, len(factors.a))
        if not max_rank:
            return []
        scratch = torch.empty(len(x) * len(parts) * max_rank)
        self._kept += [table, scratch]
        sizes = ELEMENTS[x.dtype], x.shape[1], out.shape[1], len(parts), max_rank
        element, *others = map(ctypes.c_int64, sizes)
        tables = self._row_adapters, pointer_to(table)
        return [(self._kernel, (element, self._rows, *others, *tables, pointer(x), pointer(out), pointer(scratch)))]
