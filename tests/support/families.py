"""Tiny random models of each verified family, with weights wide enough that no two logits are nearly equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf

VOCAB_SIZE = 211
CONTEXT = 256

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_WINDOW = 12
WIDE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "num_attention_heads": 4,
    "vocab_size": 256,
}
"""Configuration changes that let the kernels run a model, in blocks of a multiple of 16, and make the path without
kernels search for the best logit in parts.
"""


def _with(config: type, **changes: Any) -> Callable[[], Any]:
    return lambda: config(**(_BASE | changes))


CONFIGS: dict[str, Callable[[], Any]] = {
    "cohere": _with(tf.CohereConfig, hidden_size=48, logit_scale=0.5),
    "ernie4_5": _with(tf.Ernie4_5Config, head_dim=8),
    "exaone4": _with(tf.Exaone4Config, sliding_window=_WINDOW, sliding_window_pattern=2),
    "gemma2": _with(
        tf.Gemma2Config,
        head_dim=8,
        sliding_window=_WINDOW,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=20.0,
    ),
    "gemma3_text": _with(
        tf.Gemma3TextConfig, head_dim=8, sliding_window=_WINDOW, num_hidden_layers=3, sliding_window_pattern=3
    ),
    "glm4": _with(tf.Glm4Config, head_dim=8),
    "gpt2": lambda: tf.GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=48,
        n_layer=2,
        n_head=4,
        n_positions=CONTEXT,
        eos_token_id=2,
        tie_word_embeddings=False,
    ),
    "gpt_neox": _with(tf.GPTNeoXConfig, num_attention_heads=4),
    "gpt_oss": _with(
        tf.GptOssConfig,
        head_dim=8,
        sliding_window=_WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "granite": _with(
        tf.GraniteConfig,
        attention_multiplier=0.3,
        residual_multiplier=0.5,
        embedding_multiplier=3.0,
        logits_scaling=2.0,
    ),
    "llama": _with(tf.LlamaConfig),
    "mistral": _with(tf.MistralConfig, sliding_window=_WINDOW),
    "mixtral": _with(tf.MixtralConfig, num_local_experts=4, num_experts_per_tok=2),
    "olmo2": _with(tf.Olmo2Config),
    "opt": lambda: tf.OPTConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        word_embed_proj_dim=48,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    "phi": _with(tf.PhiConfig),
    "phi3": _with(tf.Phi3Config, sliding_window=None),
    "qwen2": _with(tf.Qwen2Config),
    "qwen3": _with(tf.Qwen3Config, head_dim=16),
    "qwen3_moe": _with(tf.Qwen3MoeConfig, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "smollm3": _with(tf.SmolLM3Config, num_hidden_layers=4, no_rope_layer_interval=4),
    "stablelm": _with(tf.StableLmConfig),
    "starcoder2": _with(tf.Starcoder2Config, sliding_window=_WINDOW),
}
"""A configuration for each verified family, with windows, caps and scales that matter in a short test."""


def tiny_config(family: str) -> Any:
    """Return a new configuration of `family`, which the caller may change."""
    return CONFIGS[family]()


def tiny_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a model of `family` with random weights on the CPU. `changes` are attributes of its configuration."""
    torch.manual_seed(seed)
    config = tiny_config(family)
    for name, value in changes.items():
        setattr(config, name, value)
    model = tf.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Biases and sinks are zero by default, so a loader that drops them would pass.
            if parameter.ndim > 1 or ("norm" not in name and "ln_" not in name):
                parameter.normal_(0.0, 0.25)
    return model.eval()
