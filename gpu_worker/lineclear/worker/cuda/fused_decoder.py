"""A fused forward pass on CUDA for the decoders of decoder_layers.py: ten launches a layer instead of forty.

Matrix products with a common input are one product of torch, over one weight that the modules' weights are views of.
Triton does the rest (layer_kernels.py). Nothing waits for the device, so that steps can be captured as CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineclear.worker.attention.base import AttentionBackend, Indices, IntArray
from lineclear.worker.decoder.decoder_layers import (
    DecoderLayer,
    DecoderModel,
    Norm,
    Part,
    Rotary,
    fused_weights,
    is_partial,
)
from lineclear.worker.device.staging import to_device
from lineclear.worker.lora.adapter_set import AdapterSet
from lineclear.worker.sampling.logits import Logits, with_argmax
from lineclear.worker.tensor_parallel.shard import add_over_ranks

from .layer_kernels import activate, add_norm, rotate

_POSITIONS_AT_ONCE = 1 << 15


class _Product(NamedTuple):
    """A matrix product over the weights of its parts."""

    weight: Tensor
    bias: Tensor | None
    parts: tuple[Part, ...]
    is_partial: bool
    """The outputs are added over all ranks."""


class _Layer(NamedTuple):
    """The weights of a layer in their places for the kernels."""

    qkv: _Product
    attention_output: _Product
    gate_up: _Product
    down: _Product
    head_norm: Norm | None
    """Of queries and keys: weights of each of their heads."""
    is_whole: bool
    """The norm is over all heads."""


class _States(NamedTuple):
    """Rows between two layers [num_tokens, hidden size]."""

    residual: Tensor
    add: Tensor | None
    """Output of attention or MLP, not yet added."""
    norm: Norm | None
    """Of `add`, before it is added."""


class CudaFusedDecoder:
    """Computes logits of packed tokens over a paged attention backend. Shares its weights with the modules."""

    def __init__(self, model: DecoderModel, max_positions: int) -> None:
        self._model, self.query_scale = model, model.query_scale
        self._layers = [_layer(layer, model) for layer in model.layers]
        self._device = model.norm.weight.device
        self._rotaries = [_rotary_table(rotary, model.dtype, self._device, max_positions) for rotary in model.rotaries]
        self._adapters: AdapterSet | None = None
        self._backend: AttentionBackend | None = None
        self._states: _States | None = None

    def attach(self, backend: AttentionBackend) -> None:
        self._backend = backend

    def use_adapters(self, adapters: AdapterSet) -> None:
        self._adapters, adapters.has_groups = adapters, True

    @torch.inference_mode()
    def logits(self, tokens: Tensor, read_indices: Indices, positions: Indices, sample_rows: Indices) -> Logits:
        states = self._run(tokens, self._tensor(read_indices), self._tensor(positions))
        return self._logits(self._hidden(states, sample_rows))

    @torch.inference_mode()
    def forward(self, tokens: Tensor, read_indices: Indices, positions: Indices) -> None:
        self._states = self._run(tokens, self._tensor(read_indices), self._tensor(positions))

    @torch.inference_mode()
    def head(self, rows: IntArray) -> Logits:
        return self._logits(self.hidden(rows))

    @torch.inference_mode()
    def hidden(self, rows: IntArray) -> Tensor:
        assert self._states is not None
        return self._hidden(self._states, rows)

    def _tensor(self, indices: Indices) -> Tensor:
        return indices if isinstance(indices, Tensor) else to_device(indices, self._device)

    def _run(self, tokens: Tensor, read_indices: Tensor, positions: Tensor) -> _States:
        embedding = self._model.embedding
        assert isinstance(embedding, Tensor), "quantized checkpoints run their modules on a GPU"
        residual = F.embedding(tokens.index_select(0, read_indices), embedding)
        if self._model.embedding_scale != 1.0:
            residual = residual * self._model.embedding_scale
        if self._model.learned_positions is not None:
            residual = residual + F.embedding(positions, self._model.learned_positions)
        states = _States(residual, None, None)
        for index, layer in enumerate(self._model.layers):
            residual, x = self._next(states, layer.norm_before_attention)
            before_mlp = x
            if layer.is_parallel and layer.norm_before_mlp is not None:
                before_mlp = self._next(_States(residual, None, None), layer.norm_before_mlp)[1]
            states = _States(residual, self._attention(index, x, positions), layer.norm_after_attention)
            residual, x = self._next(states, None if layer.is_parallel else layer.norm_before_mlp)
            states = _States(residual, self._mlp(index, before_mlp if layer.is_parallel else x), layer.norm_after_mlp)
        return states

    def _next(self, states: _States, norm: Norm | None, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the sum of the residual and the pending output, and its norm."""
        return add_norm(states.residual, states.add, states.norm, norm, self._model.residual_scale, rows)

    def _attention(self, index: int, x: Tensor, positions: Tensor) -> Tensor:
        model, layer, backend = self._model, self._layers[index], self._backend
        assert backend is not None
        num_heads = model.num_heads, model.num_kv_heads
        heads = self._product(layer.qkv, x)
        if model.has_grouped_heads:
            heads = heads.view(len(x), -1, 3, model.head_dim).transpose(1, 2).contiguous()
        heads = heads.view(len(x), -1, model.head_dim)
        query_key, value = heads[:, : sum(num_heads)], heads[:, sum(num_heads) :]
        place = model.layers[index].rotary
        if place is not None or layer.head_norm is not None:
            rotary = None if place is None else self._rotaries[place]
            norm = layer.head_norm, layer.is_whole
            query_key = rotate(heads, num_heads, positions, rotary, *norm, model.rotates_pairs)
        attended = backend.attend(index, query_key[:, : num_heads[0]], query_key[:, num_heads[0] :], value)
        return self._product(layer.attention_output, attended.reshape(len(x), -1))

    def _mlp(self, index: int, x: Tensor) -> Tensor:
        layer, model = self._layers[index], self._model
        gated = activate(self._product(layer.gate_up, x), model.intermediate_size, model.activation)
        return self._product(layer.down, gated)

    def _product(self, product: _Product, x: Tensor) -> Tensor:
        out, end = F.linear(x, product.weight, product.bias), 0
        if self._adapters is not None and self._adapters.rows is not None:
            for part in product.parts:
                start, end = end, end + part.outputs
                self._adapters.add_product(part.module, x, out[:, start:end])
        return add_over_ranks(out) if product.is_partial else out

    def _hidden(self, states: _States, rows: Indices) -> Tensor:
        return self._next(states, self._model.norm, self._tensor(rows))[1]

    def _logits(self, hidden: Tensor) -> Logits:
        logits, scale, cap = self._model.output_layer(hidden), self._model.logits_scale, self._model.logits_cap
        logits = logits if scale == 1.0 else logits * scale
        return with_argmax(torch.tanh(logits / cap) * cap if cap else logits)


