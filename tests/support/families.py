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

_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED_EXPERT: dict[str, Any] = _EXPERTS | {"shared_expert_intermediate_size": 32}
_CONVOLUTIONS: dict[str, Any] = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
_WITHOUT_ATTENTION: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "state_size": 8,
    "num_hidden_layers": 2,
    "eos_token_id": 2,
}

RECURRENT_CONFIGS: dict[str, Callable[[], Any]] = {
    "bamba": _with(tf.BambaConfig, **_MAMBA2, num_hidden_layers=3, attn_layer_indices=[1]),
    "falcon_h1": _with(
        tf.FalconH1Config,
        **_MAMBA2,
        mamba_d_ssm=96,
        ssm_in_multiplier=0.7,
        ssm_out_multiplier=0.8,
        ssm_multipliers=[0.9, 1.1, 0.8, 1.2, 0.7],
        key_multiplier=0.5,
    ),
    "falcon_mamba": lambda: tf.FalconMambaConfig(**_WITHOUT_ATTENTION),
    "granitemoehybrid": _with(
        tf.GraniteMoeHybridConfig,
        **_MAMBA2,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=32,
        attention_multiplier=0.3,
        residual_multiplier=0.5,
        embedding_multiplier=3.0,
        logits_scaling=2.0,
    ),
    "jamba": _with(
        tf.JambaConfig,
        num_hidden_layers=3,
        attn_layer_period=3,
        attn_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=6,
        num_experts=4,
        expert_layer_period=2,
        expert_layer_offset=1,
    ),
    "lfm2": _with(tf.Lfm2Config, **_CONVOLUTIONS, block_multiple_of=16),
    "lfm2_moe": _with(tf.Lfm2MoeConfig, **_CONVOLUTIONS, **_EXPERTS, num_dense_layers=1),
    "mamba": lambda: tf.MambaConfig(**_WITHOUT_ATTENTION),
    "mamba2": lambda: tf.Mamba2Config(**_WITHOUT_ATTENTION, num_heads=6, head_dim=16, n_groups=2, chunk_size=16),
    "nemotron_h": lambda: tf.NemotronHConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=64,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=CONTEXT,
        ssm_state_size=8,
        mamba_num_heads=6,
        mamba_head_dim=16,
        n_groups=2,
        chunk_size=16,
        n_routed_experts=4,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
        num_experts_per_tok=2,
    ),
    "olmo_hybrid": _with(tf.OlmoHybridConfig, **_DELTA),
    "qwen3_5_moe_text": _with(tf.Qwen3_5MoeTextConfig, **_DELTA, **_SHARED_EXPERT, head_dim=8),
    "qwen3_5_text": _with(tf.Qwen3_5TextConfig, **_DELTA, head_dim=8),
    "qwen3_next": _with(tf.Qwen3NextConfig, **_DELTA, **_SHARED_EXPERT, head_dim=8),
}
"""The same for families with a recurrent state."""


def tiny_config(family: str) -> Any:
    """Return a new configuration of `family`, which the caller may change."""
    return (CONFIGS | RECURRENT_CONFIGS)[family]()


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
