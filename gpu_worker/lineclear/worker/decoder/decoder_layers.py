"""What a decoder of attention and dense MLPs is: its matrix products and norms by role, for any device and packing.

`describe` reads it from the modules of a transformers model. cpu/fused_decoder.py and cuda/fused_decoder.py execute it.
With tensor parallelism it is the part of this rank: its heads, its features of each MLP, its token ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lineclear.worker.quantization.grouped_weight import QuantizedWeight
from lineclear.worker.tensor_parallel.shard import shard_of

from .decoder_experts import Experts, experts_of

EXPERT_FAMILIES = frozenset(
    {
        *("dots1", "ernie4_5_moe", "glm4_moe", "gpt_oss", "granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"),
    }
)
"""Model types of `FAMILIES` with experts, which the fused pass of CPUs computes."""
FAMILIES = EXPERT_FAMILIES | {
    *(
        "arcee",
        "cohere",
        "cohere2",
        "ernie4_5",
        "exaone4",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm4",
        "gpt2",
        "gpt_neox",
    ),
    *("granite", "llama", "ministral", "ministral3", "mistral", "olmo2", "olmo3", "opt", "phi", "phi3", "qwen2"),
    *("qwen3", "seed_oss", "smollm3", "stablelm", "starcoder2"),
}
"""Model types whose decoder layer is `DecoderLayer`."""
ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu_new": 1, "gelu": 2, "relu": 3, "relu2": 4}
"""Of MLPs, by their name in a model's configuration. The numbers are those of the kernels."""
_GEMMA = frozenset({"gemma", "gemma2", "gemma3_text"})
"""Their norms multiply by 1 + weight, and their embeddings are scaled."""
_REPEATED_ANGLES = frozenset({"cohere", "cohere2"})
"""Their rotary embeddings return each angle twice, the others all angles twice."""
_ROTATES_PAIRS = frozenset({"ernie4_5", "ernie4_5_moe", "glm4"}) | _REPEATED_ANGLES
_PARALLEL = frozenset({"cohere", "cohere2", "phi"})


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """RMS norm x / rms(x) * weight; with a bias layer norm, (x - mean(x)) / deviation(x) * weight + bias."""

    weight: Tensor
    """float32, as the bias."""
    eps: float
    bias: Tensor | None = None


class Rotary(NamedTuple):
    """Rotary positions (RoPE, Su et al. 2021) of some layers."""

    module: nn.Module
    layer_type: str | None
    """Chooses the frequencies of a module that has several."""
    places: slice
    """Of each angle in the output of the module."""

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [positions, rotated values / 2], rounded as in a model of `dtype`."""
        kind = () if self.layer_type is None else (self.layer_type,)
        both = self.module(torch.empty(0, dtype=dtype, device=positions.device), positions[None], *kind)
        cosine, sine = (x[0, :, self.places] for x in both)
        return cosine, sine


class Part(NamedTuple):
    """A module of the model in a matrix product, whose outputs lie behind those of the part before it."""

    module: str
    """Its path in the model."""
    linear: nn.Linear

    @property
    def outputs(self) -> int:
        return self.linear.out_features


def is_partial(parts: Sequence[Part]) -> bool:
    """Return whether a product is a sum over the inputs of this rank only, to be added over all ranks."""
    return shard_of(parts[0].linear).inputs is not None


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """A decoder layer. OLMo norms the outputs of attention and MLP, Gemma outputs and inputs, most families inputs.

    A norm of queries or keys as wide as one head norms each head; a wider one norms the whole row.
    """

    norm_before_attention: Norm | None
    norm_after_attention: Norm | None
    norm_before_mlp: Norm | None
    norm_after_mlp: Norm | None
    qkv: tuple[Part, ...]
    q_norm: Norm | None
    k_norm: Norm | None
    attention_output: tuple[Part, ...]
    gate_up: tuple[Part, ...]
    """Of the MLP, or of shared experts; empty if a layer has neither."""
    down: tuple[Part, ...]
    experts: Experts | None
    """Their output is added to that of `down`."""
    rotary: int | None
    """Of the model's `rotaries`."""
    is_parallel: bool
    """The MLP reads the residual without the attention's output: by its own norm, or what attention has read."""

    @property
    def products(self) -> tuple[tuple[Part, ...], ...]:
        """Return the matrix products of every row, in the order in which they run."""
        return self.qkv, self.attention_output, self.gate_up, self.down

    @property
    def width(self) -> int:
        """Return the width of what `down` multiplies; 0 without."""
        return sum(part.linear.in_features for part in self.down)

    @property
    def inner_outputs(self) -> int:
        """Return the width of the outputs of `gate_up`."""
        return sum(part.outputs for part in self.gate_up)

    @property
    def mlp_is_partial(self) -> bool:
        """Return whether the outputs of MLP and experts are sums of this rank only, to be added over all ranks."""
        return is_partial(self.down) if self.experts is None else self.experts.is_partial


