"""Compute threads: their number, the cost of a step, and results that do not depend on them."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import WIDE, tiny_model
from support.inprocess import InProcess
from support.kernel_variants import needs_kernels
from worker.settings_runner import runner_with

from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.sequence import Request
from lineclear.wire.messages import Sampling
from lineclear.worker.cpu import thread_tuner as threads_module
from lineclear.worker.cpu.thread_tuner import ThreadTuner, openmp_setter
from lineclear.worker.model import compatibility_probe
from lineclear.worker.model import loaded_model as model_module
from lineclear.worker.model.loader import build_fused, to_quantized, wrap_model
from lineclear.worker.runner import runner_factory
from lineclear.worker.runner.model_runner import ModelRunner, RunnerOptions


class Clock:
    """Moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run_steps(tuner: ThreadTuner, clock: Clock, seconds: Callable[[], float], count: int) -> None:
    for _ in range(count):
        tuner.start_step(1)
        clock.now += seconds()
        tuner.finish_step(1)


def test_threads_are_set_on_change() -> None:
    clock, found = Clock(), list[int]()
    tuner = ThreadTuner(found.append, cores=lambda: 2, clock=clock)
    run_steps(tuner, clock, lambda: 0.01 * found[-1], 300)  # one thread is the faster number
    assert found[:3] == [1, 2, 1]
    assert all(a != b for a, b in pairwise(found))


def test_lost_cores_are_noticed_within_a_second() -> None:
    clock, found, cores = Clock(), list[int](), [4]
    tuner = ThreadTuner(found.append, cores=lambda: cores[0], clock=clock)
    run_steps(tuner, clock, lambda: 0.04 / found[-1], 200)
    assert max(found) == 4
    found.clear()
    cores[0] = 2
    clock.now += 1.1
    run_steps(tuner, clock, lambda: 0.01, 200)
    assert max(found) == 2


def test_cost_includes_a_bounded_gap() -> None:
    clock, found = Clock(), list[int]()
    tuner = ThreadTuner(found.append, cores=lambda: 2, clock=clock)
    source = random.Random(1)
    for _ in range(600):
        # With two threads the step is faster and what lies between two steps is slower by more.
        clock.now += 0.004 if found and found[-1] == 2 else 0.0
        clock.now += source.choice((0.0, 0.0, 0.0, 10.0))
        tuner.start_step(1)
        clock.now += 0.009 if found[-1] == 2 else 0.01
        tuner.finish_step(1)
    assert 1 in found[-2:]
    assert found.count(2) < 30


@needs_kernels
def test_setter_belongs_to_torchs_runtime() -> None:
    set_threads = openmp_setter()
    assert set_threads is not None
    for threads in (3, 1, 2):
        set_threads(threads)
        assert torch.get_num_threads() == threads


def requests() -> list[Request]:
    torch.manual_seed(5)
    prompts = [tuple(torch.randint(3, 200, (n,)).tolist()) for n in (1, 5, 17, 30, 200)]
    return [Request(str(i), p, Sampling(), 24) for i, p in enumerate(prompts)]


@needs_kernels
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_tokens_do_not_depend_on_threads(kind: str) -> None:
    model = tiny_model("llama", **WIDE)
    model = model.to(torch.bfloat16) if kind == "bfloat16" else model
    served = to_quantized(wrap_model(model)) if kind == "int8" else build_fused(wrap_model(model))
    assert served is not None
    set_threads = openmp_setter()
    assert set_threads is not None

    def answers(most: int) -> tuple[dict[str, list[int]], set[int]]:
        used, source, clock = set[int](), random.Random(most), Clock()

        def tick() -> float:  # steps of any length: every number is tried again and again
            clock.now += source.random()
            return clock.now

        def use(threads: int) -> None:
            used.add(threads)
            set_threads(threads)

        runner = ModelRunner(served, RunnerOptions(num_blocks=64))
        runner.thread_tuner = ThreadTuner(use, cores=lambda: most, clock=tick)
        return InProcess(runner, CoreLimits(target_batch_tokens=24)).serve(requests()), used

    alone, _ = answers(1)
    together, used = answers(4)
    assert len(used) > 1, "nothing was tried"
    assert alone == together


@needs_kernels
@pytest.mark.parametrize(("threads", "tuned"), [(0, True), (1, False)])
def test_fixed_number_of_threads_stays(tmp_path: Path, threads: int, tuned: bool) -> None:
    tiny_model("llama", **WIDE).save_pretrained(tmp_path)
    assert (runner_with(tmp_path, threads=threads).thread_tuner is not None) == tuned


@needs_kernels
@pytest.mark.parametrize(
    ("bytes_per_thread", "threads", "flags"),
    [
        (2**28, {1}, {}),
        (2**28, {1}, {"quantization": "int8"}),
        (2**28, {1}, {"fused_forward": False}),
        (1, {2}, {}),
    ],
    ids=["small", "int8", "plain", "large"],
)
def test_small_models_are_probed_with_one_thread(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bytes_per_thread: int,
    threads: set[int],
    flags: dict[str, Any],
) -> None:
    """Beside a busy process two threads took ten times as long for it, which every crash's gap contained."""
    found = set[int]()
    forward, logits = model_module.forward, model_module.LoadedModel.logits

    def watch(call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            found.add(torch.get_num_threads())
            return call(*arguments, **options)

        return watched

    monkeypatch.setattr(model_module, "forward", watch(forward))
    monkeypatch.setattr(compatibility_probe, "forward", watch(forward))
    monkeypatch.setattr(model_module.LoadedModel, "logits", watch(logits))
    monkeypatch.setattr(runner_factory, "usable_cores", lambda: 2)
    monkeypatch.setattr(threads_module, "_WEIGHT_BYTES_PER_THREAD", bytes_per_thread)
    tiny_model("llama", **WIDE).save_pretrained(tmp_path)
    before = torch.get_num_threads()
    try:
        runner_with(tmp_path, threads=0, **flags)
        assert found == threads
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
