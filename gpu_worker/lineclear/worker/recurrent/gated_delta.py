"""Gated delta networks (Yang et al. 2024; Qwen3-Next, Qwen3.5, OLMo Hybrid), in float32 as transformers computes them.

The state of a head maps keys to values. A token lets it decay, and replaces a part `beta` of what it has for its key.
Chunks use the WY form: within a block, all corrections follow from one triangular system.
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

_NORM_EPSILON = 1e-6  # of keys and queries, in every implementation


class GatedDelta:
    """One gated delta layer of a transformers model."""

    def __init__(self, module: Any) -> None:
        self._module, self._activation = module, ACT2FN[module.activation]
        self._key_heads, self._heads = module.num_k_heads, module.num_v_heads
        self._key_dim, self._value_dim = module.head_k_dim, module.head_v_dim
        self._rate = -module.A_log.float().exp()
        shape = (self._heads, self._key_dim, self._value_dim)
        self.state = (convolution_state(module.conv1d), StateSpec(shape, torch.float32))

    def __call__(self, x: Tensor, rows: Rows, pools: Sequence[Tensor]) -> Tensor:
        mixed, gate, b, a = self._project(x)
        mixed = self._activation(convolve(self._module.conv1d, mixed, rows, pools[0]))
        inputs = self._inputs(mixed, b, a)
        output = scan(inputs, torch.empty_like(inputs[2]), rows, pools[1], _step, _block)
        output = output.to(x.dtype).view(-1, self._value_dim)
        norm = getattr(self._module, "norm", None) or self._module.o_norm
        normed = norm(output, gate.reshape(-1, self._value_dim)).view(len(x), -1)
        return apply_linear(getattr(self._module, "out_proj", None) or self._module.o_proj, normed)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return query, key and value side by side, the output gate, and the inputs of beta and of the decay."""
        module = self._module
        if hasattr(module, "in_proj_qkvz"):  # Qwen3-Next
            projected = module.in_proj_qkvz(x[None]), module.in_proj_ba(x[None])
            query, key, value, gate, b, a = (y[0] for y in module.fix_query_key_value_ordering(*projected))
            return torch.cat([y.reshape(len(x), -1) for y in (query, key, value)], dim=-1), gate, b, a
        if hasattr(module, "in_proj_qkv"):  # Qwen3.5
            names = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"]
            mixed, gate, b, a = (apply_linear(getattr(module, name), x) for name in names)
            return mixed, gate, b, a
        mixed = torch.cat([apply_linear(y, x) for y in (module.q_proj, module.k_proj, module.v_proj)], dim=-1)
        gate, b, a = (apply_linear(y, x) for y in (module.g_proj, module.b_proj, module.a_proj))
        return mixed, gate, b, a

    def _inputs(self, mixed: Tensor, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return query, key and value [num_tokens, heads, dim], log decay and beta [num_tokens, heads], float32."""
        width = self._key_heads * self._key_dim
        query, key, value = torch.split(mixed.float(), [width, width, self._heads * self._value_dim], dim=-1)
        query, key = (y.view(len(y), self._key_heads, -1) for y in (query, key))
        query, key = (y * torch.rsqrt((y * y).sum(-1, keepdim=True) + _NORM_EPSILON) for y in (query, key))
        if repeats := self._heads // self._key_heads - 1:
            query, key = (y.repeat_interleave(repeats + 1, dim=1) for y in (query, key))
        beta = b.sigmoid() * (2.0 if getattr(self._module, "allow_neg_eigval", False) else 1.0)
        log_decay = self._rate * F.softplus(a.float() + self._module.dt_bias)
        value = value.view(len(value), self._heads, -1)
        return query * self._key_dim**-0.5, key, value, log_decay, beta.float()


def _step(inputs: Sequence[Tensor], states: Tensor) -> Tensor:
    """See `scan`; states are [num_rows, heads, key dim, value dim]."""
    query, key, value, log_decay, beta = inputs
    flat = states.mul_(log_decay.exp()[..., None, None]).flatten(0, 1)
    query, key, value = (x.flatten(0, 1)[:, None] for x in (query, key, value))
    corrections = (value - torch.bmm(key, flat)) * beta.reshape(-1, 1, 1)
    flat.baddbmm_(key.transpose(1, 2), corrections)
    return torch.bmm(query, flat).view(*states.shape[:2], -1)


def _block(inputs: Sequence[Tensor], state: Tensor) -> Tensor:
    query, key, value, log_decay, beta = (x.transpose(0, 1) for x in inputs)  # heads first
    total = log_decay.cumsum(-1)  # [heads, num_tokens]
    is_later = torch.ones(total.shape[1], total.shape[1], dtype=torch.bool, device=total.device).triu(1)
    decay = (total[:, :, None] - total[:, None]).masked_fill_(is_later, float("-inf")).exp_()
    key_beta, from_start = key * beta[..., None], total.exp()[..., None]
    system = (key_beta @ key.transpose(1, 2)) * decay
    right = torch.cat((value * beta[..., None], key_beta * from_start), dim=-1)
    solved: Tensor = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, keys = torch.split(solved, [value.shape[-1], key.shape[-1]], dim=-1)
    values = values - keys @ state
    output: Tensor = (query * from_start) @ state + ((query @ key.transpose(1, 2)) * decay) @ values
    state.mul_(from_start[:, -1:]).baddbmm_((key * decay[:, -1, :, None]).transpose(1, 2), values)
    return output.transpose(0, 1)
