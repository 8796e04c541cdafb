"""The demo model answers like transformers' `generate`, with each kernel library of this machine and with none."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from e2e.transformers_answers import generated
from support.demo import model
from support.inprocess import InProcess
from support.kernel_variants import LIBRARIES, needs_kernels
from support.service import DEMO_MODEL

from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.sequence import Request
from lineclear.wire.messages import Sampling
from lineclear.worker.kernels import native_library as kernels
from lineclear.worker.kernels.native_library import library_name
from lineclear.worker.model.loader import build_fused, load
from lineclear.worker.runner.model_runner import ModelRunner
from lineclear.worker.runner.runner_factory import make_runner
from lineclear.worker.settings import WorkerSettings

TEXTS = ["Once upon a time", "The signal", "There was a small station at the end of the line. Every morning"]


def runner_of(**settings: Any) -> ModelRunner:
    """Return a runner that has passed its self-test."""
    fixed = {"model": str(DEMO_MODEL), "socket_directory": "/d", "device": "cpu", "threads": 1, "num_blocks": 64}
    return make_runner(WorkerSettings(**fixed, **settings))


@pytest.fixture(scope="module", params=[*LIBRARIES, kernels.NONE], name="runner")
def make_ready(request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    runner = runner_of(dtype="float32", cpu_kernels=request.param)
    assert library_name() == ("" if request.param == kernels.NONE else request.param)
    assert runner.backend_name == ("torch_paged" if request.param == kernels.NONE else "native")
    loaded = build_fused(load(str(DEMO_MODEL), torch.device("cpu"), torch.float32))
    assert loaded is not None
    assert (loaded.decoder is None) == (request.param == kernels.NONE)
    yield runner
    kernels.choose(kernels.AUTO)


@cache
def eos() -> tuple[int, ...]:
    found = model()[0].generation_config.eos_token_id
    return (found,) if isinstance(found, int) else tuple(sorted(found))


def requests(sampling: Sampling) -> list[Request]:
    tokenizer = model()[1]
    ends = frozenset(sampling.stop_ids)
    return [Request(text, tuple(tokenizer(text).input_ids), sampling, 24, eos_ids=ends) for text in TEXTS]


@cache
def expected() -> dict[str, list[int]]:
    return generated(model()[0], requests(Sampling()), eos_token_id=list(eos()))


def test_greedy_answers_equal_transformers(runner: ModelRunner) -> None:
    for limits in (CoreLimits(), CoreLimits(target_batch_tokens=5)):
        assert InProcess(runner, limits).serve(requests(Sampling(stop_ids=eos()))) == expected()


def test_seeded_answers_do_not_depend_on_the_batch(runner: ModelRunner) -> None:
    asked = requests(Sampling(temperature=0.8, top_p=0.9, seed=11))
    together = InProcess(runner).serve(asked)
    for request in asked:
        assert InProcess(runner).serve([request])[request.request_id] == together[request.request_id]
    assert together != expected()


def test_bfloat16_passes_the_self_test(best_and_none: str) -> None:
    assert runner_of(cpu_kernels=best_and_none).hello(1).dtype == "bfloat16"


@needs_kernels
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_int8_passes_the_self_test(kv_cache_dtype: str) -> None:
    assert runner_of(quantization="int8", kv_cache_dtype=kv_cache_dtype).hello(1).dtype == "int8"
