"""Checks whether paged attention computes a model correctly: runs a few tokens, or refuses the model with a reason.

First the configuration is checked for features that a few tokens cannot show. Then the model runs once, and each
layer's attention call is captured: every argument is supported, or the model is refused. Last, the logits over KV
blocks are compared with those of the model's own attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog
import torch
from torch import Tensor, nn

from lineclear.worker.attention.base import Chunk, LayerSpec, pack_chunks
from lineclear.worker.attention.reference import ReferenceAttention
from lineclear.worker.quantization.modules import quantized_bytes

from .attention_layers import adapt, latent_spec
from .loaded_model import LoadedModel, ModelRefused, forward, use_attention, use_paged_attention

if TYPE_CHECKING:
    from lineclear.worker.recurrent.mixers import RecurrentLayer

log = structlog.get_logger(__name__)

NUM_TOKENS = 11
"""Length of the probe in tokens."""
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6, torch.float16: 0.05, torch.bfloat16: 0.25}
"""Largest relative error of the probe's logits. Wide in bfloat16, where a near tie may route a token to another expert.
A lost mask, bias or state causes an error of the size of the logits."""

_Call = tuple[nn.Module, LayerSpec]
_CAPTURING = "lineclear_probe"
_ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
_RECURRENT = frozenset({"linear_attention", "conv", "hybrid"})
"""transformers' general names for layers with a recurrent state; a hybrid one has attention beside it."""
_STATELESS = frozenset({"mlp", "moe"})
"""Of Nemotron-H, where a feed-forward network is a separate layer."""
_WITHOUT_ATTENTION = _STATELESS | _RECURRENT - {"hybrid"}
_HANDLED_ARGUMENTS = frozenset({"scaling", "dropout", "sliding_window", "softcap", "s_aux", "is_causal"})
_HARMLESS_ARGUMENTS = frozenset({"position_ids", "cache_position", "position_embeddings", "logits_to_keep"})


def inspect_model(model: Any, model_id: str, max_model_len: int) -> LoadedModel:
    """Describe a model by its configuration and attention calls. Raises ModelRefused, or the exception of the model."""
    config = model.config.get_text_config()
    _check_features(model, config)
    kinds, calls = _layer_kinds(config), list[_Call]()
    adapt(model)
    recurrent = _recurrent_layers(model, kinds)
    ids, positions = _input(config, next(model.parameters()).device)
    if expected := sum(kind not in _WITHOUT_ATTENTION for kind in kinds):
        use_attention(model, _CAPTURING, _capture_calls(calls))
    kept = forward(model, ids, positions, logits_to_keep=torch.tensor([1, 3], device=ids.device))
    if len({module for module, _ in calls}) != len(calls):
        raise ModelRefused(
            "an attention module computes more than once, as in layers that share it or in differential attention, so"
            " its keys and values cannot be separated"
        )
    if len(calls) != expected:
        raise ModelRefused(
            f"only {len(calls)} of the model's {expected} layers call the attention interface;"
            f" the others would not use the KV cache"
        )
    attending = [kind for kind in kinds if kind not in _WITHOUT_ATTENTION]
    layers = [_with_mask(kind, spec, config) for kind, (_, spec) in zip(attending, calls, strict=True)]
    vocab_size = int(kept.shape[-1])
    if model.get_input_embeddings().weight.shape[0] < vocab_size:
        raise ModelRefused("the model can sample tokens that it has no embedding for")
    return LoadedModel(
        model=model,
        layers=tuple(layers),
        attention_modules=tuple(module for module, _ in calls),
        model_id=model_id,
        family=str(config.model_type),
        vocab_size=vocab_size,
        max_model_len=_max_model_len(config, max_model_len),
        eos_token_ids=_eos_token_ids(model, vocab_size),
        dtype=model.dtype,
        device=ids.device,
        selects_rows=kept.shape[0] == 2,
        weight_bytes=weight_bytes(model),
        recurrent=recurrent,
    )


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of all weights; shared weights count once."""
    plain = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    return plain + quantized_bytes(model)


def check_against_eager(loaded: LoadedModel) -> Tensor:
    """Return the probe's logits over KV blocks, after comparing them with those of transformers' eager attention.

    Finds positions in the mask (ALiBi), state outside the attention (Mamba, token shift), and scales or biases missing
    from the call. Leaves the model with paged attention. Raises ModelRefused.
    """
    expected = eager_logits(loaded.model)
    if loaded.layers:
        use_paged_attention(loaded.model)
    computed = paged_logits(loaded)
    error = relative_error(computed, expected)
    if not error <= TOLERANCE[loaded.dtype]:
        raise ModelRefused(
            f"its logits over paged attention are not its own (relative error {error:.2g}): the model keeps"
            f" state or positions outside the attention interface"
        )
    return computed


def eager_logits(model: Any) -> Tensor:
    """Return logits [NUM_TOKENS, vocabulary] of the probe by transformers' eager attention, float32."""
    model.set_attn_implementation("eager")
    return forward(model, *_input(model.config.get_text_config(), next(model.parameters()).device)).float()


