"""Mamba (selective state spaces, Gu and Dao 2023) and Mamba 2 (state space duality, Dao and Gu 2024).

In float32 behind the convolution, as transformers computes prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from .convolution import apply_linear, convolution_state, convolve
from .states import Rows, StateSpec, scan


class Mamba1:
    """A Mamba layer. Each number of a state decays at its own rate, so chunks go through tokens one by one."""

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
        """Return [num_tokens, channels, state size]: the decay of the state by a token, and its addend."""
        x, dt, b, _ = inputs
        return (dt[..., None] * self._rate).exp_(), (dt * x)[..., None] * b[:, None]


class Mamba2:
    """A Mamba 2 layer. The state of a head is [head dim, state size].

    A token lets it decay by exp(dt * A) and adds dt * x times B; its output is the state times C. Chunks compute each
    block of tokens as masked attention. transformers clamps dt for prompts only; here all rows do, so that a token does
    not depend on how its sequence was divided into rows.
    """

    def __init__(self, module: Any) -> None:
        self._module, self._activation = module, ACT2FN[module.activation]
        self._groups, self._size = module.n_groups, module.ssm_state_size
        self._heads, self._head_dim = module.num_heads, module.head_dim
        self._rate = -module.A_log.float().exp()
        shape = (self._heads, self._head_dim, self._size)
        self.state = (convolution_state(module.conv1d), StateSpec(shape, torch.float32))

    def __call__(self, x: Tensor, rows: Rows, pools: Sequence[Tensor]) -> Tensor:
        module, inner, width = self._module, self._heads * self._head_dim, self._groups * self._size
        gate, mixed, dt = torch.split(self._project(x), [inner, inner + 2 * width, self._heads], dim=-1)
        mixed = self._activation(convolve(module.conv1d, mixed.contiguous(), rows, pools[0])).float()
        dt = F.softplus(dt.float() + module.dt_bias.float()).clamp(*module.time_step_limit)
        values, b, c = torch.split(mixed, [inner, width, width], dim=-1)
        values = values.view(len(x), self._heads, -1)
        b, c = (y.view(len(x), self._groups, -1).repeat_interleave(self._heads // self._groups, 1) for y in (b, c))
        inputs = values * dt[..., None], self._rate * dt, b, c
        output = scan(inputs, torch.empty_like(inputs[0]), rows, pools[1], _step, _block)
        output = (output + module.D[:, None] * values).view(len(x), -1)
        is_plain = isinstance(module.norm, nn.Identity)  # of Falcon H1
        gated = output * F.silu(gate) if is_plain else module.norm(output, gate)
        return apply_linear(module.out_proj, gated.to(x.dtype))

    def _project(self, x: Tensor) -> Tensor:
        multiplier = getattr(self._module, "ssm_in_multiplier", None)  # both of Falcon H1
        factors = getattr(self._module, "mup_vector", None)
        projected = apply_linear(self._module.in_proj, x if multiplier is None else x * multiplier)
        return projected if factors is None else projected * factors[0]


def _step(inputs: Sequence[Tensor], states: Tensor) -> Tensor:
    """See `scan`; states are [num_rows, heads, head dim, state size]."""
    x, log_decay, b, c = inputs
    flat = states.mul_(log_decay.exp()[..., None, None]).flatten(0, 1)
    flat.baddbmm_(x.flatten(0, 1)[..., None], b.flatten(0, 1)[:, None])
    return torch.bmm(flat, c.flatten(0, 1)[..., None]).view(x.shape)


def _block(inputs: Sequence[Tensor], state: Tensor) -> Tensor:
    x, log_decay, b, c = (y.transpose(0, 1) for y in inputs)  # heads first
    decay = _segment_sums(log_decay).exp_()  # [heads, num_tokens, num_tokens]
    from_start = log_decay.cumsum(-1).exp()[..., None]
    output = ((c @ b.transpose(1, 2)) * decay) @ x + (c * from_start) @ state.transpose(1, 2)
    state.mul_(from_start[:, -1:]).baddbmm_((x * decay[:, -1, :, None]).transpose(1, 2), b)
    return output.transpose(0, 1)


def _segment_sums(x: Tensor) -> Tensor:
    """Return [..., i, j] = sum of x [..., j + 1 to i], -inf where j > i. Exacter than differences of prefix sums."""
    count = x.shape[-1]
    ones = torch.ones(count, count, dtype=torch.bool, device=x.device)
    terms = x[..., None].expand(*x.shape, count).masked_fill(ones.triu(), 0)
    return terms.cumsum(-2).masked_fill_(ones.triu(1), float("-inf"))
