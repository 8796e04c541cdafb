"""A fused forward pass on the CPU for decoders of attention and dense MLPs (decoder_layers.py).

A layer is four matrix products, attention and four row operations, where transformers' modules take about fifty
operations; experts are six calls (experts.py). The calls are captured once, on buffers that stay, and replayed at every
step (kernels/call_graph.py). `problem_of` decides which models qualify. The loader keeps the result only if its logits
match the model's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lineclear.worker.attention.base import AttentionBackend, Indices, IntArray
from lineclear.worker.decoder.decoder_layers import DecoderLayer, DecoderModel, Norm, Part, is_partial
from lineclear.worker.device.huge_pages import HugePageArena
from lineclear.worker.kernels.call_graph import Call, CallGraph, DynamicInt, DynamicPointer, address, pointer
from lineclear.worker.kernels.native_library import ELEMENTS, LANES, MAX_EXPERTS, MAX_HEAD_DIM, selected_library
from lineclear.worker.lora.adapter_set import AdapterSet
from lineclear.worker.lora.fused_lora import AdapterCalls
from lineclear.worker.sampling.logits import Logits
from lineclear.worker.tensor_parallel.shard import add_over_ranks, gather_over_ranks, shard_of

from .experts import ExpertBuffers, PackedExperts
from .linear import Linear, Packer
from .rotary_cache import RotaryCaches
from .row_kernels import Heads, RowKernels


class _Packed(NamedTuple):
    """The matrix products of a layer."""

    qkv: Linear
    attention_output: Linear
    mlp: tuple[Linear, Linear] | None
    """Of gate and up, and down."""
    experts: PackedExperts | None


class _Activations(NamedTuple):
    """Buffers [num_tokens, ...] of a step's activations, kept between steps: fresh memory costs page faults."""

    residual: Tensor
    normed: Tensor
    output: Tensor
    """Of attention or MLP, before it is added to the residual."""
    normed_output: Tensor
    qkv: Tensor
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

    def __init__(self, model: DecoderModel, max_positions: int, packer: Packer) -> None:
        self._model, self._layers, self.query_scale = model, model.layers, model.query_scale
        self._rotary = RotaryCaches(model.rotaries, model.dtype, max_positions)
        arena = HugePageArena()
        self._packed = [_packed_layer(layer, packer, arena) for layer in model.layers]
        self._lm_head = packer([model.output_layer], arena)
        self._kernels = RowKernels(model)
        self._backend: AttentionBackend | None = None
        self._tokens, self._samples = DynamicInt(0), DynamicInt(0)
        self._table, self._read_indices = DynamicPointer(), DynamicPointer()
        self._positions, self._sample_rows = DynamicPointer(), DynamicPointer()
        self._token_table: Tensor | None = None  # kept alive: `_table` points to it
        # Capacities are kept beside the buffers: len() of a tensor takes 10 µs inside a step.
        self._activations: _Activations | None = None
        self._expert_buffers: ExpertBuffers | None = None
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

    def attach(self, backend: AttentionBackend) -> None:
        """Use `backend` for attention from now on."""
        self._backend = backend
        self._activations = None  # the captured calls use the previous backend

    def use_adapters(self, adapters: AdapterSet) -> None:
        """Add the products of `adapters` in steps in which a row has one."""
        self._adapters, self._adapted_graph = adapters, None

    def logits(self, tokens: Tensor, read_indices: Indices, positions: Indices, sample_rows: Indices) -> Logits:
        """Return the logits of the packed tokens `sample_rows`; the packed tokens are `tokens[read_indices]`.

        All arguments are int64, indices are arrays. Call `start_step` of the backend first. Token ids and positions are
        not checked again. The logits are valid until the next call.
        """
        assert isinstance(sample_rows, np.ndarray)
        assert sample_rows.dtype == np.int64
        self.forward(tokens, read_indices, positions)
        return self.head(sample_rows)

    def forward(self, tokens: Tensor, read_indices: Indices, positions: Indices) -> None:
        """Run the layers over the packed tokens; `head` and `hidden` continue from there for any of them."""
        assert isinstance(read_indices, np.ndarray)
        assert isinstance(positions, np.ndarray)
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

    def _grow_tokens(self, tokens: int) -> _Activations:
        if self._activations is None or tokens > self._capacity:
            capacity = self._capacity = max(tokens, 0 if self._activations is None else 2 * self._capacity)
            model = self._model
            query, key = (model.num_heads, model.head_dim), (model.num_kv_heads, model.head_dim)
            shapes: list[tuple[int, ...]] = [(model.hidden_size,)] * 4
            shapes += [((query[0] + 2 * key[0]) * model.head_dim,), query, key, key, query]
            shapes += [(max(layer.inner_outputs for layer in self._layers),), (model.intermediate_size,)]
            tensors = [torch.empty(capacity, *shape, dtype=model.dtype) for shape in shapes]
            tensors.append(torch.empty(capacity, dtype=torch.int64))
            self._rotary.allocate_rows(capacity)
            self._activations = _Activations(*tensors)
            if model.experts is not None:
                self._expert_buffers = ExpertBuffers.allocate(model.experts, capacity, model.hidden_size, model.dtype)
            self._layers_graph, self._adapted_graph = CallGraph(self._capture(self._activations)), None
            self._head_activations = None  # its captured calls read the old buffers
        return self._activations

    def _grow_samples(self, samples: int, act: _Activations) -> _HeadActivations:
        if self._head_activations is None or samples > self._head_capacity:
            self._head_capacity = samples
            model = self._model
            shapes = [(model.hidden_size,)] * 3 + [(shard_of(model.output_layer).out_features,), (), ()]
            dtypes = [model.dtype] * 4 + [torch.float32, torch.int64]
            tensors = (torch.empty(samples, *x, dtype=t) for x, t in zip(shapes, dtypes, strict=True))
            head = self._head_activations = _HeadActivations(*tensors)
            self._set_num_samples(head, samples)
            # The output of the last MLP, not yet added to the residual.
            output = act.output if self._layers[-1].norm_after_mlp is None else act.normed_output
            calls = [
                self._kernels.gather(self._samples, pointer(act.residual), self._sample_rows, head.residual),
                self._kernels.gather(self._samples, pointer(output), self._sample_rows, head.output),
                self._kernels.add_norm(self._samples, head.residual, head.output, model.norm, head.normed),
            ]
            self._norm_graph = CallGraph(list(calls))
            calls += _output_calls(self._samples, model.output_layer, self._lm_head, head)
            if model.logits_scale != 1.0:
                calls.append((lambda: head.logits[: self._samples.value].mul_(model.logits_scale), ()))
            if model.logits_cap:
                calls.append(self._kernels.cap(self._samples, head.logits, model.logits_cap))
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
        count, kernels = self._tokens, self._kernels
        calls = [kernels.gather(count, self._table, self._read_indices, act.input_ids)]
        calls += _embedding_calls(kernels, count, self._positions, self._model, act)
        for table, rows in self._rotary.tables():
            calls.append(kernels.gather(count, pointer(table), self._positions, rows))
        pending: Tensor | None = None  # output of attention or MLP, not yet added to the residual
        for index, layer in enumerate(self._layers):
            x = act.residual
            if layer.norm_before_attention is not None or pending is not None:
                calls.append(kernels.add_norm(count, act.residual, pending, layer.norm_before_attention, act.normed))
                x = act.residual if layer.norm_before_attention is None else act.normed
            calls += self._attention_calls(index, x, act, adapters)
            pending = act.output if layer.norm_after_attention is None else act.normed_output
            norm = layer.norm_before_mlp
            if layer.is_parallel:
                if norm is not None:
                    calls.append(kernels.add_norm(count, act.residual, None, norm, act.normed))
                calls.append(kernels.add_norm(count, act.residual, pending, None, act.normed))
            else:
                calls.append(kernels.add_norm(count, act.residual, pending, norm, act.normed))
                x = act.residual if norm is None else act.normed
            calls += self._mlp_calls(index, x, act, adapters)
            pending = act.output if layer.norm_after_mlp is None else act.normed_output
        return calls

    def _attention_calls(self, index: int, x: Tensor, act: _Activations, adapters: AdapterCalls | None) -> list[Call]:
        """Return the calls from the input `x` of a layer to its attention's `act.output`."""
        backend, count, layer, packed = self._backend, self._tokens, self._layers[index], self._packed[index]
        assert backend is not None
        attended = act.attended.view(len(act.attended), -1)
        rotary = self._rotary.rows[-1 if layer.rotary is None else layer.rotary]
        heads = Heads(act.qkv, *rotary, act.query, act.key, act.value)
        return [
            packed.qkv.bind(count, x, act.qkv),
            *_products(adapters, layer.qkv, x, act.qkv),
            self._kernels.split_heads(count, layer.q_norm, layer.k_norm, heads),
            backend.bind(index, count, act.query, act.key, act.value, act.attended),
            packed.attention_output.bind(count, attended, act.output),
            *_products(adapters, layer.attention_output, attended, act.output),
            *_sums_over_ranks(count, is_partial(layer.attention_output), act.output),
            *_norms_of_output(self._kernels, count, layer.norm_after_attention, act),
        ]

    def _mlp_calls(self, index: int, x: Tensor, act: _Activations, adapters: AdapterCalls | None) -> list[Call]:
        """Return the calls from the input `x` of a layer's MLP to its `act.output`."""
        count, layer, packed = self._tokens, self._layers[index], self._packed[index]
        kernels, activation, calls = self._kernels, self._model.activation, list[Call]()
        if packed.mlp is not None:
            gate_up, gated = _as_wide(act.gate_up, layer.inner_outputs), _as_wide(act.gated, layer.width)
            calls = [
                packed.mlp[0].bind(count, x, gate_up),
                *_products(adapters, layer.gate_up, x, gate_up),
                kernels.activate(count, activation, gate_up, gated),
                packed.mlp[1].bind(count, gated, act.output),
                *_products(adapters, layer.down, gated, act.output),
            ]
        if packed.experts is not None and self._expert_buffers is not None:
            calls += packed.experts.calls(count, x, act.output, self._expert_buffers, kernels, activation)
        return [
            *calls,
            *_sums_over_ranks(count, layer.mlp_is_partial, act.output),
            *_norms_of_output(kernels, count, layer.norm_after_mlp, act),
        ]