def _layer(layer: DecoderLayer, model: DecoderModel) -> _Layer:
    products = [
        _Product(*_shared([part.linear for part in parts]), parts, is_partial(parts)) for parts in layer.products
    ]
    norm, is_whole = None, False
    if layer.q_norm is not None and layer.k_norm is not None:
        sizes = (layer.q_norm.weight, model.num_heads), (layer.k_norm.weight, model.num_kv_heads)
        weights = [weight.repeat(heads * model.head_dim // len(weight)) for weight, heads in sizes]
        norm, is_whole = Norm(torch.cat(weights), layer.q_norm.eps), len(layer.q_norm.weight) != model.head_dim
    return _Layer(products[0], products[1], products[2], products[3], norm, is_whole)


def _shared(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Concatenate the layers, whose weights become views of the result: weight [outputs, inputs], and bias or None."""
    weight, bias = fused_weights(layers)
    start = 0
    for layer in layers if len(layers) > 1 else ():
        rows = slice(start, start := start + layer.out_features)
        layer.weight = nn.Parameter(weight[rows], requires_grad=False)
        if layer.bias is not None and bias is not None:
            layer.bias = nn.Parameter(bias[rows], requires_grad=False)
    return weight, bias


def _rotary_table(rotary: Rotary, dtype: torch.dtype, device: torch.device, max_positions: int) -> Tensor:
    """Return [max_positions, width]: cosines of each pair of values that rotates, then sines."""
    parts = []
    for start in range(0, max_positions, _POSITIONS_AT_ONCE):
        positions = torch.arange(start, min(start + _POSITIONS_AT_ONCE, max_positions), device=device)
        parts.append(torch.cat(rotary.angles(positions, dtype), dim=-1))
    return torch.cat(parts)