@dataclass(frozen=True, slots=True, eq=False)
class DecoderModel:
    """A decoder: the sum of embeddings and of the outputs of the layers, a norm, and the output layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    """The largest `width` of the layers."""
    dtype: torch.dtype
    embedding: Tensor | QuantizedWeight
    """[vocabulary, hidden size]."""
    embedding_scale: float
    learned_positions: Tensor | None
    """[positions, hidden size], added to the embeddings."""
    rotaries: tuple[Rotary, ...]
    rotates_pairs: bool
    """Neighbouring values of a head rotate, not the first half of those that rotate with the second half."""
    query_scale: float
    """Multiplies queries, which attention scales in addition."""
    has_grouped_heads: bool
    """Query, key and value of a head lie side by side in the outputs of `qkv`."""
    layers: tuple[DecoderLayer, ...]
    residual_scale: float
    """Multiplies what attention and MLP add."""
    activation: int
    """Of the MLPs, a value of `ACTIVATIONS`."""
    norm: Norm
    output_layer: nn.Linear
    """Of one of several ranks: the module gathers its outputs, its weight is that of this rank."""
    logits_scale: float
    logits_cap: float
    """Logits become cap * tanh(logits / cap); 0: unchanged."""

    @property
    def weights(self) -> Iterator[list[Any]]:
        """Yield the weights of each matrix product, tensors or quantized."""
        products = (product for layer in self.layers for product in layer.products)
        yield from ([part.linear.weight for part in product] for product in products)
        of_experts = (layer.experts for layer in self.layers if layer.experts is not None)
        stacks = ((stack, experts.count) for experts in of_experts for stack in (experts.gate_up, experts.down))
        yield from (stack.stored(expert) for stack, count in stacks for expert in range(count))
        yield [self.output_layer.weight]

    @property
    def widths(self) -> set[int]:
        """Return the widths inside the MLPs and experts of all layers."""
        return {layer.width for layer in self.layers} | ({self.experts.width} if self.experts is not None else set())

    @property
    def experts(self) -> Experts | None:
        """Return the experts of one layer, as wide and as many as those of each; None for a model without."""
        return next((layer.experts for layer in self.layers if layer.experts is not None), None)


def describe(model: Any, num_heads: int, num_kv_heads: int, head_dim: int) -> DecoderModel | None:
    """Return the decoder of a transformers model; None for one that is no such decoder. Holds its modules."""
    config, family = model.config, model.config.model_type
    activation = ACTIVATIONS.get(_first(config, "hidden_activation", "activation_function", "hidden_act") or "")
    if family not in FAMILIES or activation is None or _is_unusual(config):
        return None
    path = f"{model.base_model_prefix}.decoder" if family == "opt" else model.base_model_prefix
    base = model.get_submodule(path)
    name = "h" if family == "gpt2" else "layers"
    kinds = getattr(getattr(base, "rotary_emb", None), "layer_types", [None] if hasattr(base, "rotary_emb") else [])
    layers = [
        _layer(family, f"{path}.{name}.{i}", module, _rotary(config, kinds, i))
        for i, module in enumerate(getattr(base, name))
    ]
    return DecoderModel(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=int(config.hidden_size),
        intermediate_size=max(layer.width for layer in layers),
        dtype=model.dtype,
        embedding=model.get_input_embeddings().weight,
        embedding_scale=_embedding_scale(model),
        learned_positions=_learned_positions(base),
        rotaries=tuple(_rotary_of(base.rotary_emb, kind, family) for kind in kinds),
        rotates_pairs=family in _ROTATES_PAIRS,
        query_scale=head_dim**-0.5 if family == "opt" else 1.0,
        has_grouped_heads=family == "gpt_neox",
        layers=tuple(layers),
        residual_scale=float(getattr(config, "residual_multiplier", 1.0)),
        activation=activation,
        norm=_norm(family, _first(base, "norm", "final_layernorm", "final_layer_norm", "ln_f")),
        output_layer=model.get_output_embeddings(),
        logits_scale=float(getattr(config, "logit_scale", 1.0)) / float(getattr(config, "logits_scaling", 1.0)),
        logits_cap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
    )


def transpose_weights(model: Any) -> None:
    """Put linear layers in place of GPT-2's own kind, which has the weights transposed."""
    from transformers.pytorch_utils import Conv1D

    for name, module in [x for x in model.named_modules() if isinstance(x[1], Conv1D)]:
        linear = nn.Linear(module.nx, module.nf, device="meta")
        linear.weight = nn.Parameter(module.weight.t().contiguous(), requires_grad=False)
        linear.bias = module.bias
        model.set_submodule(name, linear)


