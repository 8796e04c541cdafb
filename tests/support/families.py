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
_MULTIPLIERS: dict[str, Any] = {
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.5,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
}
_CAPS: dict[str, Any] = {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 20.0}
_MOE: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
WIDE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "word_embed_proj_dim": 64,
}
"""Configuration changes that let the kernels run a model, in blocks of a multiple of 16, and make the path without
kernels search for the best logit in parts.
"""


def _with(config: type, **changes: Any) -> Callable[[], Any]:
    return lambda: config(**(_BASE | changes))


CONFIGS: dict[str, Callable[[], Any]] = {
    "gemma2": _with(tf.Gemma2Config, **_CAPS, head_dim=8, sliding_window=_WINDOW),
    "gpt2": lambda: tf.GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=48,
        n_layer=2,
        n_head=4,
        n_positions=CONTEXT,
        eos_token_id=2,
        tie_word_embeddings=False,
    ),
    "gpt_oss": _with(
        tf.GptOssConfig,
        head_dim=8,
        sliding_window=_WINDOW,
        **_MOE,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "llama": _with(tf.LlamaConfig),
    "mistral": _with(tf.MistralConfig, sliding_window=_WINDOW),
    "mixtral": _with(tf.MixtralConfig, **_MOE),
}
"""Configurations of verified families, one for each kind of attention, embeddings and feed-forward network, with
windows, caps and scales that matter in a short test.
"""

_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
}
_SLIDING: dict[str, Any] = {"sliding_window": _WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
_SCALED: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "llama_4_scaling_beta": 0.5,
    "original_max_position_embeddings": 7,
}
_GROUPS: dict[str, Any] = _ROUTED | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}

