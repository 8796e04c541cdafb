"""Model families that the tests compare with transformers token for token. Other families run with a warning.

A family is transformers' `model_type`. To add one: an entry here and a tiny configuration in tests/support/families.py;
the tests in tests/e2e then run over it in every mode.
"""

from __future__ import annotations

VERIFIED = frozenset(
    {
        "bamba",
        "cohere",
        "ernie4_5",
        "exaone4",
        "falcon_h1",
        "falcon_mamba",
        "gemma2",
        "gemma3_text",
        "glm4",
        "gpt2",
        "gpt_neox",
        "gpt_oss",
        "granite",
        "granitemoehybrid",
        "jamba",
        "lfm2",
        "lfm2_moe",
        "llama",
        "mamba",
        "mamba2",
        "mistral",
        "mixtral",
        "nemotron_h",
        "olmo2",
        "olmo_hybrid",
        "opt",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_moe",
        "qwen3_next",
        "smollm3",
        "stablelm",
        "starcoder2",
    }
)
