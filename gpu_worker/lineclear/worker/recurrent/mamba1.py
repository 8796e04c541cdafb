"""Mamba (selective state spaces, Gu and Dao 2023), in float32 behind the convolution as transformers computes it.

The state of a channel has `state size` numbers, which decay at rates of their own. So there is no form as attention:
chunks go through their tokens one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from .convolution import apply_linear, convolution_state, convolve
from .states import Rows, StateSpec

_BLOCK_TOKENS = 64  # bounds the memory for the states of all tokens


class _Inputs(NamedTuple):
    """Inputs of the scan for packed tokens, float32."""

    x: Tensor  # [num_tokens, channels]
    dt: Tensor  # [num_tokens, channels]
    b: Tensor  # [num_tokens, state size]
    c: Tensor  # [num_tokens, state size]


class Mamba1:
    """One Mamba layer of a transformers model."""

    def __init__(self, module: Any) -> None:
        self._module, self._activation = module, ACT2FN[module.activation]
        self._rate = -module.A_log.float().exp()  # [channels, state size]
        self.state = (convolution_state(module.conv1d), StateSpec(tuple(self._rate.shape), torch.float32))

    def __call__(self, x: Tensor, rows: Rows, pools: Sequence[Tensor]) -> Tensor:
        """Compute packed tokens [num_tokens, hidden size]."""
        module = self._module
        values, gate = apply_linear(module.in_proj, x).chunk(2, dim=-1)
        values = self._activation(convolve(module.conv1d, values.contiguous(), rows, pools[0]))
        sizes = [module.time_step_rank, module.ssm_state_size, module.ssm_state_size]
        parts = torch.split(apply_linear(module.x_proj, values), sizes, dim=-1)
        if (norm := getattr(module, "dt_layernorm", None)) is not None:  # Jamba, Falcon Mamba
            parts = norm(parts[0]), module.b_layernorm(parts[1]), module.c_layernorm(parts[2])
        dt = F.softplus(apply_linear(module.dt_proj, parts[0]).float())
        inputs = _Inputs(values.float(), dt, parts[1].float(), parts[2].float())
        output = self._scan(inputs, rows, pools[1]) + module.D.float() * inputs.x
        return apply_linear(module.out_proj, (output * F.silu(gate.float())).to(x.dtype))

    def _scan(self, inputs: _Inputs, rows: Rows, pool: Tensor) -> Tensor:
        """Return the outputs [num_tokens, channels] of packed tokens, and leave their states in `pool`."""
        output, num_single = torch.empty_like(inputs.x), rows.num_single
        if num_single:
            decays, states = self._terms(_Inputs(*(x[:num_single] for x in inputs)))
            states.addcmul_(decays, pool.index_select(0, rows.single))
            pool.index_copy_(0, rows.single, states)
            output[:num_single] = torch.bmm(states, inputs.c[:num_single, :, None])[..., 0]
        for first, end, row_state in rows.chunks:
            for start in range(first, end, _BLOCK_TOKENS):
                tokens = slice(start, min(start + _BLOCK_TOKENS, end))
                decays, states = self._terms(_Inputs(*(x[tokens] for x in inputs)))
                state = pool[row_state]
                for decay, next_state in zip(decays, states, strict=True):
                    state = next_state.addcmul_(decay, state)
                pool[row_state] = state
                output[tokens] = torch.bmm(states, inputs.c[tokens, :, None])[..., 0]
        return output

    def _terms(self, inputs: _Inputs) -> tuple[Tensor, Tensor]:
        """Return [num_tokens, channels, state size]: by what a token lets the state decay, and what it adds."""
        x, dt, b, _ = inputs
        return (dt[..., None] * self._rate).exp_(), (dt * x)[..., None] * b[:, None]
