"""Model families that the tests compare with transformers token for token. Other families run with a warning.

A family is transformers' `model_type`. To add one: an entry here and a tiny configuration in tests/support/families.py;
the tests in tests/e2e then run over it in every mode.
"""

from __future__ import annotations

VERIFIED = frozenset(
    {
        *("afmoe", "apertus", "arcee", "axk1", "bamba", "bitnet", "cohere", "cohere2", "cwm", "deepseek_v2"),
        *("deepseek_v3", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "falcon_h1", "falcon_mamba"),
        *("flex_olmo", "gemma", "gemma2", "gemma3_text", "gemma4_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite"),
        *("gpt2", "gpt_neox", "gpt_oss", "granite", "granitemoe", "granitemoehybrid", "granitemoeshared", "helium"),
        *("hunyuan_v1_dense", "hunyuan_v1_moe", "hyperclovax", "jais2", "jamba", "jetmoe", "lfm2", "lfm2_moe"),
        *("llama", "llama4_text", "longcat_flash", "mamba", "mamba2", "mimo_v2_flash", "minicpm3", "minimax_m2"),
        *("ministral", "ministral3", "mistral", "mixtral", "nanochat", "nemotron", "nemotron_h", "olmo", "olmo2"),
        *("olmo3", "olmo_hybrid", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe"),
        *("qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3"),
        *("solar_open", "stablelm", "starcoder2", "vaultgemma", "youtu"),
    }
)
