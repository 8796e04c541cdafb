"""How much memory a GPU keeps for its largest step, rehearsed on the CPU with another allocator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from support.families import tiny_model
from support.graphs import recorded
from support.launches import without_kernels
from worker.settings_runner import runner_with

from lineclear.process.settings_base import ConfigurationError
from lineclear.wire.messages import StepPlan
from lineclear.worker.attention.base import block_bytes
from lineclear.worker.device import memory_budget
from lineclear.worker.device.staging import Staging
from lineclear.worker.kv_cache.pool_memory import fitting_blocks
from lineclear.worker.model.decode_graphs import DecodeGraphs
from lineclear.worker.model.loaded_model import LoadedModel
from lineclear.worker.model.loader import wrap_model
from lineclear.worker.runner import input_batch, runner_factory, self_test
from lineclear.worker.runner.memory_profile import largest_step_bytes, run_largest_steps
from lineclear.worker.runner.model_runner import ModelRunner, RunnerOptions
from lineclear.worker.runner.self_test import SelfTestFailed
from lineclear.worker.sampling.logits import Logits
from lineclear.worker.sampling.sampler import Sampled, sample
from lineclear.worker.sampling.sampling_metadata import SamplingMetadata

OPTIONS = RunnerOptions(num_slots=6, max_step_tokens=40, block_size=16)
CONTEXT = 256


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap_model(tiny_model("llama"))


def peak_of(num_bytes: int) -> Callable[[torch.device], Any]:
    return lambda device: SimpleNamespace(bytes=lambda: num_bytes)


class Rehearsal:
    """What the steps of a profile compute."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans: list[StepPlan] = []
        self.sampled: list[SamplingMetadata] = []
        launch = ModelRunner.launch

        def launched(runner: ModelRunner, plan: StepPlan) -> Any:
            self.plans.append(plan)
            return launch(runner, plan)

        def sampling(logits: Logits, metadata: SamplingMetadata, *others: Any) -> Sampled:
            self.sampled.append(metadata)
            return sample(logits, metadata, *others)

        monkeypatch.setattr(ModelRunner, "launch", launched)
        monkeypatch.setattr(ModelRunner, "_sample", staticmethod(sampling))