def _embedding_calls(
    kernels: RowKernels, count: DynamicInt, positions: DynamicPointer, model: DecoderModel, act: _Activations
) -> list[Call]:
    """Return the calls from token ids and positions to the first `act.residual`."""
    embedding, calls = model.embedding, list[Call]()

    def dequantize() -> None:
        assert not isinstance(embedding, Tensor)
        ids = act.input_ids[: count.value]
        act.residual[: count.value].copy_(embedding.rows(ids).dequantized(model.dtype))

    if isinstance(embedding, Tensor):
        calls.append(kernels.gather(count, pointer(embedding), pointer(act.input_ids), act.residual))
    else:
        calls.append((dequantize, ()))
    if model.embedding_scale != 1.0:
        calls.append((lambda: act.residual[: count.value].mul_(model.embedding_scale), ()))
    if model.learned_positions is not None:
        calls.append(kernels.gather(count, pointer(model.learned_positions), positions, act.output))
        calls.append(kernels.add_norm(count, act.residual, act.output, None, act.normed))
    return calls


def _norms_of_output(kernels: RowKernels, count: DynamicInt, norm: Norm | None, act: _Activations) -> list[Call]:
    return [] if norm is None else [kernels.add_norm(count, act.output, None, norm, act.normed_output)]


def _products(adapters: AdapterCalls | None, parts: Sequence[Part], x: Tensor, out: Tensor) -> list[Call]:
    return [] if adapters is None else adapters.calls(parts, x, out)


