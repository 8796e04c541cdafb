"""Attention layers that give attention other tensors than the paged cache keeps, or positions that a packed row lacks.

Multi-head latent attention (MLA; DeepSeek-V2, 2024) makes the keys and values of all heads from one latent vector a
token, by the matrix `kv_b_proj`. The cache keeps the latents. Instead of expanding them at each step, that matrix is
absorbed: queries go through its part for keys, outputs through its part for values, and between them attention runs
over the latents as over one head, whose values are a part of its keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineclear.worker.attention.base import AttentionBackend, LayerSpec

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Packed queries, keys and values [num_tokens, heads, width] -> outputs [num_tokens, heads, width]."""


def latent_spec(module: Any, spec: LayerSpec) -> LayerSpec:
    """Return the parameters of attention over the latents of a layer; `spec`, that over its heads, if it has none."""
    if not callable(getattr(module, "expand_kv", None)) or not hasattr(module, "kv_b_proj"):
        return spec
    rank = int(module.kv_lora_rank)
    return replace(spec, num_kv_heads=1, head_dim=rank + int(module.qk_rope_head_dim), value_dim=rank)


def attend_by(module: Any, backend: AttentionBackend, index: int) -> Attend:
    """Return the attention of layer `index` over `backend`, with the tensors that the module gives and expects."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return backend.attend(index, query, key, value)

    def attend_padded(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        width = value.shape[-1]
        return backend.attend(index, query, key, F.pad(value, (0, key.shape[-1] - width)))[..., :width]

    spec = backend.layers[index]
    if spec.value_dim:
        return _Latent(module, attend)
    return attend_padded if getattr(module, "v_head_dim", spec.head_dim) < spec.head_dim else attend


def adapt(model: nn.Module) -> None:
    """Prepare a model for the compatibility probe.

    Layers of latent attention compute as transformers does again, with keys and values of their heads, and layers that
    scale queries by position know it.
    """
    for module in model.modules():
        module.__dict__.pop("expand_kv", None)
    _tell_positions(model)


class _Latent:
    """Multi-head latent attention of one layer, with its matrix absorbed in queries and outputs."""

    def __init__(self, module: Any, attend: Attend) -> None:
        self._attend = attend
        self._nope, self._rank = int(module.qk_nope_head_dim), int(module.kv_lora_rank)
        weight = module.kv_b_proj.weight
        if not isinstance(weight, Tensor):  # quantized: its product with each unit vector
            norm = module.kv_a_layernorm.weight
            weight = module.kv_b_proj(torch.eye(self._rank, dtype=norm.dtype, device=norm.device)).t()
        parts = weight.view(-1, self._nope + int(module.v_head_dim), self._rank)  # [heads, keys and values, rank]
        self._keys, self._values = parts[:, : self._nope], parts[:, self._nope :].transpose(1, 2)
        module.expand_kv = _latents

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend queries [num_tokens, heads, nope + rope] over the latents to [num_tokens, heads, value width]."""
        absorbed = torch.bmm(query[..., : self._nope].transpose(0, 1), self._keys).transpose(0, 1)
        output = self._attend(torch.cat((absorbed, query[..., self._nope :]), dim=-1), key, value)
        return torch.bmm(output.transpose(0, 1), self._values).transpose(0, 1)


def _latents(latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Stand for `expand_kv`: return keys [1, 1, num_tokens, rank + rope] and values [1, 1, num_tokens, rank]."""
    return torch.cat((latents, rotated), dim=-1), latents


def _tell_positions(model: nn.Module) -> None:
    """Give layers that scale queries by position (Llama 4) the position of each packed token.

    They count from the length of the cache, and here is none. The factors change at thousands of tokens, so the
    compatibility probe would not miss them.
    """
    for layer in model.modules():
        is_scaled = any(getattr(x, "attn_temperature_tuning", False) for x in layer.children())
        if is_scaled and _with_positions not in layer._forward_pre_hooks.values():
            layer.register_forward_pre_hook(_with_positions, with_kwargs=True)


def _with_positions(layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    if named.get("past_key_values") is None and named.get("position_ids") is not None:
        named = named | {"past_key_values": _Positions(named["position_ids"][0])}
    return arguments, named


class _Positions:
    """In place of a cache: its length is such that token i of the row is at its own position."""

    def __init__(self, positions: Tensor) -> None:
        self._positions = positions

    def get_seq_length(self, layer: int = 0) -> Tensor:
        return self._positions - torch.arange(len(self._positions), device=self._positions.device)

    def update(self, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        """Return the new keys and values, without others."""
        return key, value