def fused_weights(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Concatenate the layers: weight [sum of out_features, in_features], and bias or None."""
    weight = torch.cat([layer.weight.detach() for layer in layers]) if len(layers) > 1 else layers[0].weight.detach()
    biased = any(layer.bias is not None for layer in layers)
    return weight, torch.cat([_bias(layer) for layer in layers]) if biased else None


def _first(owner: Any, *names: str) -> Any:
    """Return the first existing one of these attributes, else None."""
    return next((found for name in names if (found := getattr(owner, name, None)) is not None), None)


def _is_unusual(config: Any) -> bool:
    """Return whether a model differs from its family: norms of StableLM, Phi and Cohere, or the layers of OPT 350M."""
    is_unlike_opt = config.model_type == "opt" and (
        not config.do_layer_norm_before
        or config.word_embed_proj_dim != config.hidden_size
        or config._remove_final_layer_norm
    )
    has_norms = config.model_type not in EXPERT_FAMILIES and getattr(config, "use_qk_norm", False)
    # OLMoE may cut off queries and keys, and routers may choose groups of experts first.
    has_groups = getattr(config, "clip_qkv", None) is not None or getattr(config, "n_group", 1) != 1
    return is_unlike_opt or has_norms or has_groups or getattr(config, "qk_layernorm", False)


def _rotary_of(module: Any, kind: str | None, family: str) -> Rotary:
    inverse = module.inv_freq if kind is None else getattr(module, f"{kind}_inv_freq")
    places = slice(None, None, 2) if family in _REPEATED_ANGLES else slice(len(inverse))
    return Rotary(module, kind, places)


def _rotary(config: Any, kinds: Sequence[str | None], layer: int) -> int | None:
    """Return the place of a layer's frequencies; None without rotary positions."""
    return (kinds.index(config.layer_types[layer]) if len(kinds) > 1 else 0) if kinds else None


def _rotates(family: str, attention: Any) -> bool:
    if family == "cohere2":
        return attention.sliding_window is not None
    if family == "exaone4":
        return attention.sliding_window is None or bool(attention.is_sliding)
    return bool(getattr(attention, "use_rope", True))


def _embedding_scale(model: Any) -> float:
    if model.config.model_type in _GEMMA:  # rounded, as the models do
        return float(torch.tensor(model.config.hidden_size**0.5).to(model.dtype))
    return float(getattr(model.config, "embedding_multiplier", 1.0))


def _learned_positions(base: Any) -> Tensor | None:
    module: Any = _first(base, "embed_positions", "wpe")
    return None if module is None else module.weight.detach()[getattr(module, "offset", 0) :]


def _layer(family: str, path: str, module: Any, rotary: int | None) -> DecoderLayer:
    attention: Any = _first(module, "self_attn", "attention", "attn")
    mlp = _first(module, "mlp", "block_sparse_moe") or module  # the layer itself in OPT
    experts = experts_of(mlp, family)
    dense = mlp if experts is None else _first(mlp, "shared_experts", "shared_expert")
    paths = {x: name for name, x in module.named_modules(prefix=path)}

    def parts(owner: Any, *choices: str) -> tuple[Part, ...]:
        if owner is None:
            return ()
        found = next(names for choice in choices if (names := choice.split())[0] in owner._modules)
        return tuple(Part(paths[owner._modules[name]], owner._modules[name]) for name in found)

    def norm(*choices: str) -> Norm | None:
        found = _first(module, *choices)
        return None if found is None else _norm(family, found)

    # Where the MLP's output has a norm of this name, the one behind attention is of the attention's output.
    is_after = hasattr(module, "post_feedforward_layernorm")
    between = "post_attention_layernorm"
    q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return DecoderLayer(
        norm_before_attention=norm("input_layernorm", "self_attn_layer_norm", "ln_1"),
        norm_after_attention=norm(between) if is_after else norm("post_self_attn_layernorm"),
        norm_before_mlp=norm("pre_feedforward_layernorm", *(() if is_after else (between, "final_layer_norm", "ln_2"))),
        norm_after_mlp=norm("post_feedforward_layernorm", "post_mlp_layernorm"),
        qkv=parts(attention, "qkv_proj", "query_key_value", "c_attn", "q_proj k_proj v_proj"),
        q_norm=None if q_norm is None else _norm(family, q_norm),
        k_norm=None if k_norm is None else _norm(family, k_norm),
        attention_output=parts(attention, "o_proj", "out_proj", "dense", "c_proj"),
        gate_up=parts(dense, "gate_up_proj", "gate_proj up_proj", "up_proj", "fc1", "c_fc", "dense_h_to_4h"),
        down=parts(dense, "down_proj", "fc2", "c_proj", "dense_4h_to_h"),
        experts=experts,
        rotary=rotary if _rotates(family, attention) else None,
        is_parallel=family in _PARALLEL or getattr(module, "use_parallel_residual", False),
    )


def _norm(family: str, module: Any) -> Norm:
    eps = _first(module, "variance_epsilon", "eps")
    weight = module.weight.detach().float().contiguous()
    weight = weight + 1.0 if family in _GEMMA else weight
    if "LayerNorm" not in type(module).__name__:
        return Norm(weight, float(eps))
    bias = getattr(module, "bias", None)
    return Norm(weight, float(eps), torch.zeros_like(weight) if bias is None else bias.detach().float().contiguous())


def _bias(layer: nn.Linear) -> Tensor:
    return layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
