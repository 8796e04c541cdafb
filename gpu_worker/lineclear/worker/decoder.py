"""One forward pass of few operations for models built like Llama, made from a loaded transformers model.

A layer is four matrix products, attention, and four passes over the rows; transformers' own modules take some fifty
operations for the same. Which models: `build` looks at the modules, and the loader keeps the result only if its logits
are the model's own. Everything else runs through transformers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .attention import AttentionBackend
from .kernels import ELEMENTS, LANES, LARGEST_HEAD, library
from .linear import Linear, Packer, pack
from .pages import Pages

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


class _Rows(NamedTuple):
    """The activations of one step, a row for each token."""

    rows: int
    residual: Tensor
    normed: Tensor
    part: Tensor
    normed_part: Tensor
    qkv: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    gate_up: Tensor
    gated: Tensor


class _Activations:
    """Memory for them, kept from step to step: fresh memory costs a page fault every 4 KiB."""

    def __init__(self, hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype):
        wide = (heads + 2 * kv_heads) * head_dim
        query, key = (heads, head_dim), (kv_heads, head_dim)
        self._shapes: list[tuple[int, ...]] = [(hidden,)] * 4
        self._shapes += [(wide,), query, key, key, (2 * intermediate,), (intermediate,)]
        self._dtype = dtype
        self._memory: list[Tensor] = []
        self._capacity = 0
        self._last: _Rows | None = None

    def of(self, rows: int) -> _Rows:
        """Uninitialised; what an earlier call gave is overwritten."""
        if self._last is None or self._last.rows != rows:
            if rows > self._capacity:
                self._capacity = max(rows, 2 * self._capacity)
                self._memory = [torch.empty(self._capacity, *shape, dtype=self._dtype) for shape in self._shapes]
            self._last = _Rows(rows, *(memory[:rows] for memory in self._memory))
        return self._last


class Decoder:
    """Logits of packed tokens over a paged attention backend. Keeps its own copies of the weights."""

    def __init__(self, model: Any, num_heads: int, num_kv_heads: int, head_dim: int, packer: Packer) -> None:
        config = model.config
        self._heads, self._kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim
        self._embedding: Tensor = model.model.embed_tokens.weight
        self._rotary = model.model.rotary_emb
        pages = Pages()
        self._layers = [_layer(module, packer, pages) for module in model.model.layers]
        self._final = _norm(model.model.norm)
        self._head = packer([model.lm_head], pages)
        self._vocabulary = int(model.lm_head.out_features)
        self._logits = torch.empty(0, self._vocabulary, dtype=model.dtype)  # kept, as the activations are
        self._activations = _Activations(
            int(config.hidden_size), int(config.intermediate_size), num_heads, num_kv_heads, head_dim, model.dtype
        )
        self._activation = _ACTIVATIONS[config.hidden_act]
        self._embedding_scale = float(getattr(config, "embedding_multiplier", 1.0))
        self._residual_scale = float(getattr(config, "residual_multiplier", 1.0))
        self._logits_scale = 1.0 / float(getattr(config, "logits_scaling", 1.0))
        first = model.model.layers[0].self_attn
        # A weight as wide as all heads norms the whole row, one as wide as a head each head.
        q_norm = getattr(first, "q_norm", None)
        self._norms_whole_row = q_norm is not None and q_norm.weight.numel() != head_dim
        self._element = ELEMENTS[model.dtype]
        self._library: Any = library()
        self._backend: AttentionBackend | None = None

    def attach(self, backend: AttentionBackend) -> None:
        """Write to and read from `backend` from now on."""
        self._backend = backend

    def logits(self, input_ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """[len(rows), vocabulary] for the packed tokens at `rows`, good until the next call.

        The backend has begun the step.
        """
        backend = self._backend
        assert backend is not None
        a = self._activations.of(input_ids.shape[0])
        torch.index_select(self._embedding, 0, input_ids, out=a.residual)
        if self._embedding_scale != 1.0:
            a.residual.mul_(self._embedding_scale)
        cosine, sine = (x[0].float().contiguous() for x in self._rotary(a.residual[None], positions[None]))
        still = (torch.ones_like(cosine), torch.zeros_like(sine)) if not all(x.rotates for x in self._layers) else None
        pending: Tensor | None = None  # output of the last part, not yet added to the residual
        for index, layer in enumerate(self._layers):
            x = self._add_norm(a.residual, pending, layer.norm_before_attention, a.normed)
            turn = (cosine, sine) if layer.rotates or still is None else still
            self._split_heads(layer, layer.qkv(x, a.qkv), turn, a)
            attended = backend.attend(index, a.query, a.key, a.value).view(a.rows, -1)
            pending = layer.attention_output(attended, a.part)
            pending = self._norm_output(pending, layer.norm_after_attention, a)
            x = self._add_norm(a.residual, pending, layer.norm_before_mlp, a.normed)
            self._gate(layer.gate_up(x, a.gate_up), a.gated)
            pending = layer.down(a.gated, a.part)
            pending = self._norm_output(pending, layer.norm_after_mlp, a)
        assert pending is not None
        residual, pending = a.residual.index_select(0, rows), pending.index_select(0, rows)
        x = self._add_norm(residual, pending, self._final, torch.empty_like(residual))
        if x.shape[0] > len(self._logits):
            self._logits = torch.empty(x.shape[0], self._vocabulary, dtype=x.dtype)
        logits = self._head(x, self._logits[: x.shape[0]])
        return logits if self._logits_scale == 1.0 else logits * self._logits_scale

    def _add_norm(self, residual: Tensor, add: Tensor | None, norm: _Norm | None, out: Tensor) -> Tensor:
        """Add to the residual, in place; return it normed, in `out` (itself, where there is no norm)."""
        out = out if norm is not None else residual
        self._library.lineclear_add_norm(
            self._element,
            *residual.shape,
            None if add is None else add.data_ptr(),
            self._residual_scale,
            residual.data_ptr(),
            None if norm is None else norm.weight.data_ptr(),
            0.0 if norm is None else norm.eps,
            out.data_ptr(),
        )
        return out

    def _norm_output(self, x: Tensor, norm: _Norm | None, a: _Rows) -> Tensor:
        return x if norm is None else self._add_norm(x, None, norm, a.normed_part)

    def _split_heads(self, layer: _Layer, qkv: Tensor, turn: tuple[Tensor, Tensor], a: _Rows) -> None:
        cosine, sine = turn
        self._library.lineclear_split_heads(
            self._element,
            a.rows,
            self._heads,
            self._kv_heads,
            self._head_dim,
            cosine.shape[-1],
            qkv.data_ptr(),
            cosine.data_ptr(),
            sine.data_ptr(),
            None if layer.q_norm is None else layer.q_norm.weight.data_ptr(),
            None if layer.k_norm is None else layer.k_norm.weight.data_ptr(),
            self._norms_whole_row,
            0.0 if layer.q_norm is None else layer.q_norm.eps,
            a.query.data_ptr(),
            a.key.data_ptr(),
            a.value.data_ptr(),
        )

    def _gate(self, gate_up: Tensor, out: Tensor) -> None:
        self._library.lineclear_gate(self._element, *out.shape, self._activation, gate_up.data_ptr(), out.data_ptr())


def build(
    model: Any, family: str, num_heads: int, num_kv_heads: int, head_dim: int, packer: Packer = pack
) -> Decoder | None:
    """The model as a Decoder, or None when it is built otherwise, or when there are no kernels for it here."""
    config = model.config
    fits = (
        family in FAMILIES
        and next(model.parameters()).device.type == "cpu"
        and model.dtype in ELEMENTS
        and library() is not None
        and config.hidden_act in _ACTIVATIONS
        and math.gcd(head_dim, config.hidden_size, config.intermediate_size) % LANES == 0
        and head_dim <= LARGEST_HEAD
    )
    return Decoder(model, num_heads, num_kv_heads, head_dim, packer) if fits else None


def release_weights(model: Any) -> None:
    """Let go of the matrices that a Decoder of the model has its own copies of. The model cannot compute any more."""
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    modules = [module for layer in model.model.layers for module in layer.modules()]
    for module in [*modules, *([] if tied else [model.lm_head])]:
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)


def _layer(module: Any, packer: Packer, pages: Pages) -> _Layer:
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
