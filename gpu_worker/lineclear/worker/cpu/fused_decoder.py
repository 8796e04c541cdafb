"""A fused forward pass on the CPU for models built like Llama, made from a loaded transformers model.

A layer is four matrix products, attention and four row operations, where transformers' modules take about fifty
operations. The calls are captured once, on buffers that stay, and replayed at every step (kernels/call_graph.py).
`can_build` decides which models qualify. The loader keeps the result only if its logits match the model's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lineclear.worker.attention.base import AttentionBackend, IntArray
from lineclear.worker.huge_pages import HugePageArena
from lineclear.worker.kernels.call_graph import Call, CallGraph, DynamicInt, DynamicPointer, address, pointer
from lineclear.worker.kernels.native_library import ELEMENTS, LANES, MAX_HEAD_DIM, selected_library
from lineclear.worker.logits import Logits
from lineclear.worker.lora.adapter_set import AdapterSet
from lineclear.worker.lora.fused_lora import AdapterCalls, Part

from .linear import Linear, Packer
from .rotary_cache import RotaryCache
from .row_kernels import ACTIVATIONS, Heads, Norm, RowKernels

FAMILIES = frozenset({"granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3"})
"""Model types whose decoder layer is `_Layer`: attention, a gated MLP, RMS norms, rotary positions."""


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """Weights of a decoder layer. OLMo 2 norms the outputs of attention and MLP, other families the inputs."""

    norm_before_attention: Norm | None
    norm_after_attention: Norm | None
    norm_before_mlp: Norm | None
    norm_after_mlp: Norm | None
    qkv: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    attention_output: Linear
    gate_up: Linear
    down: Linear
    rotates: bool


class _Parts(NamedTuple):
    """The modules of a layer in each of its matrix products, for adapters."""

    qkv: list[Part]
    attention_output: list[Part]
    gate_up: list[Part]
    down: list[Part]


class _Activations(NamedTuple):
    """Buffers [num_tokens, ...] of a step's activations, kept between steps: fresh memory costs page faults."""

    residual: Tensor
    normed: Tensor
    output: Tensor
    """Of attention or MLP, before it is added to the residual."""
    normed_output: Tensor
    qkv: Tensor
    cosine: Tensor
    sine: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    attended: Tensor
    gate_up: Tensor
    gated: Tensor
    input_ids: Tensor


class _HeadActivations(NamedTuple):
    """Buffers [num_samples, ...] from the last layer to the logits."""

    residual: Tensor
    output: Tensor
    normed: Tensor
    logits: Tensor
    max_values: Tensor
    ids: Tensor


