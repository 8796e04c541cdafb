"""The forward pass of few operations against transformers' own, for every family it is used for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from e2e.transformers_answers import generated
from support.families import CONTEXT, WIDE, tiny_config, tiny_model
from support.inprocess import InProcess
from support.kernel_variants import modules_reason, needs_kernels
from support.launches import fused_on_cuda, without_kernels
from support.segments import Card
from worker.settings_runner import runner_with

from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.sequence import Request
from lineclear.wire.messages import Sampling
from lineclear.worker.cpu import fused_decoder
from lineclear.worker.decoder.decoder_layers import EXPERT_FAMILIES, FAMILIES
from lineclear.worker.kernels import triton_support
from lineclear.worker.kernels.native_library import NONE
from lineclear.worker.model import loader
from lineclear.worker.model.compatibility_probe import paged_logits, relative_error
from lineclear.worker.model.loaded_model import LoadedModel
from lineclear.worker.model.loader import build_fused, to_quantized, wrap_model
from lineclear.worker.runner.model_runner import ModelRunner, RunnerOptions


def requests() -> list[Request]:
    torch.manual_seed(5)
    prompts = [tuple(torch.randint(3, 200, (n,)).tolist()) for n in (1, 17, 44)]
    return [Request(str(i), p, Sampling(), 8) for i, p in enumerate(prompts)]


def model_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a tiny model whose norms have weights and biases as no other, and whose routers correct their choice."""
    changes = dict[str, Any](WIDE)
    if family == "ministral3":  # beyond its original context queries are scaled
        rope = tiny_config(family).rope_parameters
        changes["rope_parameters"] = rope | {"original_max_position_embeddings": CONTEXT}
    model = tiny_model(family, dtype=dtype, **changes)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in (
            p
            for name, p in [*model.named_parameters(), *model.named_buffers()]
            if (p.ndim == 1 and ("norm" in name or "ln_" in name)) or name.endswith("e_score_correction_bias")
        ):
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


@cache
def expected(family: str) -> dict[str, list[int]]:
    return generated(model_of(family), requests(), eos_token_id=None)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_fused_tokens_equal_transformers(family: str, each_way: str) -> None:
    fused = build_fused(wrap_model(model_of(family)), keep_weights=True)
    assert fused is not None
    assert (fused.decoder is None) == (each_way == NONE), "it was not used"
    for budget in (7, 256):
        server = InProcess(ModelRunner(fused, RunnerOptions(num_blocks=32)), CoreLimits(target_batch_tokens=budget))
        assert server.serve(requests()) == expected(family)


@needs_kernels
@pytest.mark.parametrize("family", sorted(FAMILIES), ids="best library of {}".format)
def test_best_library_equals_transformers(family: str) -> None:
    fused = build_fused(wrap_model(model_of(family)))
    assert fused is not None
    server = InProcess(ModelRunner(fused, RunnerOptions(num_blocks=32)), CoreLimits(target_batch_tokens=7))
    assert server.serve(requests()) == expected(family)
    again = [replace(x, request_id=f"again-{x.request_id}") for x in requests()]
    assert [*server.serve(again).values()] == [*expected(family).values()]
    assert server.finished("again-2").stats.cached_tokens > 30


@needs_kernels
@pytest.mark.parametrize("family", sorted(FAMILIES), ids="bfloat16 of {}".format)
def test_bfloat16_equals_the_modules_within_rounding(family: str) -> None:
    loaded = wrap_model(model_of(family, torch.bfloat16))
    fused = build_fused(loaded)
    assert fused is not None
    assert fused.decoder is not None
    assert loaded.probe_logits is not None
    with torch.inference_mode():
        error = relative_error(paged_logits(fused), loaded.probe_logits)
    assert error <= (0.25 if family in EXPERT_FAMILIES else 0.06)  # modules round logits of routers, and near ties turn


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("phi", {"qk_layernorm": True}),
        ("cohere", {"use_qk_norm": True}),
        ("stablelm", {"qk_layernorm": True}),
        ("opt", {"do_layer_norm_before": False}),
        ("opt", {"word_embed_proj_dim": 32}),
        ("ministral3", {}),
        ("phi3", {"hidden_act": "tanh"}),
    ],
    ids="unlike {}".format,
)
def test_other_models_are_not_fused(family: str, changes: dict[str, Any]) -> None:
    loaded = wrap_model(tiny_model(family, **WIDE | changes))
    assert modules_reason(build_fused(loaded)) == f"no fused pass is written for this variant of {family}"


@needs_kernels
@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("lfm2", {}, "no fused pass is written for lfm2"),
        ("llama", {"dtype": torch.float16}, "no kernel computes float16"),
        ("llama", {"hidden_size": 72}, "a hidden size or head size is no multiple of 16"),
        ("llama", {"head_dim": 528}, "heads are larger than 512"),
    ],
)
def test_reason_for_the_modules(family: str, changes: dict[str, Any], reason: str) -> None:
    assert modules_reason(build_fused(wrap_model(tiny_model(family, **WIDE | changes)))) == reason


