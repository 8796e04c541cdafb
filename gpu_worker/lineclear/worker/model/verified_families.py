"""The model families that the tests hold to token-for-token equality with transformers. Others run, with a warning.

A family is transformers' `model_type`. To add one: a line here, and a tiny configuration of it in
tests/support/families.py; every mode of tests/e2e then runs over it.
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
