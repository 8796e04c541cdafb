"""config.json and generation_config.json of a GGUF file, by the keys that llama.cpp's converter writes.

A value that the file does not state is what llama.cpp assumes. Where it says how much there is of something, it is
checked against the shapes of the tensors, so that a damaged file makes no model of another size.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from .gguf_file import GgufBroken, GgufHead

ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
}
"""Architecture -> type and class of transformers."""
_EXPERTS = ("mixtral", "MixtralForCausalLM")
"""Of the architecture llama with experts."""
_MAX_SIZE = 1 << 31
Factors = Callable[[str], list[float] | None]
"""Name of a tensor -> its numbers, None for a missing tensor."""


class _Keys:
    def __init__(self, head: GgufHead, architecture: str) -> None:
        self.metadata, self._prefix = head.metadata, architecture

    def size(self, name: str, default: int | None = None) -> int:
        """Return a positive integer; the first of an array of equal ones. Raises GgufBroken."""
        value = self.metadata.get(f"{self._prefix}.{name}", default)
        if isinstance(value, array) and len(set(value)) == 1:
            value = value[0]
        if type(value) is not int or not 1 <= value < _MAX_SIZE:
            raise GgufBroken(f"has no size {self._prefix}.{name}; convert the model again")
        return value

    def number(self, name: str, default: float) -> float:
        """Return a finite number. Raises GgufBroken."""
        value = self.metadata.get(f"{self._prefix}.{name}", default)
        if type(value) not in (int, float) or not abs(value) < 1e30:
            raise GgufBroken(f"has no number {self._prefix}.{name}; convert the model again")
        return float(value)

    def has(self, name: str) -> bool:
        """Return whether the file states a value."""
        return f"{self._prefix}.{name}" in self.metadata


def architecture_of(head: GgufHead) -> str:
    """Return the architecture. Raises GgufBroken for one that is not read."""
    name = head.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise GgufBroken(
            f"is of the architecture {str(name)[:100]}; {', '.join(ARCHITECTURES)} are read. Give the directory of the"
            " model that it was made from: hf download OWNER/NAME"
        )
    if head.metadata.get("split.count", 0) not in (0, 1):
        raise GgufBroken("is one of several parts; join them: llama-gguf-split --merge")
    return name


def config_of(head: GgufHead, factors: Factors) -> dict[str, Any]:
    """Return the content of config.json. Raises GgufBroken."""
    architecture = architecture_of(head)
    keys = _Keys(head, architecture)
    embedding = head.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise GgufBroken("has no token_embd.weight; give the whole model")
    layers, heads, hidden = keys.size("block_count"), keys.size("attention.head_count"), keys.size("embedding_length")
    is_there = layers <= len(head.tensors) and f"blk.{layers - 1}.attn_norm.weight" in head.tensors
    if not is_there or embedding.shape[1] != hidden:
        raise GgufBroken(f"says that it has {layers} layers of width {hidden}, and its tensors do not")
    has_experts = keys.has("expert_count")
    kind, name = _EXPERTS if architecture == "llama" and has_experts else ARCHITECTURES[architecture]
    head_dim = keys.size("attention.key_length", keys.size("rope.dimension_count", max(1, hidden // heads)))
    config: dict[str, Any] = {
        "model_type": kind,
        "architectures": [name],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": keys.size("feed_forward_length"),
        "max_position_embeddings": keys.size("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", 1e-5),
        "tie_word_embeddings": "output.weight" not in head.tensors,
        "dtype": _dtype(head),
        **_token_ids(head),
        "rope_parameters": _rope(keys),
    }
    if architecture in ("llama", "qwen3", "qwen3moe"):
        config["attention_bias"] = "blk.0.attn_q.bias" in head.tensors
    if has_experts:
        config |= _experts(keys, kind)
    if more := _OF_ARCHITECTURE.get(architecture):
        config |= more(keys, config, factors)
    return config


def generation_config_of(head: GgufHead) -> dict[str, Any]:
    """Return the content of generation_config.json: the tokens that end an answer."""
    names = ("eos", "eot", "eom")
    found = [head.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    ids = sorted({value for value in found if type(value) is int})
    return {"eos_token_id": ids, "bos_token_id": _token_ids(head)["bos_token_id"]}


def _token_ids(head: GgufHead) -> dict[str, int | None]:
    found = {
        "bos_token_id": head.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": head.metadata.get("tokenizer.ggml.eos_token_id"),
    }
    # transformers makes an embedding of the padding token zero, which a model that is only read does not need.
    return {name: value if type(value) is int else None for name, value in found.items()} | {"pad_token_id": None}


def _dtype(head: GgufHead) -> str:
    """Return the format that the file computes in: that of its plain matrices, if all are plain."""
    kinds = {tensor.type.name for tensor in head.tensors.values() if len(tensor.shape) > 1}
    return {frozenset({"F32"}): "float32", frozenset({"F16"}): "float16"}.get(frozenset(kinds), "bfloat16")


def _rope(keys: _Keys) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base", 10000.0)}
    scaling = keys.metadata.get(f"{keys._prefix}.rope.scaling.type", "none")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if scaling == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor}
        rope["original_max_position_embeddings"] = keys.size("rope.scaling.original_context_length")
    elif scaling == "linear" or (scaling == "none" and factor != 1):
        rope |= {"rope_type": "linear", "factor": factor}
    elif scaling not in ("none", "longrope"):
        raise GgufBroken(f"has the unknown RoPE scaling {str(scaling)[:100]}")
    return rope


def _experts(keys: _Keys, kind: str) -> dict[str, Any]:
    count = {"num_experts_per_tok": keys.size("expert_used_count")}
    if kind == "mixtral":
        return count | {"num_local_experts": keys.size("expert_count"), "sliding_window": None}
    width = keys.size("expert_feed_forward_length")
    return count | {"num_experts": keys.size("expert_count"), "moe_intermediate_size": width, "norm_topk_prob": True}


def _gemma2(keys: _Keys, config: dict[str, Any], factors: Factors) -> dict[str, Any]:
    is_largest = config["num_hidden_layers"] == 46  # of 27 B parameters, by llama.cpp
    width = config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"]
    return {
        "query_pre_attn_scalar": width,
        "sliding_window": keys.size("attention.sliding_window", 4096),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: _Keys, config: dict[str, Any], factors: Factors) -> dict[str, Any]:
    is_largest = config["num_hidden_layers"] == 62
    width = config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"]
    local = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10000.0)}
    pattern = keys.size("attention.sliding_window_pattern", 6)
    count, kinds = config["num_hidden_layers"], ("full_attention", "sliding_attention")
    return {
        "query_pre_attn_scalar": width,
        "sliding_window": keys.size("attention.sliding_window", 1024),
        "layer_types": [kinds[(i + 1) % pattern != 0] for i in range(count)],
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
    }


def _phi3(keys: _Keys, config: dict[str, Any], factors: Factors) -> dict[str, Any]:
    rope, head_dim = dict(config["rope_parameters"]), config["hidden_size"] // config["num_attention_heads"]
    rope["partial_rotary_factor"] = keys.size("rope.dimension_count", head_dim) / head_dim
    long, short = factors("rope_factors_long.weight"), factors("rope_factors_short.weight")
    original = keys.size("rope.scaling.original_context_length", config["max_position_embeddings"])
    if long and short:
        rope |= {"rope_type": "longrope", "long_factor": long, "short_factor": short}
        rope |= {"original_max_position_embeddings": original, "factor": config["max_position_embeddings"] / original}
    window = keys.number("attention.sliding_window", 0)
    is_used = 0 < window < config["max_position_embeddings"]
    return {
        "rope_parameters": rope,
        "original_max_position_embeddings": original,
        "sliding_window": int(window) if is_used else None,
    }


_OF_ARCHITECTURE: dict[str, Callable[[_Keys, dict[str, Any], Factors], dict[str, Any]]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
}