def test_reasons_of_devices_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = wrap_model(tiny_model("llama", **WIDE))
    monkeypatch.setattr(fused_decoder, "selected_library", lambda: None)
    assert modules_reason(build_fused(loaded)) == "no C++ kernels are loaded"
    monkeypatch.setattr(triton_support, "is_usable", lambda: False)
    on_gpu = replace(loaded, device=torch.device("cuda"))
    assert modules_reason(build_fused(on_gpu)) == "Triton or a C compiler for it is missing"


@needs_kernels
@pytest.mark.parametrize("reason", ["", "--no-fused-forward is set", "the logits of the fused pass differ too much"])
def test_worker_says_what_computes_the_layers(reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model("llama", **WIDE).save_pretrained(tmp_path)
    if "differ" in reason:
        monkeypatch.setattr(loader, "relative_error", lambda computed, expected: 1.0)
    hello = runner_with(tmp_path, fused_forward="is set" not in reason).hello(1)
    assert (hello.forward_pass, hello.forward_pass_reason) == ("modules" if reason else "fused", reason)


@needs_kernels
def test_wrong_fused_logits_are_not_used() -> None:
    model = tiny_model("llama", **WIDE)
    model.model.layers[0].mlp.act_fn = torch.nn.ReLU()  # the configuration still says silu
    assert build_fused(wrap_model(model)) is None


@pytest.mark.parametrize("problem", ["computes nothing", "cannot be compiled"])
def test_wrong_kernels_of_a_gpu_leave_the_modules(problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_kernels(monkeypatch)
    if problem == "cannot be compiled":
        kernels = importlib.import_module("lineclear.worker.cuda.layer_kernels")
        monkeypatch.setattr(kernels, "activate_kernel", {})
    loaded = wrap_model(tiny_model("qwen2"))
    assert modules_reason(loader.build_cuda(loaded))
    assert loaded.probe_logits is not None
    assert torch.equal(paged_logits(loaded), loaded.probe_logits)


def test_gpu_without_room_for_a_copy_runs_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    without_kernels(monkeypatch)
    monkeypatch.setattr(loader, "free_bytes", lambda device: 100)
    monkeypatch.setattr(loader, "log", log := Mock())
    on_gpu = replace(wrap_model(tiny_model("llama")), device=torch.device("cuda"))
    reason = modules_reason(loader.build_cuda(on_gpu))
    assert reason.startswith("MemoryError: it needs ")
    assert log.warning.call_args.kwargs["problem"] == reason


@pytest.mark.parametrize(("share", "waits_on_host"), [(1.2, True), (1.5, True), (2.3, False)])
def test_fusing_leaves_no_holes_in_the_memory_of_a_gpu(
    share: float, waits_on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that transformers has read into one piece, on a GPU of `share` times its size."""
    without_kernels(monkeypatch)
    loaded = wrap_model(tiny_model("llama", num_hidden_layers=12, layer_types=None))
    loaded, size = replace(loaded, device=torch.device("cpu:0")), loaded.weight_bytes
    in_layer = sum(weight.nbytes for weight in loaded.model.model.layers[0].parameters())
    with Card(int(share * size)) as card:
        card.hold(weight for _, weight in sorted(loaded.model.named_parameters()))  # as in the files
        free = {"cpu:0": card.free_bytes, "cpu": lambda: 2 * size}
        monkeypatch.setattr(loader, "free_bytes", lambda device: free[str(device)]())
        monkeypatch.setattr(torch.cuda, "empty_cache", card.empty_cache)
        loader._take_own_memory(loaded)
        assert (card.allocator.most_reserved == size) == waits_on_host
        fused = fused_on_cuda(loaded)
        card.empty_cache()
        assert fused.decoder is not None
        assert size <= card.allocator.reserved < size + in_layer


@pytest.mark.parametrize("has_triton", [True, False])
def test_model_on_a_gpu_is_fused_with_triton(has_triton: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = replace(wrap_model(tiny_model("llama")), device=torch.device("cuda"))
    fused = replace(on_gpu)
    monkeypatch.setattr(loader, "build_cuda", lambda loaded, agree: fused)
    monkeypatch.setattr(triton_support, "is_usable", lambda: has_triton)
    assert (build_fused(on_gpu) is fused) == has_triton


@needs_kernels
@pytest.mark.parametrize("build", [build_fused, to_quantized])
def test_packing_frees_the_matrices(build: Callable[[LoadedModel], LoadedModel | None]) -> None:
    model = tiny_model("llama", **WIDE)
    before = sum(p.numel() for p in model.parameters())
    assert build(wrap_model(model)) is not None
    assert sum(p.numel() for p in model.parameters()) < before / 2


@needs_kernels
def test_failed_comparison_falls_back_to_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_of("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(loader, "relative_error", lambda found, wanted: float("inf"))
    assert build_fused(loader.load(str(tmp_path), torch.device("cpu"), None)) is None
    assert InProcess(runner_with(tmp_path), CoreLimits()).serve(requests()) == expected("llama")
