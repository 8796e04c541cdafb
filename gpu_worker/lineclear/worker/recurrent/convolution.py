"""The causal short convolution with a state, and LFM2's layer around it.

The state of a channel is its last `kernel size - 1` inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .states import Rows, StateSpec


def apply_linear(layer: Any, x: Tensor) -> Tensor:
    """Call a linear layer on packed tokens [num_tokens, features] in transformers' shape, which hooks expect."""
    output: Tensor = layer(x[None])[0]
    return output


def convolution_state(convolution: Any) -> StateSpec:
    """Return the state of a depthwise convolution, a `nn.Conv1d`."""
    weight = convolution.weight
    return StateSpec((weight.shape[0], weight.shape[-1] - 1), weight.dtype)


def convolve(convolution: Any, x: Tensor, rows: Rows, pool: Tensor) -> Tensor:
    """Return the causal convolution of packed inputs [num_tokens, channels]; `pool` has the inputs before each row."""
    weight, bias, num_single = convolution.weight, convolution.bias, rows.num_single
    output, kept = torch.empty_like(x), weight.shape[-1] - 1
    if num_single:
        windows = torch.cat((pool.index_select(0, rows.single), x[:num_single, :, None]), dim=-1)  # [rows, channels, k]
        sums = (windows.float() * weight[:, 0].float()).sum(-1)
        output[:num_single] = sums if bias is None else sums + bias.float()
        pool.index_copy_(0, rows.single, windows[..., 1:])
    for first, end, state in rows.chunks:
        window = torch.cat((pool[state], x[first:end].t()), dim=-1)  # [channels, k - 1 + tokens]
        output[first:end] = F.conv1d(window[None], weight, bias, groups=len(weight))[0].t()
        pool[state] = window[:, window.shape[1] - kept :]
    return output


class ShortConvolution:
    """The gated short convolution of LFM2 (Liquid AI 2025): out_proj(C * conv(B * x))."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.state = (convolution_state(module.conv),)

    def __call__(self, x: Tensor, rows: Rows, pools: Sequence[Tensor]) -> Tensor:
        b, c, x = apply_linear(self._module.in_proj, x).chunk(3, dim=-1)
        return apply_linear(self._module.out_proj, c * convolve(self._module.conv, b * x, rows, pools[0]))
