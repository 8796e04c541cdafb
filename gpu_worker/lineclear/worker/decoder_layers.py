"""What the decoder of a model built like Llama is: its matrix products and norms by role, for any device and packing.

`describe` reads it from the modules of a transformers model. cpu/fused_decoder.py and cuda/fused_decoder.py execute it.
With tensor parallelism it is the part of this rank: its heads, its features of each MLP, its token ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .quantization.modules import QuantizedWeight
from .shard import shard_of

FAMILIES = frozenset({"granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3"})
"""Model types whose decoder layer is `DecoderLayer`: attention, a gated MLP, RMS norms, rotary positions."""
ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1}
"""Of gated MLPs, by their name in a model's configuration. The numbers are those of the kernels."""


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """RMS norm: x / rms(x) * weight."""

    weight: Tensor
    eps: float


class Part(NamedTuple):
    """A module of the model in a matrix product, whose outputs lie behind those of the part before it."""

    module: str
    """Its path in the model."""
    linear: nn.Linear

    @property
    def outputs(self) -> int:
        """Return the width of its part of the output."""
        return self.linear.out_features


def is_partial(parts: Sequence[Part]) -> bool:
    """Return whether a product is a sum over the inputs of this rank only, to be added over all ranks."""
    return shard_of(parts[0].linear).inputs is not None


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """A decoder layer. OLMo 2 norms the outputs of attention and MLP, other families the inputs.

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
    down: tuple[Part, ...]
    rotates: bool

    @property
    def products(self) -> tuple[tuple[Part, ...], ...]:
        """Return the matrix products in the order in which they run."""
        return self.qkv, self.attention_output, self.gate_up, self.down


@dataclass(frozen=True, slots=True, eq=False)
class DecoderModel:
    """A decoder: the sum of embeddings and of what the layers add, a norm, and the output layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype
    embedding: Tensor | QuantizedWeight
    """[vocabulary, hidden size]."""
    embedding_scale: float
    rotary: nn.Module
    """Returns the cosines and sines of positions."""
    layers: tuple[DecoderLayer, ...]
    residual_scale: float
    """Multiplies what attention and MLP add."""
    activation: int
    """Of the MLPs, a value of `ACTIVATIONS`."""
    norm: Norm
    output_layer: nn.Linear
    """Of one of several ranks: the module gathers its outputs, its weight is that of this rank."""
    logits_scale: float

    @property
    def weights(self) -> Iterator[list[Any]]:
        """Yield the weights of each matrix product, tensors or quantized."""
        products = (product for layer in self.layers for product in layer.products)
        yield from ([part.linear.weight for part in product] for product in products)
        yield [self.output_layer.weight]


def describe(model: Any, num_heads: int, num_kv_heads: int, head_dim: int) -> DecoderModel:
    """Return the decoder of a transformers model of `FAMILIES` with one of `ACTIVATIONS`. Holds its modules."""
    config = model.config
    return DecoderModel(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=int(config.hidden_size),
        intermediate_size=model.model.layers[0].mlp.down_proj.in_features,
        dtype=model.dtype,
        embedding=model.model.embed_tokens.weight,
        embedding_scale=float(getattr(config, "embedding_multiplier", 1.0)),
        rotary=model.model.rotary_emb,
        layers=tuple(_layer(f"model.layers.{i}", module) for i, module in enumerate(model.model.layers)),
        residual_scale=float(getattr(config, "residual_multiplier", 1.0)),
        activation=ACTIVATIONS[config.hidden_act],
        norm=_norm(model.model.norm),
        output_layer=model.lm_head,
        logits_scale=1.0 / float(getattr(config, "logits_scaling", 1.0)),
    )


def fused_weights(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Concatenate the layers: weight [sum of out_features, in_features], and bias or None."""
    weight = torch.cat([layer.weight.detach() for layer in layers]) if len(layers) > 1 else layers[0].weight.detach()
    biased = any(layer.bias is not None for layer in layers)
    return weight, torch.cat([_bias(layer) for layer in layers]) if biased else None


def _layer(path: str, module: Any) -> DecoderLayer:
    attention = module.self_attn
    after = getattr(module, "post_feedforward_layernorm", None)
    # In OLMo 2 this norms the attention's output, in other families the MLP's input.
    between = module.post_attention_layernorm

    def parts(owner: str, fused: str, *names: str) -> tuple[Part, ...]:
        owned = getattr(module, owner)
        names = (fused,) if hasattr(owned, fused) else names
        return tuple(Part(f"{path}.{owner}.{name}", getattr(owned, name)) for name in names)

    return DecoderLayer(
        norm_before_attention=_optional_norm(getattr(module, "input_layernorm", None)),
        norm_after_attention=None if after is None else _norm(between),
        norm_before_mlp=_norm(between) if after is None else None,
        norm_after_mlp=_optional_norm(after),
        qkv=parts("self_attn", "qkv_proj", "q_proj", "k_proj", "v_proj"),
        q_norm=_optional_norm(getattr(attention, "q_norm", None)),
        k_norm=_optional_norm(getattr(attention, "k_norm", None)),
        attention_output=parts("self_attn", "o_proj"),
        gate_up=parts("mlp", "gate_up_proj", "gate_proj", "up_proj"),
        down=parts("mlp", "down_proj"),
        rotates=bool(getattr(attention, "use_rope", True)),
    )


def _norm(module: nn.Module) -> Norm:
    weight = module.weight
    assert isinstance(weight, Tensor)
    eps: Any = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    return Norm(weight.detach().contiguous(), float(eps))


def _optional_norm(module: nn.Module | None) -> Norm | None:
    return None if module is None else _norm(module)


def _bias(layer: nn.Linear) -> Tensor:
    return layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
