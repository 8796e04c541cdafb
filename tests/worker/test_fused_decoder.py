"""The forward pass of few operations against transformers' own, for every family it is used for."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from support.families import WIDE, tiny_model
from support.inprocess import InProcess
from support.kernel_variants import needs_kernels

from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.sequence import Request
from lineclear.wire.messages import Sampling
from lineclear.worker.cpu.fused_decoder import FAMILIES
from lineclear.worker.kernels.native_library import NONE
from lineclear.worker.model import loader
from lineclear.worker.model.loader import build_fused, wrap_model
from lineclear.worker.model_runner import ModelRunner, RunnerOptions
from lineclear.worker.runner_factory import make_runner
from lineclear.worker.settings import WorkerSettings


def requests() -> list[Request]:
    torch.manual_seed(5)
    prompts = [tuple(torch.randint(3, 200, (n,)).tolist()) for n in (1, 5, 17, 30, 44)]
    return [Request(str(i), p, Sampling(), 12) for i, p in enumerate(prompts)]


@cache
def generated(family: str) -> dict[str, list[int]]:
    """transformers' greedy answers."""
    model, answers = tiny_model(family, **WIDE), {}
    for request in requests():
        ids = torch.tensor([request.prompt])
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        answers[request.request_id] = found[0, ids.shape[1] :].tolist()
    return answers


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_fused_tokens_equal_transformers(family: str, each_way: str) -> None:
    fused = build_fused(wrap_model(tiny_model(family, **WIDE)), keep_weights=True)
    assert fused is not None
    assert (fused.decoder is None) == (each_way == NONE), "it was not used"
    for budget in (7, 256):
        server = InProcess(ModelRunner(fused, RunnerOptions(num_blocks=32)), CoreLimits(target_batch_tokens=budget))
        assert server.serve(requests()) == generated(family)


def test_other_families_are_not_fused() -> None:
    loaded = wrap_model(tiny_model("gpt2"))
    assert build_fused(loaded) is loaded


@needs_kernels
def test_wrong_fused_logits_are_not_used() -> None:
    model = tiny_model("llama", **WIDE)
    model.model.layers[0].mlp.act_fn = torch.nn.ReLU()  # the configuration still says silu
    assert build_fused(wrap_model(model)) is None


@needs_kernels
def test_packing_frees_the_matrices() -> None:
    model = tiny_model("llama", **WIDE)
    before = sum(p.numel() for p in model.parameters())
    assert build_fused(wrap_model(model)) is not None
    assert sum(p.numel() for p in model.parameters()) < before / 2


@needs_kernels
def test_failed_comparison_falls_back_to_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model("llama", **WIDE).save_pretrained(tmp_path)
    monkeypatch.setattr(loader, "relative_error", lambda found, wanted: float("inf"))
    runner = make_runner(WorkerSettings(model=str(tmp_path), socket_directory="unused", num_blocks=64, threads=1))
    found = InProcess(runner, CoreLimits()).serve(requests())
    again = InProcess(
        ModelRunner(wrap_model(tiny_model("llama", **WIDE)), RunnerOptions(num_blocks=64)), CoreLimits()
    ).serve(requests())
    assert found == again