class FusedDecoder:
    """Computes logits of packed tokens over a paged attention backend. Holds its own packed weights."""

    def __init__(
        self, model: Any, num_heads: int, num_kv_heads: int, head_dim: int, max_positions: int, packer: Packer
    ) -> None:
        config = model.config
        self._heads, self._kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim
        self._hidden, self._intermediate = int(config.hidden_size), int(config.intermediate_size)
        self._vocab_size = int(model.lm_head.out_features)
        self._dtype = model.dtype
        self._embedding: Tensor = model.model.embed_tokens.weight
        self._rotary = RotaryCache(model.model.rotary_emb, model.dtype, max_positions)
        arena = HugePageArena()
        self._layers = [_fused_layer(module, packer, arena) for module in model.model.layers]
        self._parts = [_parts(f"model.layers.{i}", module) for i, module in enumerate(model.model.layers)]
        self._final = _norm(model.model.norm)
        self._lm_head = packer([model.lm_head], arena)
        self._activation = ACTIVATIONS[config.hidden_act]
        self._embedding_scale = float(getattr(config, "embedding_multiplier", 1.0))
        self._logits_scale = 1.0 / float(getattr(config, "logits_scaling", 1.0))
        self._kernels = RowKernels(model.dtype, float(getattr(config, "residual_multiplier", 1.0)))
        self._backend: AttentionBackend | None = None
        self._tokens, self._samples = DynamicInt(0), DynamicInt(0)
        self._table, self._read_indices = DynamicPointer(), DynamicPointer()
        self._positions, self._sample_rows = DynamicPointer(), DynamicPointer()
        self._token_table: Tensor | None = None  # kept alive: `_table` points to it
        # Capacities are kept beside the buffers: len() of a tensor takes 10 µs inside a step.
        self._activations: _Activations | None = None
        self._capacity = 0
        self._head_activations: _HeadActivations | None = None
        self._head_capacity = self._num_samples = 0
        self._layers_graph, self._norm_graph, self._head_graph = CallGraph(), CallGraph(), CallGraph()
        self._adapters: AdapterSet | None = None
        self._row_adapters = DynamicPointer()
        self._adapted_graph: tuple[int, AdapterCalls, CallGraph] | None = None  # of a version of the adapters
        self._logits: tuple[Tensor, Tensor, Tensor] = (torch.empty(0), torch.empty(0), torch.empty(0))
        self._host_max: Any = memoryview(b"")  # this and the next: host views of the last two tensors of `_logits`
        self._host_ids: Any = memoryview(b"")
        self._identity_rotary: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))

    def attach(self, backend: AttentionBackend) -> None:
        """Use `backend` for attention from now on."""
        self._backend = backend
        self._activations = None  # the captured calls use the previous backend

    def use_adapters(self, adapters: AdapterSet) -> None:
        """Add the products of `adapters` in steps in which a row has one."""
        self._adapters, self._adapted_graph = adapters, None

    def logits(self, tokens: Tensor, read_indices: IntArray, positions: IntArray, sample_rows: IntArray) -> Logits:
        """Return the logits of the packed tokens `sample_rows`; the packed tokens are `tokens[read_indices]`.

        All arguments are int64. Call `start_step` of the backend first. Token ids and positions are not checked again.
        The logits are valid until the next call.
        """
        assert sample_rows.dtype == np.int64
        self.forward(tokens, read_indices, positions)
        return self.head(sample_rows)

    def forward(self, tokens: Tensor, read_indices: IntArray, positions: IntArray) -> None:
        """Run the layers over the packed tokens; `head` and `hidden` continue from there for any of them."""
        assert read_indices.dtype == positions.dtype == np.int64
        self._grow_tokens(len(read_indices))
        if (end := max(positions.tolist()) + 1) > self._rotary.num_filled:
            self._rotary.extend(end)
        self._tokens.value = len(read_indices)
        if tokens is not self._token_table:
            self._token_table, self._table.value = tokens, tokens.data_ptr()
        self._read_indices.value, self._positions.value = address(read_indices), address(positions)
        if self._adapters is None or self._adapters.rows is None:
            self._layers_graph.replay()
        else:
            self._row_adapters.value = address(self._adapters.rows)
            self._graph_with(self._adapters).replay()

    def head(self, rows: IntArray) -> Logits:
        """Return the logits of the packed tokens `rows`, valid until the next call."""
        self._set_rows(rows)
        self._head_graph.replay()
        return Logits(*self._logits, (self._host_max.tolist(), self._host_ids.tolist()))

    def hidden(self, rows: IntArray) -> Tensor:
        """Return the hidden states of the packed tokens `rows` behind the last norm, valid until the next call."""
        head = self._set_rows(rows)
        self._norm_graph.replay()
        return head.normed[: len(rows)]

    def _set_rows(self, rows: IntArray) -> _HeadActivations:
        assert self._activations is not None
        head = self._grow_samples(len(rows), self._activations)
        if len(rows) != self._num_samples:
            self._set_num_samples(head, len(rows))
        self._samples.value, self._sample_rows.value = len(rows), address(rows)
        return head

    # --- capture -----------------------------------------------------------------------------------------------------

    def _grow_tokens(self, tokens: int) -> _Activations:
        if self._activations is None or tokens > self._capacity:
            capacity = self._capacity = max(tokens, 0 if self._activations is None else 2 * self._capacity)
            query, key = (self._heads, self._head_dim), (self._kv_heads, self._head_dim)
            shapes: list[tuple[int, ...]] = [(self._hidden,)] * 4
            shapes += [((self._heads + 2 * self._kv_heads) * self._head_dim,), *[(self._rotary.width,)] * 2]
            shapes += [query, key, key, query, (2 * self._intermediate,), (self._intermediate,), ()]
            others = {"cosine": torch.float32, "sine": torch.float32, "input_ids": torch.int64}
            dtypes = dict.fromkeys(_Activations._fields, self._dtype) | others
            tensors = (torch.empty(capacity, *x, dtype=t) for x, t in zip(shapes, dtypes.values(), strict=True))
            self._activations = _Activations(*tensors)
            self._layers_graph, self._adapted_graph = CallGraph(self._capture(self._activations)), None
            self._head_activations = None  # its captured calls read the old buffers
        return self._activations

    def _grow_samples(self, samples: int, act: _Activations) -> _HeadActivations:
        if self._head_activations is None or samples > self._head_capacity:
            self._head_capacity = samples
            shapes = [(self._hidden,)] * 3 + [(self._vocab_size,), (), ()]
            dtypes = [self._dtype] * 4 + [torch.float32, torch.int64]
            tensors = (torch.empty(samples, *x, dtype=t) for x, t in zip(shapes, dtypes, strict=True))
            head = self._head_activations = _HeadActivations(*tensors)
            self._set_num_samples(head, samples)
            # The output of the last MLP, not yet added to the residual.
            output = act.output if self._layers[-1].norm_after_mlp is None else act.normed_output
            calls = [
                self._kernels.gather(self._samples, pointer(act.residual), self._sample_rows, head.residual),
                self._kernels.gather(self._samples, pointer(output), self._sample_rows, head.output),
                self._kernels.add_norm(self._samples, head.residual, head.output, self._final, head.normed),
            ]
            self._norm_graph = CallGraph(list(calls))
            calls.append(self._lm_head.bind(self._samples, head.normed, head.logits))
            if self._logits_scale != 1.0:
                calls.append((lambda: head.logits[: self._samples.value].mul_(self._logits_scale), ()))
            self._head_graph = CallGraph(
                [*calls, self._kernels.argmax(self._samples, head.logits, head.max_values, head.ids)]
            )
        return self._head_activations

    def _set_num_samples(self, head: _HeadActivations, samples: int) -> None:
        """Slice the head's buffers to `samples` rows, once: slicing tensors takes too long for a step of one row."""
        self._num_samples = samples
        _, max_values, ids = self._logits = head.logits[:samples], head.max_values[:samples], head.ids[:samples]
        self._host_max, self._host_ids = max_values.numpy().data, ids.numpy().data

    def _graph_with(self, adapters: AdapterSet) -> CallGraph:
        """Return the calls through all layers with the products of the adapters, captured once for each version."""
        if self._adapted_graph is None or self._adapted_graph[0] != adapters.version:
            assert self._activations is not None
            products = AdapterCalls(selected_library(), adapters, self._tokens, self._row_adapters)
            graph = CallGraph(self._capture(self._activations, products))
            self._adapted_graph = adapters.version, products, graph
        return self._adapted_graph[2]

    def _capture(self, act: _Activations, adapters: AdapterCalls | None = None) -> list[Call]:
        """Return the calls from token ids through all layers, on the first `_tokens` rows of `act`."""
        count, kernels, width = self._tokens, self._kernels, self._rotary.width
        identity_rotary = (torch.ones(len(act.cosine), width), torch.zeros(len(act.sine), width))
        self._identity_rotary = identity_rotary  # kept alive: the calls hold its addresses
        calls = [
            kernels.gather(count, self._table, self._read_indices, act.input_ids),
            kernels.gather(count, pointer(self._embedding), pointer(act.input_ids), act.residual),
            kernels.gather(count, pointer(self._rotary.cosine), self._positions, act.cosine),
            kernels.gather(count, pointer(self._rotary.sine), self._positions, act.sine),
        ]
        if self._embedding_scale != 1.0:
            calls.append((lambda: act.residual[: count.value].mul_(self._embedding_scale), ()))
        pending: Tensor | None = None  # output of attention or MLP, not yet added to the residual
        for index, layer in enumerate(self._layers):
            x = act.residual
            if layer.norm_before_attention is not None or pending is not None:
                calls.append(kernels.add_norm(count, act.residual, pending, layer.norm_before_attention, act.normed))
                x = act.residual if layer.norm_before_attention is None else act.normed
            rotary = (act.cosine, act.sine) if layer.rotates else identity_rotary
            calls += self._attention_calls(index, x, rotary, act, adapters)
            pending = act.output if layer.norm_after_attention is None else act.normed_output
            x = act.residual if layer.norm_before_mlp is None else act.normed
            calls.append(kernels.add_norm(count, act.residual, pending, layer.norm_before_mlp, act.normed))
            calls += self._mlp_calls(index, x, act, adapters)
            pending = act.output if layer.norm_after_mlp is None else act.normed_output
        return calls

    def _attention_calls(
        self, index: int, x: Tensor, rotary: tuple[Tensor, Tensor], act: _Activations, adapters: AdapterCalls | None
    ) -> list[Call]:
        """Return the calls from the input `x` of a layer to its attention's `act.output`."""
        backend, count, layer, parts = self._backend, self._tokens, self._layers[index], self._parts[index]
        assert backend is not None
        attended = act.attended.view(len(act.attended), -1)
        heads = Heads(act.qkv, *rotary, act.query, act.key, act.value)
        return [
            layer.qkv.bind(count, x, act.qkv),
            *_products(adapters, parts.qkv, x, act.qkv),
            self._kernels.split_heads(count, layer.q_norm, layer.k_norm, heads),
            backend.bind(index, count, act.query, act.key, act.value, act.attended),
            layer.attention_output.bind(count, attended, act.output),
            *_products(adapters, parts.attention_output, attended, act.output),
            *_norms_of_output(self._kernels, count, layer.norm_after_attention, act),
        ]

    def _mlp_calls(self, index: int, x: Tensor, act: _Activations, adapters: AdapterCalls | None) -> list[Call]:
        """Return the calls from the input `x` of a layer's MLP to its `act.output`."""
        count, layer, parts = self._tokens, self._layers[index], self._parts[index]
        return [
            layer.gate_up.bind(count, x, act.gate_up),
            *_products(adapters, parts.gate_up, x, act.gate_up),
            self._kernels.gate(count, self._activation, act.gate_up, act.gated),
            layer.down.bind(count, act.gated, act.output),
            *_products(adapters, parts.down, act.gated, act.output),
            *_norms_of_output(self._kernels, count, layer.norm_after_mlp, act),
        ]