FURTHER_CONFIGS: dict[str, Callable[[], Any]] = {
    "afmoe": _with(
        tf.AfmoeConfig, **_EXPERTS, **_SLIDING, head_dim=8, num_shared_experts=1, route_scale=1.5, mup_enabled=True
    ),
    "apertus": _with(tf.ApertusConfig),
    "arcee": _with(tf.ArceeConfig),
    "axk1": _with(tf.AXK1Config, **_LATENT, **_GROUPS),
    "bitnet": _with(tf.BitNetConfig),
    "cohere": _with(tf.CohereConfig, hidden_size=48, logit_scale=0.5),
    "cohere2": _with(tf.Cohere2Config, **_SLIDING, logit_scale=0.5),
    "cwm": _with(tf.CwmConfig, **_SLIDING, head_dim=8),
    "deepseek_v2": _with(tf.DeepseekV2Config, **_LATENT, **_GROUPS, topk_method="group_limited_greedy"),
    "deepseek_v3": _with(tf.DeepseekV3Config, **_LATENT, **_GROUPS),
    "dots1": _with(tf.Dots1Config, **_ROUTED, sliding_window=_WINDOW, max_window_layers=1, first_k_dense_replace=1),
    "ernie4_5": _with(tf.Ernie4_5Config, head_dim=8),
    "ernie4_5_moe": _with(
        tf.Ernie4_5_MoeConfig, moe_num_experts=4, moe_k=2, moe_num_shared_experts=1, moe_intermediate_size=32
    ),
    "exaone4": _with(tf.Exaone4Config, sliding_window=_WINDOW, sliding_window_pattern=2),
    "exaone_moe": _with(tf.ExaoneMoeConfig, **_EXPERTS, **_SLIDING),
    "flex_olmo": _with(tf.FlexOlmoConfig, num_experts=4, num_experts_per_tok=2),
    "gemma": _with(tf.GemmaConfig, head_dim=8),
    "gemma3_text": _with(
        tf.Gemma3TextConfig, head_dim=8, sliding_window=_WINDOW, num_hidden_layers=3, sliding_window_pattern=3
    ),
    "gemma4_text": _with(
        tf.Gemma4TextConfig,
        **_SLIDING,
        head_dim=8,
        global_head_dim=16,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB_SIZE,
        final_logit_softcapping=20.0,
    ),
    "glm": _with(tf.GlmConfig, head_dim=8),
    "glm4": _with(tf.Glm4Config, head_dim=8),
    "glm4_moe": _with(tf.Glm4MoeConfig, **_ROUTED, head_dim=8, use_qk_norm=True),
    "glm4_moe_lite": _with(tf.Glm4MoeLiteConfig, **_LATENT, **_ROUTED),
    "gpt_neox": _with(tf.GPTNeoXConfig, num_attention_heads=4),
    "granite": _with(tf.GraniteConfig, **_MULTIPLIERS),
    "granitemoe": _with(tf.GraniteMoeConfig, **_MULTIPLIERS, **_MOE),
    "granitemoeshared": _with(tf.GraniteMoeSharedConfig, **_MULTIPLIERS, **_MOE, shared_intermediate_size=32),
    "helium": _with(tf.HeliumConfig, head_dim=8),
    "hunyuan_v1_dense": _with(tf.HunYuanDenseV1Config, head_dim=8),
    "hunyuan_v1_moe": _with(tf.HunYuanMoEV1Config, head_dim=8, num_experts=4, moe_topk=2),
    "hyperclovax": _with(tf.HyperCLOVAXConfig, **_MULTIPLIERS),
    "jais2": _with(tf.Jais2Config),
    "jetmoe": _with(tf.JetMoeConfig, kv_channels=8, **_MOE),
    "llama4_text": _with(
        tf.Llama4TextConfig,
        head_dim=8,
        attention_chunk_size=_WINDOW,
        floor_scale=7,
        attn_scale=0.5,
        no_rope_layer_interval=2,
        interleave_moe_layer_step=2,
        intermediate_size_mlp=64,
        num_local_experts=4,
    ),
    "longcat_flash": _with(
        tf.LongcatFlashConfig,
        **_LATENT,
        num_hidden_layers=4,
        head_dim=8,
        ffn_hidden_size=64,
        expert_ffn_hidden_size=32,
        n_routed_experts=4,
        zero_expert_num=2,
        moe_topk=2,
    ),
    "mimo_v2_flash": _with(
        tf.MiMoV2FlashConfig, **_ROUTED, **_SLIDING, num_attention_heads=8, head_dim=12, v_head_dim=8
    ),
    "minicpm3": _with(tf.MiniCPM3Config, **_LATENT, scale_emb=3, dim_model_base=24),
    "minimax_m2": _with(tf.MiniMaxM2Config, head_dim=8, rotary_dim=4, **_MOE),
    "ministral": _with(tf.MinistralConfig, **_SLIDING, head_dim=8),
    "ministral3": _with(tf.Ministral3Config, head_dim=8, rope_parameters=_SCALED),
    "nanochat": _with(tf.NanoChatConfig, final_logit_softcapping=5.0),
    "nemotron": _with(tf.NemotronConfig),
    "olmo": _with(tf.OlmoConfig, clip_qkv=2.0),
    "olmo2": _with(tf.Olmo2Config),
    "olmo3": _with(tf.Olmo3Config, **_SLIDING),
    "olmoe": _with(tf.OlmoeConfig, num_experts=4, num_experts_per_tok=2),
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
    "persimmon": _with(tf.PersimmonConfig),
    "phi": _with(tf.PhiConfig),
    "phi3": _with(tf.Phi3Config, sliding_window=None),
    "phimoe": _with(tf.PhimoeConfig, **_MOE),
    "qwen2": _with(tf.Qwen2Config),
    "qwen2_moe": _with(tf.Qwen2MoeConfig, **_EXPERTS, shared_expert_intermediate_size=32),
    "qwen3": _with(tf.Qwen3Config, head_dim=16),
    "qwen3_moe": _with(tf.Qwen3MoeConfig, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "seed_oss": _with(tf.SeedOssConfig, head_dim=8),
    "smollm3": _with(tf.SmolLM3Config, num_hidden_layers=4, no_rope_layer_interval=4),
    "solar_open": _with(tf.SolarOpenConfig, **_ROUTED, head_dim=8),
    "stablelm": _with(tf.StableLmConfig),
    "starcoder2": _with(tf.Starcoder2Config, sliding_window=_WINDOW),
    "vaultgemma": _with(tf.VaultGemmaConfig, **_SLIDING, **_CAPS, head_dim=8),
    "youtu": _with(tf.YoutuConfig, **_LATENT),
}
"""The same for the others. They use the same code of ours: `make test` runs one test, `make test-exhaustive` all."""

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
        **_MOE,
        **_MULTIPLIERS,
        shared_intermediate_size=32,
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
    return (CONFIGS | FURTHER_CONFIGS | RECURRENT_CONFIGS)[family]()


def tiny_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a model of `family` with random weights on the CPU. `changes` are attributes of its configuration."""
    torch.manual_seed(seed)
    config = tiny_config(family)
    for name, value in changes.items():
        setattr(config, name, value)
    return make_distinct(tf.AutoModelForCausalLM.from_config(config, dtype=dtype))


def make_distinct(model: Any) -> Any:
    """Give the model random weights that tell its logits apart, and no training."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Biases and sinks are zero by default, so a loader that drops them would pass.
            if parameter.ndim > 1 or ("norm" not in name and "ln_" not in name):
                parameter.normal_(0.0, 0.25)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(0.0, 0.5)
    return model.eval()
