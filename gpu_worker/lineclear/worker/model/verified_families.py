"""Model families that the tests compare with transformers token for token. Other families run with a warning.

A family is transformers' `model_type`. To add one: an entry here and a tiny configuration in tests/support/families.py;
the tests in tests/e2e then run over it in every mode.
"""

from __future__ import annotations

VERIFIED = frozenset(
    {
        "cohere",
        "ernie4_5",
        "exaone4",
        "gemma2",
        "gemma3_text",
        "glm4",
        "gpt2",
        "gpt_neox",
        "gpt_oss",
        "granite",
        "llama",
        "mistral",
        "mixtral",
        "olmo2",
        "opt",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "stablelm",
        "starcoder2",
    }
)