@pytest.mark.parametrize(
    ("changes", "tokens", "rows"),
    [
        ({}, 40, 6),
        ({"max_step_tokens": 700}, 700, 6),  # several prompts
        ({"max_step_tokens": 3}, 3, 3),
        ({"max_step_tokens": 5000}, 6 * CONTEXT, 6),  # more than the slots can have
    ],
)
def test_profile_covers_the_largest_step(
    changes: dict[str, int], tokens: int, rows: int, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsal = Rehearsal(monkeypatch)
    assert largest_step_bytes(loaded, replace(OPTIONS, **changes), peak_memory=peak_of(700)) == 700
    assert [plan.num_tokens for plan in rehearsal.plans] == [tokens, rows]
    assert max(row.start + row.num_tokens for row in rehearsal.plans[0].rows) > CONTEXT - 16
    for metadata in rehearsal.sampled:
        (draws,) = metadata.draws
        assert "top_k" in draws.parameters
        assert metadata.logprobs is not None
        assert len(draws.rows) == len(metadata.logprobs.rows) == metadata.num_rows == rows
        assert len(metadata.changes) == 1, "penalties"


def test_profile_captures_the_largest_graph(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows at most, of the longest context; steps of more rows are not captured."""
    without_kernels(monkeypatch)
    monkeypatch.setattr(input_batch, "Staging", lambda device, size: Staging(device, size, is_direct=False))
    captured: list[int] = []

    def capture(run: Callable[[], Logits]) -> Any:
        found = recorded(run)
        captured.append(len(found[0].values))
        return found

    rehearsal, options = Rehearsal(monkeypatch), replace(OPTIONS, attention_backend="triton_paged")
    largest_step_bytes(loaded, options, DecodeGraphs([1, 4, 2], capture), peak_of(0))
    assert captured == [4]
    assert [plan.num_tokens for plan in rehearsal.plans] == [40, 6, 4]


def test_blocks_get_what_the_largest_step_leaves(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    size = block_bytes(loaded.layers, OPTIONS.block_size, loaded.dtype)
    monkeypatch.setattr(memory_budget, "free_bytes", lambda device: 50 * size)
    monkeypatch.setattr(runner_factory, "largest_step_bytes", lambda *_: 7 * size)

    def blocks(device: str, fraction: float, num_workers: int = 1) -> int:
        options = replace(OPTIONS, kv_cache_memory_fraction=fraction, num_workers=num_workers)
        there = replace(loaded, device=torch.device(device))
        return fitting_blocks(there, runner_factory._with_step_memory(options, there, None), None)

    assert (blocks("cpu", 0.8), blocks("cuda", 0.8)) == (40, 33)
    assert (blocks("cpu", 0.0), blocks("cuda", 0.0)) == (25, 38)
    assert blocks("cuda", 0.8, num_workers=2) == 13
    with pytest.raises(ConfigurationError) as caught:
        blocks("cuda", 0.1)
    assert str(caught.value) == (
        f"after loading, the free memory does not hold one KV block of {size} bytes beside the {7 * size} bytes of the "
        "largest step; lower --target-batch-tokens, --max-batch-size or --max-model-len, or raise "
        "--kv-cache-memory-fraction"
    )


def test_given_number_of_blocks_needs_no_profile(loaded: LoadedModel) -> None:
    options = replace(OPTIONS, num_blocks=9)
    assert runner_factory._with_step_memory(options, replace(loaded, device=torch.device("cuda")), None) is options


def test_step_that_does_not_fit_is_refused(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pools, and with them."""

    def fail(*_: Any) -> NoReturn:
        raise torch.OutOfMemoryError("of 3 GiB")

    monkeypatch.setattr(ModelRunner, "_sample", staticmethod(fail))
    runner = ModelRunner(loaded, replace(OPTIONS, num_blocks=9))
    profile = partial(largest_step_bytes, loaded, OPTIONS, peak_memory=peak_of(0))
    for run in (profile, partial(run_largest_steps, runner, 0)):
        with pytest.raises(ConfigurationError, match=r"too little memory .* --target-batch-tokens, .* --num-blocks"):
            run()


def test_pools_that_do_not_fit_beside_the_weights_are_refused(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> NoReturn:
        raise torch.OutOfMemoryError("of 3 GiB")

    monkeypatch.setattr(input_batch, "Staging", fail)
    with pytest.raises(ConfigurationError, match="too little memory"):
        largest_step_bytes(loaded, OPTIONS, peak_memory=peak_of(0))


def test_step_that_fails_ends_the_start(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "_sample", staticmethod(lambda *_: 1 / 0))
    with pytest.raises(SelfTestFailed, match="the largest step failed: ZeroDivisionError"):
        largest_step_bytes(loaded, OPTIONS, peak_memory=peak_of(0))


def test_worker_with_graphs_captures_the_largest_before_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_kernels(monkeypatch)
    monkeypatch.setattr(input_batch, "Staging", lambda device, size: Staging(device, size, is_direct=False))
    monkeypatch.setattr(runner_factory, "_graphs", lambda *_: DecodeGraphs([1, 4], recorded))
    monkeypatch.setattr(self_test, "check", lambda *_: rehearsal.plans.append(StepPlan(9, 9)))
    tiny_model("llama").save_pretrained(tmp_path)
    rehearsal = Rehearsal(monkeypatch)
    sizes = {"max_batch_size": 6, "target_batch_tokens": 40}
    runner_with(tmp_path, **sizes, attention_backend="triton_paged", fused_cpu_forward=False)
    assert [plan.num_tokens for plan in rehearsal.plans] == [40, 6, 4, 0], "the self-test is last"


def test_peak_is_what_torch_takes_from_its_start_on(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved = {"now": 900, "most": 1000}

    def empty_cache() -> None:
        reserved["now"] = 700

    def reset(device: torch.device) -> None:
        reserved["most"] = reserved["now"]

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: reserved["most"])
    peak = memory_budget.PeakMemory(torch.device("cuda"))
    assert peak.bytes() == 0
    reserved["most"] = 1500
    assert peak.bytes() == 800


def test_runner_serves_after_its_largest_steps(loaded: LoadedModel) -> None:
    runner = ModelRunner(loaded, replace(OPTIONS, num_blocks=9))
    expected = self_test.expected_answers(loaded)
    loaded.attach(vars(runner)["_backend"])
    run_largest_steps(runner, 2)
    self_test.check(runner, expected, loaded.dtype)
