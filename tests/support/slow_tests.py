"""The slow and the exhaustive tests, which tests/conftest.py marks."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]
SLOW = (
    *("campaigns", "fuzz", "simulation/test_mutations.py", "test_faults.py::test_mutant_turns_row_red"),
    *("process/test_wire_faults.py", "worker/test_other_machines.py"),
    "worker/test_triton_kernels.py::test_kernels_compile_without_spills",
    "worker/test_lora.py::test_batch_of_two_adapters_and_the_model_equals_peft",
)
"""Folders, files and functions that `make test` leaves to `make test-slow`. Each explores more of what a quicker test
holds: more seeds and combinations, all model families with adapters, other processors, or planted errors."""
_FURTHER_FUSED = {
    *("arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "glm4", "gpt2", "ministral"),
    *("ministral3", "olmo3", "opt", "phi", "seed_oss", "stablelm", "starcoder2"),
}
_LIKE_LLAMA = {
    *("ernie4_5_moe", "glm4_moe", "gpt_neox", "granite", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3"),
}
_EXPERTS = {"dots1", "granitemoe", "mixtral", "olmoe"}
EXHAUSTIVE = {
    "e2e/test_deterministic.py": _FURTHER_FUSED - {"gpt2"} | _EXPERTS | _LIKE_LLAMA | {"mistral"},
    "e2e/test_recurrent_families.py": {
        *("bamba", "falcon_mamba", "granitemoehybrid", "lfm2_moe", "mamba", "nemotron_h", "olmo_hybrid"),
        *("qwen3_5_moe_text", "qwen3_5_text"),
    },
    "e2e/test_recurrent_rounding.py": {"granitemoehybrid", "jamba", "lfm2"},
    "worker/test_fused_decoder.py": _FURTHER_FUSED | _EXPERTS,
    "worker/test_gguf.py": {"gemma2", "mixtral", "qwen2", "qwen3_moe"},
    "worker/test_lora.py": {"phi3", "qwen2"},
    "worker/test_tensor_parallel.py": {"4"},
    "worker/test_triton_kernels.py": {"80", "100"},
    "worker/test_quantize_command.py": {"15", "granite", "olmo2", "qwen3"},
    "worker/test_quantized_checkpoints.py": {"gemma3_text", "qwen2", "qwen3"},
}
"""By file, the families, GPUs, ranks and signals left to `make test-exhaustive`. Another one there runs the same code.
So are those of FURTHER_CONFIGS, which the tests mark themselves."""