def _norms_of_output(kernels: RowKernels, count: DynamicInt, norm: Norm | None, act: _Activations) -> list[Call]:
    return [] if norm is None else [kernels.add_norm(count, act.output, None, norm, act.normed_output)]


def _products(adapters: AdapterCalls | None, parts: Sequence[Part], x: Tensor, out: Tensor) -> list[Call]:
    return [] if adapters is None else adapters.calls(parts, x, out)


def can_build(model: Any, family: str, shape: tuple[int, int, int]) -> bool:
    """Return whether FusedDecoder can compute this model here. `shape`: num_heads, num_kv_heads, head_dim."""
    config, head_dim = model.config, shape[2]
    return (
        family in FAMILIES
        and next(model.parameters()).device.type == "cpu"
        and model.dtype in ELEMENTS
        and selected_library() is not None
        and config.hidden_act in ACTIVATIONS
        and math.gcd(head_dim, config.hidden_size, config.intermediate_size) % LANES == 0
        and head_dim <= MAX_HEAD_DIM
    )


def _fused_layer(module: Any, packer: Packer, arena: HugePageArena) -> _Layer:
    attention, mlp = module.self_attn, module.mlp
    fused = hasattr(attention, "qkv_proj")
    after = getattr(module, "post_feedforward_layernorm", None)
    # In OLMo 2 this norms the attention's output, in other families the MLP's input.
    between = module.post_attention_layernorm
    use_rope = bool(getattr(attention, "use_rope", True))
    return _Layer(
        norm_before_attention=_optional_norm(getattr(module, "input_layernorm", None)),
        norm_after_attention=None if after is None else _norm(between),
        norm_before_mlp=_norm(between) if after is None else None,
        norm_after_mlp=_optional_norm(after),
        qkv=packer([attention.qkv_proj] if fused else [attention.q_proj, attention.k_proj, attention.v_proj], arena),
        q_norm=_optional_norm(getattr(attention, "q_norm", None)),
        k_norm=_optional_norm(getattr(attention, "k_norm", None)),
        attention_output=packer([attention.o_proj], arena),
        gate_up=packer([mlp.gate_up_proj] if hasattr(mlp, "gate_up_proj") else [mlp.gate_proj, mlp.up_proj], arena),
        down=packer([mlp.down_proj], arena),
        rotates=use_rope,
    )


def _parts(path: str, module: Any) -> _Parts:
    """Return the modules in the order in which `_fused_layer` packs them."""
    fused_qkv, fused_gate = hasattr(module.self_attn, "qkv_proj"), hasattr(module.mlp, "gate_up_proj")

    def named(owner: str, *names: str) -> list[Part]:
        owned = getattr(module, owner)
        return [Part(f"{path}.{owner}.{name}", getattr(owned, name).out_features) for name in names]

    return _Parts(
        named("self_attn", *(["qkv_proj"] if fused_qkv else ["q_proj", "k_proj", "v_proj"])),
        named("self_attn", "o_proj"),
        named("mlp", *(["gate_up_proj"] if fused_gate else ["gate_proj", "up_proj"])),
        named("mlp", "down_proj"),
    )


def _norm(module: nn.Module) -> Norm:
    weight = module.weight
    assert isinstance(weight, Tensor)
    eps: Any = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    return Norm(weight.detach().contiguous(), float(eps))


def _optional_norm(module: nn.Module | None) -> Norm | None:
    return None if module is None else _norm(module)
