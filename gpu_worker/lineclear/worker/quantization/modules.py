"""Modules of a transformers model whose weights stay quantized: linear layers, embeddings and experts.

They compute with the dequantized matrix, a piece of it at a time, on any device. Faster products replace them where a
fused forward pass packs their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .grouped_weight import GroupedWeight, QuantizedWeight

_PIECE_ELEMENTS = 1 << 20
"""Elements of a matrix that are dequantized at once."""


class QuantizedLinear(nn.Module):
    """A linear layer over a quantized matrix."""

    def __init__(self, weight: QuantizedWeight, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight: Any = weight
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [..., in_features] to [..., out_features]."""
        weight = self.weight
        if isinstance(weight, GroupedWeight) and weight.input_order is not None:
            x, weight = x.index_select(-1, weight.input_order), replace(weight, input_order=None)
        product = x.new_empty(*x.shape[:-1], self.out_features)
        step = max(1, _PIECE_ELEMENTS // self.in_features)
        for start in range(0, self.out_features, step):
            rows = slice(start, start + step)
            bias = None if self.bias is None else self.bias[rows]
            product[..., rows] = F.linear(x, weight.rows(rows).dequantized(x.dtype), bias)
        return product

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.weight = self.weight.to(_device(fn))
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


class QuantizedEmbedding(nn.Module):
    """Embeddings that dequantizes the rows that are looked up."""

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype, factor: float = 1.0) -> None:
        super().__init__()
        self.weight: Any = weight
        self._dtype, self._factor = dtype, torch.tensor(factor, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the embeddings [..., features] of token ids."""
        rows: Tensor = self.weight.rows(ids.flatten()).dequantized(self._dtype)
        return (rows * self._factor.item()).view(*ids.shape, -1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.weight = self.weight.to(_device(fn))
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


class QuantizedExperts(nn.Module):
    """The matrices of all experts, in place of a parameter with three dimensions: indexing dequantizes one."""

    def __init__(
        self, experts: Sequence[Sequence[QuantizedWeight]], dtype: torch.dtype, *, is_transposed: bool = False
    ) -> None:
        """Each expert's matrix is one or several, with the outputs one behind the other."""
        super().__init__()
        self.weights = [list(parts) for parts in experts]
        self._dtype, self.is_transposed = dtype, is_transposed
        self._is_hf_initialized = True  # transformers then draws no random numbers into it

    def __getitem__(self, index: int | Tensor) -> Tensor:
        """Return the matrix of an expert, [outputs, inputs] or transposed."""
        parts = [part.dequantized(self._dtype) for part in self.weights[int(index)]]
        matrix = torch.cat(parts) if len(parts) > 1 else parts[0]
        return matrix.t() if self.is_transposed else matrix

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        device = _device(fn)
        self.weights = [[part.to(device) for part in parts] for parts in self.weights]
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


def quantized_bytes(model: nn.Module) -> int:
    """Return the bytes of all quantized matrices; shared ones count once."""
    found: dict[int, QuantizedWeight] = {}
    for module in model.modules():
        if isinstance(module, QuantizedExperts):
            found.update((id(part), part) for parts in module.weights for part in parts)
        elif isinstance(module, QuantizedLinear | QuantizedEmbedding):
            found[id(module.weight)] = module.weight
    return sum(weight.num_bytes for weight in found.values())


def _device(fn: Callable[[Tensor], Tensor]) -> torch.device:
    """Return where `nn.Module.to` moves tensors; another number format is only for those that are not quantized."""
    return fn(torch.empty(0)).device
