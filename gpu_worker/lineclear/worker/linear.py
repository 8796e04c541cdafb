"""Matrix products with weights that never change: laid out once for whatever multiplies fastest here.

Products of one input are fused into one. bf16 weights go through our own kernel where the processor's bf16 instruction
is the slower way (see kernels/matmul.cpp), anything else on a CPU through oneDNN's own layout, worth 1.25 to 1.6 times
at up to 32 rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .kernels import LANES, library, multiplies_bfloat16
from .pages import Pages

Linear = Callable[[Tensor, Tensor], Tensor]
"""[rows, in_features], room for the result -> [rows, out_features], in that room or elsewhere. Contiguous all."""
Packer = Callable[[Sequence[nn.Linear], Pages], Linear]
"""Layers of one input, memory for weights -> their products side by side, outputs in the order given."""

_TYPICAL_ROWS = 64  # what oneDNN's layout is tuned for


def pack(layers: Sequence[nn.Linear], pages: Pages) -> Linear:
    """A Packer that keeps the weights as they are."""
    weight, bias = joined(layers)
    if weight.device.type != "cpu":
        return lambda x, _: F.linear(x, weight, bias)
    if weight.dtype == torch.bfloat16 and weight.shape[1] % LANES == 0 and multiplies_bfloat16():
        return widened(weight, bias, pages)
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return onednn(weight, bias)
    return lambda x, _: F.linear(x, weight, bias)


def plain(layers: Sequence[nn.Linear], pages: Pages) -> Linear:
    """A Packer that copies nothing: slower, for a decoder that is only to be compared with."""
    return lambda x, _: torch.cat([F.linear(x, layer.weight, layer.bias) for layer in layers], dim=-1)


def joined(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weight [sum of out_features, in_features] and bias of the layers as one."""
    weight = torch.cat([layer.weight.detach() for layer in layers]) if len(layers) > 1 else layers[0].weight.detach()
    biased = any(layer.bias is not None for layer in layers)
    return weight, torch.cat([_bias(layer) for layer in layers]) if biased else None


def widened(weight: Tensor, bias: Tensor | None, pages: Pages) -> Linear:
    """Through our own kernel, in fp32 products of bf16 inputs; `library()` is there.

    A row's result is the same bit for bit whatever rows lie beside it.
    """
    native = library()
    assert native is not None
    outputs, inputs = weight.shape
    panels = pages.take((native.lineclear_laid_out(outputs, inputs),), torch.bfloat16)
    weight = weight.contiguous()
    native.lineclear_lay_out(outputs, inputs, weight.data_ptr(), panels.data_ptr())
    wide_bias = None if bias is None else F.pad(bias.float(), (0, len(panels) // inputs - outputs)).contiguous()
    bias_pointer = None if wide_bias is None else wide_bias.data_ptr()
    panels_pointer, multiply = panels.data_ptr(), native.lineclear_multiply

    def linear(x: Tensor, out: Tensor, kept: tuple[Tensor, Tensor | None] = (panels, wide_bias)) -> Tensor:
        multiply(x.shape[0], inputs, outputs, x.data_ptr(), panels_pointer, bias_pointer, out.data_ptr())
        return out

    return linear


def onednn(weight: Tensor, bias: Tensor | None) -> Linear:
    """Through oneDNN, in the layout it likes best."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
    product = torch.ops.mkldnn._linear_pointwise
    none: list[float] = []

    def linear(x: Tensor, out: Tensor) -> Tensor:
        result: Tensor = product(x, packed, bias, "none", none, "")
        return result

    return linear


def _bias(layer: nn.Linear) -> Tensor:
    return layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
