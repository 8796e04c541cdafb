"""The Triton kernels equal their references in Triton's interpreter, and compile for GPUs without spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.triton_package import FOLDER

from lineclear.worker.attention.base import LayerSpec
from lineclear.worker.attention.registry import choose
from lineclear.worker.decoder.decoder_layers import EXPERT_FAMILIES, FAMILIES
from lineclear.worker.kernels import triton_support

TESTS = Path(__file__).parents[1]
TOLERANCE = {"torch.float32": 2e-5, "torch.float16": 8e-3}
OF_VALUE = {"torch.float32": 1e-6, "torch.float16": 6e-4}
"""Half a unit in the last place, and the difference of sums in another order."""
OF_LOGITS = {"torch.float32": 2e-6, "torch.float16": 5e-3}
FUSED = ("phi3", "llama", "qwen3", "olmo2", "granite", "smollm3", "gemma3_text")
"""The first one in float16."""
LEAST_SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes of shared memory that a program can have: A100, H100, B200."""


@pytest.fixture(autouse=True)
def _asked_again() -> Iterator[None]:
    yield
    triton_support.is_usable.cache_clear()


def run(module: str, *arguments: str, **environment: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", f"support.{module}", *arguments]
    environment["PYTHONPATH"] = os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])
    output = subprocess.run(
        command, cwd=TESTS, env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in output.stdout.splitlines() if line.startswith("{")]


def test_interpreted_kernels_equal_the_reference() -> None:
    cases = run("interpret_attention", "0", "12", TRITON_INTERPRET="1")
    assert len(cases) == 12
    assert [x for x in cases if not x["error"] <= TOLERANCE[x["dtype"]]] == []
    seen = [(bool(x["window"]), bool(x["chunk"]), x["latent"], bool(x["softcap"]), x["sinks"]) for x in cases]
    assert all(any(features) for features in zip(*seen, strict=True))


def test_interpreted_bisection_equals_torch() -> None:
    cases = run("interpret_threshold", "0", "6", TRITON_INTERPRET="1")
    assert len(cases) == 6
    assert [x for x in cases if x["ours"] != x["torch"]] == []
    assert any(row[0] for x in cases for row in x["ours"])


@pytest.fixture(scope="module", name="layers")
def interpret_layers() -> list[dict[str, Any]]:
    return run("interpret_layers", "0", "6", *FUSED, TRITON_INTERPRET="1")


def test_interpreted_kernels_of_a_layer_equal_torch(layers: list[dict[str, Any]]) -> None:
    cases = [x for x in layers if "kernel" in x]
    assert len(cases) == 3 * 6
    assert [x for x in cases if not x["error"] <= OF_VALUE[x["dtype"]]] == []


def test_interpreted_fused_models_equal_transformers(layers: list[dict[str, Any]]) -> None:
    found = {x["family"]: x for x in layers if "family" in x}
    assert tuple(found) == FUSED
    assert [x for x in found.values() if not x["is_used"] or not x["error"] <= OF_LOGITS[x["dtype"]]] == []
    assert {(x["error_of_modules"], x["extra_bytes"]) for x in found.values()} == {(0.0, 0)}, "they share the weights"
    adapted = [x for x in found.values() if x["error_of_adapter"] is not None]
    assert [x["error_of_adapter"] <= OF_LOGITS[x["dtype"]] < x["change_by_adapter"] for x in adapted] == [True]


@pytest.mark.exhaustive
def test_interpreted_fused_models_of_all_families_equal_transformers() -> None:
    families = sorted(FAMILIES - EXPERT_FAMILIES - set(FUSED))
    found = run("interpret_layers", "0", "0", "phi3", *families, TRITON_INTERPRET="1")[1:]
    assert [x["family"] for x in found] == families
    assert [x for x in found if not x["is_used"] or not x["error"] <= OF_LOGITS[x["dtype"]]] == []


@pytest.mark.exhaustive
def test_interpreted_ranks_give_the_tokens_of_transformers() -> None:
    """The fused forward pass with collectives, in captured graphs, on two ranks."""
    (found,) = run("divided_card", "llama", TRITON_INTERPRET="1")
    assert found["is_fused"]
    assert found["replays"] > 0
    assert found["kv_heads"] == [2], "of 4"
    assert found["divided"] == found["whole"]


@pytest.mark.parametrize("architecture", sorted(LEAST_SHARED))
def test_kernels_compile_without_spills(architecture: int, tmp_path: Path) -> None:
    kernels = run("compile_kernels", str(architecture), TRITON_CACHE_DIR=str(tmp_path), TRITON_DEFAULT_FP_FUSION="1")
    assert {x["kernel"] for x in kernels} == {
        *("attend_kernel", "combine_kernel", "write_kernel", "largest_reaching_kernel"),
        *("add_norm_kernel", "rotate_kernel", "activate_kernel"),
    }
    assert [x for x in kernels if x["stack"] or x["shared"] > LEAST_SHARED[architecture]] == []


@pytest.mark.parametrize(("head_dim", "kv_dtype", "name"), [(256, None, "triton_paged"), (512, None, "torch_paged")])
def test_auto_chooses_triton_on_cuda(
    head_dim: int, kv_dtype: torch.dtype | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "cc")
    monkeypatch.syspath_prepend(FOLDER)
    layers = [LayerSpec(8, 2, head_dim, 0.1)]
    assert choose("auto", layers, 16, torch.bfloat16, torch.device("cuda"), kv_dtype) == name


def test_auto_does_without_triton_where_no_compiler_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a slim image: Triton builds the launcher of each kernel when it is first used."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(triton_support, "log", log := Mock())
    layers = [LayerSpec(8, 2, 128, 0.1)]
    assert choose("auto", layers, 16, torch.bfloat16, torch.device("cuda")) == "torch_paged"
    assert [call.args for call in log.warning.call_args_list] == [("triton_not_used",)]
