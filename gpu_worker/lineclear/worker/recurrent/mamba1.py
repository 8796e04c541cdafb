"""Mamba (selective state spaces, Gu and Dao 2023), in float32 behind the convolution as transformers computes it.

The state of a channel has `state size` numbers, which decay at rates of their own. So there is no form as attention:
chunks go through their tokens one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from .convolution import apply_linear, convolution_state, convolve
from .states import Rows, StateSpec, scan


class Mamba1:
    """One Mamba layer of a transformers model."""

    def __init__(self, module: Any) -> None:
        self._module, self._activation = module, ACT2FN[module.activation]
        self._rate = -module.A_log.float().exp()  # [channels, state size]
        self.state = (convolution_state(module.conv1d), StateSpec(tuple(self._rate.shape), torch.float32))

    def __call__(self, x: Tensor, rows: Rows, pools: Sequence[Tensor]) -> Tensor:
        module = self._module
        values, gate = apply_linear(module.in_proj, x).chunk(2, dim=-1)
        values = self._activation(convolve(module.conv1d, values.contiguous(), rows, pools[0]))
        sizes = [module.time_step_rank, module.ssm_state_size, module.ssm_state_size]
        parts = torch.split(apply_linear(module.x_proj, values), sizes, dim=-1)
        if (norm := getattr(module, "dt_layernorm", None)) is not None:  # Jamba, Falcon Mamba
            parts = norm(parts[0]), module.b_layernorm(parts[1]), module.c_layernorm(parts[2])
        dt = F.softplus(apply_linear(module.dt_proj, parts[0]).float())
        inputs = values.float(), dt, parts[1].float(), parts[2].float()
        output = scan(inputs, torch.empty_like(dt), rows, pools[1], self._step, self._block)
        output = output + module.D.float() * inputs[0]
        return apply_linear(module.out_proj, (output * F.silu(gate.float())).to(x.dtype))

    def _step(self, inputs: Sequence[Tensor], states: Tensor) -> Tensor:
        """See `scan`; states are [num_rows, channels, state size]."""
        decays, added = self._terms(inputs)
        torch.addcmul(added, decays, states, out=states)
        return torch.bmm(states, inputs[3][..., None])[..., 0]

    def _block(self, inputs: Sequence[Tensor], state: Tensor) -> Tensor:
        decays, states = self._terms(inputs)
        last = state
        for decay, next_state in zip(decays, states, strict=True):
            last = next_state.addcmul_(decay, last)
        state.copy_(last)
        return torch.bmm(states, inputs[3][..., None])[..., 0]

    def _terms(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return [num_tokens, channels, state size]: by what a token lets the state decay, and what it adds."""
        x, dt, b, _ = inputs
        return (dt[..., None] * self._rate).exp_(), (dt * x)[..., None] * b[:, None]