def _output_calls(count: DynamicInt, layer: nn.Linear, packed: Linear, head: _HeadActivations) -> list[Call]:
    """Return the calls from the normed states to `head.logits`, which one of several ranks gathers."""
    shard = shard_of(layer)
    if shard.outputs is None:
        return [packed.bind(count, head.normed, head.logits)]
    part = head.logits.new_empty(len(head.logits), layer.out_features)

    def gather() -> None:
        rows = count.value
        head.logits[:rows].copy_(gather_over_ranks(part[:rows], shard.out_features))

    return [packed.bind(count, head.normed, part), (gather, ())]


def _sums_over_ranks(count: DynamicInt, is_sum: bool, out: Tensor) -> list[Call]:

    def sum_over_ranks() -> None:
        add_over_ranks(out[: count.value])

    return [(sum_over_ranks, ())] if is_sum else []


def _as_wide(buffer: Tensor, width: int) -> Tensor:
    """Return the first part of the buffer with as many rows of a smaller width."""
    return buffer.flatten()[: len(buffer) * width].view(len(buffer), width)


def problem_of(model: DecoderModel) -> str:
    """Return why FusedDecoder cannot compute this model here; empty if it can."""
    unit = math.gcd(model.head_dim, model.hidden_size, *model.widths)
    problems = {
        f"no fused pass runs on {model.norm.weight.device.type}": model.norm.weight.device.type != "cpu",
        "no kernel computes float16": model.dtype not in ELEMENTS,
        "no C++ kernels are loaded": selected_library() is None,
        f"a hidden size or head size is no multiple of {LANES}": unit % LANES != 0,
        f"heads are larger than {MAX_HEAD_DIM}": model.head_dim > MAX_HEAD_DIM,
        f"it has more than {MAX_EXPERTS} experts": model.experts is not None and model.experts.count > MAX_EXPERTS,
    }
    return next((problem for problem, is_there in problems.items() if is_there), "")


def _packed_layer(layer: DecoderLayer, packer: Packer, arena: HugePageArena) -> _Packed:
    qkv, attention_output, *mlp = (packer([part.linear for part in parts], arena) for parts in layer.products if parts)
    experts = None if layer.experts is None else PackedExperts(layer.experts, packer, arena, has_shared=bool(mlp))
    return _Packed(qkv, attention_output, (mlp[0], mlp[1]) if mlp else None, experts)
