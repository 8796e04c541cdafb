"""GGUF files of tiny models, written by the package `gguf` in the way of llama.cpp's convert_hf_to_gguf.py."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Type
from support.families import tiny_model
from support.small_tokenizers import byte_level
from tokenizers import Tokenizer

Array = npt.NDArray[Any]
ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
}
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
GEMMA = {"tie_word_embeddings": True, "query_pre_attn_scalar": SIZES["head_dim"]}
"""What all its models have, and a file does not say."""
K_SCALES = {Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,)}
"""Where the float16 of a K block lie."""


def write(path: Path, family: str, kind: Type = Type.F32, tokenizer: Tokenizer | None = None, **changes: Any) -> Any:
    """Write a model of a family, and return the model that its numbers stand for."""
    own = GEMMA if family.startswith("gemma") else {}
    model = tiny_model(family, **{**SIZES, **own, **changes})
    return write_model(path, model, kind, tokenizer or byte_level())


def write_model(
    path: Path, model: Any, kind: Type, tokenizer: Tokenizer, template: str = "", pre: str = "gpt-2"
) -> Any:
    """Write a model that is in memory, and return it with the numbers in the file."""
    config, architecture = model.config, ARCHITECTURES[model.config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    _write_config(writer, config, architecture)
    write_tokenizer(writer, tokenizer, config.vocab_size, pre)
    if template:
        writer.add_chat_template(template)
    _write_tensors(writer, model, architecture, kind)
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    return model


def _write_config(writer: Any, config: Any, architecture: str) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    parameters = config.rope_parameters
    theta = parameters.get("rope_theta") or parameters["full_attention"]["rope_theta"]
    writer.add_rope_freq_base(theta)
    if parameters.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(parameters["rope_type"]))
        writer.add_rope_scaling_factor(parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(parameters.get("original_max_position_embeddings", 64))
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "gemma3":
        writer.add_sliding_window_pattern(3)
    if experts := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if (factors := getattr(config, "rope_long", None)) is not None:
        for name, values in zip(("short", "long"), factors, strict=True):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(values, np.float32))
        writer.add_rope_scaling_orig_ctx_len(64)
    if (factors := getattr(config, "rope_factors", None)) is not None:
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    if architecture == "qwen3moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def write_tokenizer(writer: Any, tokenizer: Tokenizer, vocab_size: int, pre: str = "gpt-2") -> None:
    """Write the vocabulary of a byte-level tokenizer, or of one with bytes as tokens as SentencePiece has."""
    definition = json.loads(tokenizer.to_str())
    model, added = definition["model"], {token["id"]: token for token in definition["added_tokens"]}
    by_id = {i: token for token, i in tokenizer.get_vocab(with_added_tokens=True).items()}
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(max(vocab_size, len(by_id)))][:vocab_size]
    types = [gguf.TokenType.NORMAL if i in by_id else gguf.TokenType.UNUSED for i in range(len(tokens))]
    for i, token in added.items():
        if i < len(types):
            types[i] = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
    is_bytes = model["byte_fallback"]
    writer.add_tokenizer_model("llama" if is_bytes else "gpt2")
    writer.add_token_list(tokens)
    if is_bytes:
        ranks = {left + right: -float(i) for i, (left, right) in enumerate(model["merges"])}
        types = [
            gguf.TokenType.BYTE if token.startswith("<0x") else kind for token, kind in zip(tokens, types, strict=True)
        ]
        writer.add_token_scores([ranks.get(token, -1e6) for token in tokens])
        writer.add_add_space_prefix("Prepend" in json.dumps(definition["normalizer"]))
    else:
        writer.add_tokenizer_pre(pre)
        known = set(tokens)
        writer.add_token_merges([" ".join(pair) for pair in model["merges"] if {*pair, "".join(pair)} <= known])
    writer.add_token_types(types)
    names = {token: i for i, token in enumerate(tokens)}
    for add, token in ("bos", "<s>"), ("bos", "<|begin|>"), ("eos", "</s>"), ("eos", "<|end|>"), ("unk", "<unk>"):
        if token in names:
            getattr(writer, f"add_{add}_token_id")(names[token])
    writer.add_add_bos_token(True)


def _write_tensors(writer: Any, model: Any, architecture: str, kind: Type) -> None:
    names = gguf.get_tensor_name_map(_arch(architecture), model.config.num_hidden_layers)
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    for name, tensor in state.items():
        values = tensor.float().numpy()
        if "experts." in name:
            parts = np.split(values, 2, axis=1) if "gate_up" in name else [values]
            labels = ("ffn_gate_exps", "ffn_up_exps") if "gate_up" in name else ("ffn_down_exps",)
            written = [
                _write_tensor(writer, f"blk.{name.split('.')[2]}.{label}.weight", part, kind)
                for label, part in zip(labels, parts, strict=True)
            ]
            tensor.copy_(torch.from_numpy(np.concatenate(written, axis=1)))
            continue
        plain = (
            name.replace("mlp.gate.weight", "block_sparse_moe.gate.weight") if "mixtral" in str(type(model)) else name
        )
        found = names.get_name(plain, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        is_turned = architecture == "llama" and (".q_proj." in name or ".k_proj." in name)
        heads = model.config.num_attention_heads if ".q_proj." in name else model.config.num_key_value_heads
        if is_turned:
            values = _turned(values, heads)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        own = kind if values.ndim > 1 and "mlp.gate.weight" not in name else Type.F32
        back = _write_tensor(writer, found, values, own)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            back = back - 1
        tensor.copy_(torch.from_numpy(_turned_back(back, heads) if is_turned else back))


def _write_tensor(writer: Any, name: str, values: Array, kind: Type) -> Array:
    """Write a tensor and return the numbers that it has in the file."""
    if kind in K_SCALES:  # for which the package has no encoder: any block is valid
        raw = _random_blocks(values, kind)
    else:
        raw = gguf.quants.quantize(np.ascontiguousarray(values, np.float32), kind)
    writer.add_tensor(name, raw, raw_dtype=kind)
    return gguf.quants.dequantize(raw, kind).reshape(values.shape).astype(np.float32)


def _random_blocks(values: Array, kind: Type) -> Array:
    dice = np.random.default_rng(zlib.crc32(values.tobytes()))
    _, size = gguf.GGML_QUANT_SIZES[kind]
    raw = dice.integers(0, 256, (*values.shape[:-1], values.shape[-1] // 256, size), dtype=np.uint8)
    spread = float(values.std())
    for at, factor in zip(K_SCALES[kind], (1 / 400, 1 / 60) if kind is not Type.Q6_K else (1 / 1400,), strict=False):
        scale = np.full((*raw.shape[:-1], 1), spread * factor, np.float16) * dice.choice([1, 2], (*raw.shape[:-1], 1))
        raw[..., at : at + 2] = scale.astype(np.float16).view(np.uint8)
    return raw.reshape(*values.shape[:-1], -1)


def _turned(values: Array, heads: int) -> Array:
    """As `LlamaModel.permute` of llama.cpp."""
    return (
        values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    )


def _turned_back(values: Array, heads: int) -> Array:
    return (
        values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    )


def _arch(name: str) -> Any:
    return next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