def paged_logits(loaded: LoadedModel) -> Tensor:
    """Return logits [NUM_TOKENS, vocabulary] of the probe, in several rows over blocks in descending order."""
    ids, positions = _input(loaded.model.config.get_text_config(), loaded.device)
    block_size = 4
    blocks = torch.arange(-(-NUM_TOKENS // block_size)).flip(0).numpy()
    backend = ReferenceAttention(loaded.layers, len(blocks), block_size, loaded.dtype, loaded.device)
    states = loaded.make_states(1, 0, len(blocks))
    loaded.attach(backend, states)
    chunks = []
    # Layers with a state compute single tokens in another way than chunks.
    ends = (6, NUM_TOKENS) if states is None else (6, 9, 10, NUM_TOKENS)
    for start, end in pairwise((0, *ends)):
        batch = pack_chunks([Chunk(0, end - start, start, blocks[: -(-end // block_size)])], block_size)
        backend.start_step(batch)
        if states is not None:
            states.start_step(batch)
        rows = np.arange(end - start)
        logits = loaded.logits(ids, start + rows, positions[start:end].cpu().numpy(), rows).values
        chunks.append(logits.to(torch.float32, copy=True))  # the decoder overwrites them at the next call
    return torch.cat(chunks)


def relative_error(computed: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference relative to the norm of `expected`."""
    return float((computed - expected).norm() / expected.norm().clamp_min(1e-30))


def _input(config: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (token ids, positions) of the probe."""
    positions = torch.arange(NUM_TOKENS, device=device)
    return (positions * 7 + 3) % int(config.vocab_size), positions


def _check_features(model: nn.Module, config: Any) -> None:
    """Refuse features that a probe of a few tokens cannot show."""
    if any("Indexer" in type(module).__name__ for module in model.modules()):
        raise ModelRefused("sparse attention (DeepSeek Sparse Attention), whose indexer chooses keys, is not supported")
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):  # Gemma 4: images only
        raise ModelRefused("the model attends to later tokens too, and a decoder cannot")
    if getattr(config, "is_encoder_decoder", False):
        raise ModelRefused("encoder-decoder models are not supported")


def _layer_kinds(config: Any) -> list[str]:
    """Return the type of each layer. Without such types, a configured window holds for all layers."""
    if kinds := getattr(config, "layer_types", None):
        return list(kinds)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    chunk = getattr(config, "attention_chunk_size", None)
    kind = "sliding_attention" if window else "chunked_attention" if chunk else "full_attention"
    return [kind] * int(config.num_hidden_layers)


def _recurrent_layers(model: Any, kinds: Sequence[str]) -> tuple[RecurrentLayer, ...]:
    """Return the layers with a recurrent state. Raises ModelRefused for layers of another type than is supported."""
    unusual = {kind for kind in kinds if kind not in _ATTENTION and kind not in _STATELESS}
    if not unusual:
        return ()
    from lineclear.worker.recurrent.mixers import recurrent_layers  # other workers do without it

    layers = recurrent_layers(model) if unusual <= _RECURRENT else ()
    if len(layers) != sum(kind in unusual for kind in kinds):
        names = ", ".join(sorted(_class_names(model, kinds, unusual) or unusual))
        raise ModelRefused(
            f"layers of type {names} are not supported, only full and sliding-window attention and the recurrent"
            " layers that docs/supported.md lists"
        )
    return layers


def _class_names(model: Any, kinds: Sequence[str], unusual: set[str]) -> set[str]:
    """Return the authors' names of layer types for which transformers has only general names."""
    lists = (x for x in model.modules() if isinstance(x, nn.ModuleList) and len(x) == len(kinds))
    layers = [layer for layer, kind in zip(next(lists, ()), kinds, strict=False) if kind in unusual & _RECURRENT]
    children = [child for layer in layers for child in layer.children()]
    has_state = [x for x in children if {"cache_params", "past_key_values"} & signature(x.forward).parameters.keys()]
    return {type(child).__name__ for child in has_state}


def _capture_calls(calls: list[_Call]) -> Callable[..., tuple[Tensor, None]]:
    def capture(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
    ) -> tuple[Tensor, None]:
        calls.append((module, _layer_spec(module, query, key, value, attention_mask, arguments)))
        return value.new_zeros(*query.transpose(1, 2).shape[:-1], value.shape[-1]), None

    return capture


def _layer_spec(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, arguments: Mapping[str, Any]
) -> LayerSpec:
    """Return the layer's parameters. Raises ModelRefused for an unsupported argument of the call."""
    known = _HANDLED_ARGUMENTS | _HARMLESS_ARGUMENTS
    unknown = sorted(name for name, x in arguments.items() if isinstance(x, Tensor) and name not in known)
    if mask is not None or unknown:
        what = "a custom mask" if mask is not None else ", ".join(unknown)
        raise ModelRefused(f"the model's attention needs {what}, which paged attention does not support")
    if arguments.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ModelRefused("an attention layer is not causal")
    if query.shape[-1] != key.shape[-1] or value.shape[-1] > key.shape[-1]:
        raise ModelRefused(
            f"heads of unequal size (query {query.shape[-1]}, key {key.shape[-1]}, value {value.shape[-1]}) are not"
            " supported"
        )
    scaling = arguments.get("scaling")
    head_dim = int(query.shape[-1])
    spec = LayerSpec(
        num_heads=int(query.shape[1]),
        num_kv_heads=int(key.shape[1]),
        head_dim=head_dim,
        scaling=head_dim**-0.5 if scaling is None else float(scaling),
        window=int(arguments.get("sliding_window") or 0),
        softcap=float(arguments.get("softcap") or 0.0),
        sinks=arguments.get("s_aux"),
    )
    return latent_spec(module, spec)


def _with_mask(kind: str, spec: LayerSpec, config: Any) -> LayerSpec:
    """Return the parameters with chunks, which the mask alone has. Refuse a window that is lost with it."""
    if kind == "sliding_attention" and not spec.window:
        raise ModelRefused("a layer with a sliding window does not pass it to its attention, so it would be lost")
    return replace(spec, chunk=int(config.attention_chunk_size)) if kind == "chunked_attention" else spec


def _max_model_len(config: Any, requested: int) -> int:
    limit = int(getattr(config, "max_position_embeddings", None) or 0)
    rope_limit = _rope_limit(config)
    if rope_limit and (not limit or rope_limit < limit):
        # Beyond it the frequencies change for the whole sequence, and cached keys would have the old ones.
        log.warning("context_capped", reason="rope depends on the length", max_model_len=rope_limit)
        limit = rope_limit
    if not limit and not requested:
        raise ModelRefused("the configuration states no context length; set --max-model-len")
    if limit and requested > limit:
        raise ModelRefused(f"--max-model-len {requested} is more than the {limit} positions of the model")
    return requested or limit


def _rope_limit(config: Any) -> int:
    """Return the length up to which RoPE frequencies are constant; 0 if always ("dynamic": up to the limit)."""
    parameters = getattr(config, "rope_parameters", None) or {}
    groups = [parameters] if "rope_type" in parameters else [x for x in parameters.values() if isinstance(x, dict)]
    limits = [int(x["original_max_position_embeddings"]) for x in groups if x.get("rope_type") == "longrope"]
    return min(limits, default=0)


def _eos_token_ids(model: Any, vocab_size: int) -> tuple[int, ...]:
    """Return the same ids as transformers' `generate`: of the generation configuration, else of the configuration."""
    ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config.get_text_config(), "eos_token_id", None)
    as_list = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    return tuple(sorted({int(i) for i in as_list if 0 <= int(i) < vocab_size}))
