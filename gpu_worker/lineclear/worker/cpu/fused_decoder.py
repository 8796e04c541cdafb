"""One forward pass of few operations for models built like Llama, made from a loaded transformers model.

A layer is four matrix products, attention, and four passes over the rows; transformers' own modules take some fifty
operations for the same. The calls are recorded once, on memory that stays (see `tape`). Which models: `can_build` looks
at them, and the loader keeps the result only if its logits are the model's own. Everything else runs through
transformers.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lineclear.worker.attention import AttentionBackend, IntArray
from lineclear.worker.huge_pages import HugePageArena
from lineclear.worker.kernels import ELEMENTS, LANES, LARGEST_HEAD, library
from lineclear.worker.kernels.call_graph import Call, CallGraph, DynamicInt, DynamicPointer, Kernel, address, pointer
from lineclear.worker.logits import Logits

from .linear import Linear, Packer
from .rotary_cache import RotaryCache

FAMILIES = frozenset({"granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3"})
"""Model types whose decoder layer is the one below: attention and a gated MLP, RMS norms, rotary positions."""

_ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1}


@dataclass(frozen=True, slots=True, eq=False)
class _Norm:
    """RMS norm: x / rms(x) * weight."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """Norms that a family does not have are None. OLMo 2 norms what comes out of a part, the others what goes in."""

    norm_before_attention: _Norm | None
    norm_after_attention: _Norm | None
    norm_before_mlp: _Norm | None
    norm_after_mlp: _Norm | None
    qkv: Linear
    q_norm: _Norm | None
    k_norm: _Norm | None
    attention_output: Linear
    gate_up: Linear
    down: Linear
    rotates: bool


class _Memory(NamedTuple):
    """The activations of a step, a row for each token, kept from step to step: fresh memory costs page faults."""

    residual: Tensor
    normed: Tensor
    part: Tensor
    normed_part: Tensor
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


class _HeadMemory(NamedTuple):
    """What becomes of the rows that are sampled."""

    residual: Tensor
    part: Tensor
    normed: Tensor
    logits: Tensor
    best: Tensor
    ids: Tensor


class FusedDecoder:
    """Logits of packed tokens over a paged attention backend. Keeps its own copies of the weights."""

    def __init__(
        self, model: Any, num_heads: int, num_kv_heads: int, head_dim: int, max_positions: int, packer: Packer
    ) -> None:
        config = model.config
        self._heads, self._kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim
        self._hidden, self._intermediate = int(config.hidden_size), int(config.intermediate_size)
        self._vocabulary = int(model.lm_head.out_features)
        self._dtype = model.dtype
        self._embedding: Tensor = model.model.embed_tokens.weight
        self._rotary = RotaryCache(model.model.rotary_emb, model.dtype, max_positions)
        pages = HugePageArena()
        self._layers = [_layer(module, packer, pages) for module in model.model.layers]
        self._final = _norm(model.model.norm)
        self._head = packer([model.lm_head], pages)
        self._activation = _ACTIVATIONS[config.hidden_act]
        self._embedding_scale = float(getattr(config, "embedding_multiplier", 1.0))
        self._residual_scale = float(getattr(config, "residual_multiplier", 1.0))
        self._logits_scale = 1.0 / float(getattr(config, "logits_scaling", 1.0))
        first = model.model.layers[0].self_attn
        # A weight as wide as all heads norms the whole row, one as wide as a head each head.
        q_norm = getattr(first, "q_norm", None)
        self._norms_whole_row = q_norm is not None and q_norm.weight.numel() != head_dim
        self._element = ctypes.c_int64(ELEMENTS[model.dtype])
        native = library()
        self._take_rows_kernel = Kernel(native, "lineclear_take_rows")
        self._add_norm_kernel = Kernel(native, "lineclear_add_norm")
        self._split_heads_kernel = Kernel(native, "lineclear_split_heads")
        self._gate_kernel = Kernel(native, "lineclear_gate")
        self._best_kernel = Kernel(native, "lineclear_best")
        self._backend: AttentionBackend | None = None
        self._tokens, self._samples = DynamicInt(0), DynamicInt(0)
        self._table, self._reads, self._positions, self._rows = (
            DynamicPointer(),
            DynamicPointer(),
            DynamicPointer(),
            DynamicPointer(),
        )
        self._read_from: Tensor | None = None  # where `_table` points
        # How many rows there are room for is kept beside the tensors: to ask one for its length takes 10 µs in a step.
        self._memory: _Memory | None = None
        self._memory_rows = 0
        self._ending: _HeadMemory | None = None
        self._ending_rows = self._shown = 0
        self._layers_graph, self._head_graph = CallGraph(), CallGraph()
        self._logits: tuple[Tensor, Tensor, Tensor] = (torch.empty(0), torch.empty(0), torch.empty(0))
        self._best_here: Any = memoryview(b"")  # the last two, as the host reads them
        self._ids_here: Any = memoryview(b"")
        self._still: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))

    def attach(self, backend: AttentionBackend) -> None:
        """Write to and read from `backend` from now on."""
        self._backend = backend
        self._memory = None  # the recorded calls are to another one

    def logits(self, tokens: Tensor, reads: IntArray, positions: IntArray, rows: IntArray) -> Logits:
        """Of the packed tokens at `rows`; the packed tokens are those of `tokens` at `reads`.

        The backend has begun the step. All are int64, and the model has such tokens and positions: nobody looks again.
        """
        assert reads.dtype == positions.dtype == rows.dtype == np.int64
        ending = self._grow_samples(len(rows), self._grow_tokens(len(reads)))
        if len(rows) != self._shown:
            self._show(ending, len(rows))
        self._rotary.extend(max(positions.tolist()) + 1)
        self._tokens.value, self._samples.value = len(reads), len(rows)
        if tokens is not self._read_from:
            self._read_from, self._table.value = tokens, tokens.data_ptr()
        self._reads.value, self._positions.value, self._rows.value = map(address, (reads, positions, rows))
        self._layers_graph.replay()
        self._head_graph.replay()
        return Logits(*self._logits, (self._best_here.tolist(), self._ids_here.tolist()))

    # --- recording ---------------------------------------------------------------------------------------------------

    def _grow_tokens(self, tokens: int) -> _Memory:
        if self._memory is None or tokens > self._memory_rows:
            capacity = self._memory_rows = max(tokens, 0 if self._memory is None else 2 * self._memory_rows)
            query, key = (self._heads, self._head_dim), (self._kv_heads, self._head_dim)
            shapes: list[tuple[int, ...]] = [(self._hidden,)] * 4
            shapes += [((self._heads + 2 * self._kv_heads) * self._head_dim,), *[(self._rotary.width,)] * 2]
            shapes += [query, key, key, query, (2 * self._intermediate,), (self._intermediate,), ()]
            others = {"cosine": torch.float32, "sine": torch.float32, "input_ids": torch.int64}
            dtypes = dict.fromkeys(_Memory._fields, self._dtype) | others
            made = (torch.empty(capacity, *x, dtype=t) for x, t in zip(shapes, dtypes.values(), strict=True))
            self._memory = _Memory(*made)
            self._layers_graph = CallGraph(self._capture(self._memory))
            self._ending = None  # its calls read this memory
        return self._memory

    def _grow_samples(self, samples: int, m: _Memory) -> _HeadMemory:
        if self._ending is None or samples > self._ending_rows:
            self._ending_rows = samples
            shapes = [(self._hidden,)] * 3 + [(self._vocabulary,), (), ()]
            dtypes = [self._dtype] * 4 + [torch.float32, torch.int64]
            made = (torch.empty(samples, *x, dtype=t) for x, t in zip(shapes, dtypes, strict=True))
            e = self._ending = _HeadMemory(*made)
            self._show(e, samples)
            # The last part's output, which nobody has added to the residual yet.
            part = m.part if self._layers[-1].norm_after_mlp is None else m.normed_part
            tape = [
                self._take_rows(self._samples, pointer(m.residual), self._rows, e.residual),
                self._take_rows(self._samples, pointer(part), self._rows, e.part),
                self._add_norm(self._samples, e.residual, e.part, self._final, e.normed),
                self._head.bind(self._samples, e.normed, e.logits),
            ]
            if self._logits_scale != 1.0:
                tape.append((lambda: e.logits[: self._samples.value].mul_(self._logits_scale), ()))
            self._head_graph = CallGraph([*tape, self._best(e)])
        return self._ending

    def _show(self, e: _HeadMemory, samples: int) -> None:
        """Hand out so many rows: a slice of a tensor costs more than a step of one row has to spare."""
        self._shown = samples
        _, best, ids = self._logits = e.logits[:samples], e.best[:samples], e.ids[:samples]
        self._best_here, self._ids_here = best.numpy().data, ids.numpy().data

    def _capture(self, m: _Memory) -> list[Call]:
        """From ids and positions through all layers, on the first `_tokens` rows of `m`."""
        backend, count = self._backend, self._tokens
        assert backend is not None
        width = self._rotary.width
        still = (torch.ones(len(m.cosine), width), torch.zeros(len(m.sine), width))
        tape = [
            self._take_rows(count, self._table, self._reads, m.input_ids),
            self._take_rows(count, pointer(self._embedding), pointer(m.input_ids), m.residual),
            self._take_rows(count, pointer(self._rotary.cosine), self._positions, m.cosine),
            self._take_rows(count, pointer(self._rotary.sine), self._positions, m.sine),
        ]
        if self._embedding_scale != 1.0:
            tape.append((lambda: m.residual[: count.value].mul_(self._embedding_scale), ()))
        pending: Tensor | None = None  # output of the last part, not yet added to the residual
        for index, layer in enumerate(self._layers):
            x, turn = m.residual, (m.cosine, m.sine) if layer.rotates else still
            if layer.norm_before_attention is not None or pending is not None:
                tape.append(self._add_norm(count, m.residual, pending, layer.norm_before_attention, m.normed))
                x = m.residual if layer.norm_before_attention is None else m.normed
            tape += [
                layer.qkv.bind(count, x, m.qkv),
                self._split_heads(layer, m, turn, width),
                backend.bind(index, count, m.query, m.key, m.value, m.attended),
                layer.attention_output.bind(count, m.attended.view(len(m.attended), -1), m.part),
            ]
            pending = m.part
            if layer.norm_after_attention is not None:
                tape.append(self._add_norm(count, m.part, None, layer.norm_after_attention, m.normed_part))
                pending = m.normed_part
            tape += [
                self._add_norm(count, m.residual, pending, layer.norm_before_mlp, m.normed),
                layer.gate_up.bind(count, m.residual if layer.norm_before_mlp is None else m.normed, m.gate_up),
                self._gate(m.gate_up, m.gated),
                layer.down.bind(count, m.gated, m.part),
            ]
            pending = m.part
            if layer.norm_after_mlp is not None:
                tape.append(self._add_norm(count, m.part, None, layer.norm_after_mlp, m.normed_part))
                pending = m.normed_part
        self._still = still  # the calls only know where they are
        return tape

    def _take_rows(self, count: DynamicInt, table: DynamicPointer, indices: DynamicPointer, out: Tensor) -> Call:
        """Those rows of a table, as wide as those of `out`, whose numbers lie at `indices`."""
        size = ctypes.c_int64(out.stride(0) * out.itemsize)
        return self._take_rows_kernel, (count, size, table, indices, pointer(out))

    def _best(self, e: _HeadMemory) -> Call:
        """The highest logit of each row."""
        width = ctypes.c_int64(self._vocabulary)
        return self._best_kernel, (self._element, self._samples, width, *map(pointer, (e.logits, e.best, e.ids)))

    def _add_norm(
        self, count: DynamicInt, residual: Tensor, add: Tensor | None, norm: _Norm | None, out: Tensor
    ) -> Call:
        """Add to the residual, in place; and norm it into `out`."""
        return self._add_norm_kernel, (
            self._element,
            count,
            ctypes.c_int64(residual.shape[1]),
            pointer(add),
            ctypes.c_float(self._residual_scale),
            pointer(residual),
            pointer(None if norm is None else norm.weight),
            ctypes.c_float(0.0 if norm is None else norm.eps),
            pointer(out),
        )

    def _split_heads(self, layer: _Layer, m: _Memory, turn: tuple[Tensor, Tensor], width: int) -> Call:
        return self._split_heads_kernel, (
            self._element,
            self._tokens,
            *map(ctypes.c_int64, (self._heads, self._kv_heads, self._head_dim, width)),
            *map(pointer, (m.qkv, *turn)),
            pointer(None if layer.q_norm is None else layer.q_norm.weight),
            pointer(None if layer.k_norm is None else layer.k_norm.weight),
            ctypes.c_int64(self._norms_whole_row),
            ctypes.c_float(0.0 if layer.q_norm is None else layer.q_norm.eps),
            *map(pointer, (m.query, m.key, m.value)),
        )

    def _gate(self, gate_up: Tensor, out: Tensor) -> Call:
        sizes = ctypes.c_int64(out.shape[1]), ctypes.c_int64(self._activation)
        return self._gate_kernel, (self._element, self._tokens, *sizes, pointer(gate_up), pointer(out))


def can_build(model: Any, family: str, shape: tuple[int, int, int]) -> bool:
    """Whether a Decoder computes such a model here. `shape`: num_heads, num_kv_heads, head_dim."""
    config, head_dim = model.config, shape[2]
    return (
        family in FAMILIES
        and next(model.parameters()).device.type == "cpu"
        and model.dtype in ELEMENTS
        and library() is not None
        and config.hidden_act in _ACTIVATIONS
        and math.gcd(head_dim, config.hidden_size, config.intermediate_size) % LANES == 0
        and head_dim <= LARGEST_HEAD
    )


def _layer(module: Any, packer: Packer, pages: HugePageArena) -> _Layer:
    attention, mlp = module.self_attn, module.mlp
    fused = hasattr(attention, "qkv_proj")
    after = getattr(module, "post_feedforward_layernorm", None)
    # OLMo 2 calls the norm of the attention's output by the name the others use for the norm of the MLP's input.
    between = module.post_attention_layernorm
    use_rope = bool(getattr(attention, "use_rope", True))
    return _Layer(
        norm_before_attention=_maybe(getattr(module, "input_layernorm", None)),
        norm_after_attention=None if after is None else _norm(between),
        norm_before_mlp=_norm(between) if after is None else None,
        norm_after_mlp=_maybe(after),
        qkv=packer([attention.qkv_proj] if fused else [attention.q_proj, attention.k_proj, attention.v_proj], pages),
        q_norm=_maybe(getattr(attention, "q_norm", None)),
        k_norm=_maybe(getattr(attention, "k_norm", None)),
        attention_output=packer([attention.o_proj], pages),
        gate_up=packer([mlp.gate_up_proj] if hasattr(mlp, "gate_up_proj") else [mlp.gate_proj, mlp.up_proj], pages),
        down=packer([mlp.down_proj], pages),
        rotates=use_rope,
    )


def _norm(module: nn.Module) -> _Norm:
    weight = module.weight
    assert isinstance(weight, Tensor)
    eps: Any = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    return _Norm(weight.detach().contiguous(), float(eps))


def _maybe(module: nn.Module | None) -> _Norm | None:
    return None if module is None else _norm(module)
