"""The self-test: every served path passes it, and a path that computes something else does not get past it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from simulation import mutations
from simulation.mutations import Bug, planted
from support.families import WIDE, tiny_model

from lineclear.wire.messages import Row, Sampling, SlotInit, StepErrorKind, StepPlan
from lineclear.worker.attention.cpu_native import NativeAttention
from lineclear.worker.attention.torch_paged import TorchPagedAttention
from lineclear.worker.kernels.native_library import NONE, selected_library
from lineclear.worker.loop.runner_interface import StepFailed
from lineclear.worker.model.loaded_model import LoadedModel
from lineclear.worker.model.loader import build_fused, to_quantized, wrap_model
from lineclear.worker.runner import self_test
from lineclear.worker.runner.input_batch import InputBatch
from lineclear.worker.runner.model_runner import ModelRunner, RunnerOptions
from lineclear.worker.runner.self_test import SelfTestFailed


def runner_of(loaded: LoadedModel, **settings: Any) -> ModelRunner:
    return ModelRunner(
        loaded, RunnerOptions(**{"num_blocks": 32, "block_size": 4, "num_slots": 4, "max_step_tokens": 64, **settings})
    )


def passes(loaded: LoadedModel, kv_dtype: torch.dtype | None = None, **settings: Any) -> str:
    """The attention backend that was used."""
    right = self_test.expected_answers(loaded, kv_dtype)
    runner = runner_of(loaded, kv_dtype=kv_dtype, **settings)
    self_test.check(runner, right, loaded.dtype)
    return runner.backend_name


@pytest.mark.usefixtures("best_and_none")
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt2"])
def test_right_answers_pass(family: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        passes(wrap_model(tiny_model(family, dtype=dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_answers_pass_in_every_library(each_way: str, dtype: torch.dtype) -> None:
    loaded = wrap_model(tiny_model("llama", dtype=dtype, **WIDE))
    backend = "torch_paged" if each_way == NONE else "native"
    assert passes(loaded, block_size=16) == backend
    fused = build_fused(loaded)
    assert fused is not None
    assert (fused.decoder is None) == (each_way == NONE)
    assert passes(fused, block_size=16) == backend


@pytest.mark.usefixtures("each_library")
@pytest.mark.parametrize(("dtype", "kv_dtype"), [(torch.float32, torch.int8), (torch.bfloat16, None)])
def test_int8_passes_in_every_library(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    assert (
        passes(to_quantized(wrap_model(tiny_model("llama", dtype=dtype, **WIDE))), kv_dtype, block_size=16) == "native"
    )


def test_small_workers_pass() -> None:
    for settings in (
        {"num_slots": 1},
        {"num_blocks": 1},
        {"block_size": 1, "num_blocks": 64},
        {"block_size": 64, "num_blocks": 2},
        {"max_step_tokens": 1},
        {"max_step_tokens": 3, "num_blocks": 7},
    ):
        passes(wrap_model(tiny_model("llama")), **settings)
    passes(wrap_model(tiny_model("llama"), max_model_len=8))


def test_check_resets_the_runner() -> None:
    """A plan that continues the self-test's slots is refused, and answers equal those of a fresh runner."""
    loaded = wrap_model(tiny_model("llama"))
    right = self_test.expected_answers(loaded)
    tested, fresh = runner_of(loaded), runner_of(wrap_model(tiny_model("llama")))  # a model has one runner at a time
    self_test.check(tested, right, loaded.dtype)
    for slot, answer in enumerate(right):
        continuation = Row(slot, len(answer.prompt) + len(answer.tokens) - 1, 1, True)
        with pytest.raises(StepFailed) as refused:
            tested.launch(StepPlan(1, 1, chunks=(continuation,)))
        assert refused.value.kind is StepErrorKind.PROTOCOL
    assert answers(tested) == answers(fresh)
    self_test.check(tested, right, loaded.dtype)


def answers(runner: ModelRunner) -> list[int]:
    """Generate a new sequence in the first slot, in the blocks that the self-test used first."""
    prompt, blocks = tuple(range(5, 25)), tuple(range(31, 25, -1))
    init = SlotInit(0, prompt, len(prompt), (), Sampling())
    tokens = list(runner.launch(StepPlan(1, 1, (Row(0, 0, 20, True, blocks),), (init,))).result().tokens)
    for start in (20, 21, 22):
        tokens += runner.launch(StepPlan(1, start, (Row(0, start, 1, True),))).result().tokens
    return tokens


def with_logits(change: str) -> mutations.Operator:
    return mutations.replace("with_argmax(logits if _1 else _2)", f"with_argmax({change} * (logits if _1 else _2))")


FAULTS = (
    Bug("positions are halved", InputBatch, mutations.replace("by_token[1]", "by_token[1] // 2")),
    Bug("decodes go one back", InputBatch, mutations.replace("decodes.starts", "(n - 1 for n in decodes.starts)")),
    Bug("the logits are negated", LoadedModel, with_logits("-1")),
    Bug("the logits are NaN", LoadedModel, with_logits("float('nan')")),
)
STORED_KEYS = {
    "native": Bug("", NativeAttention, mutations.replace("self._to_pool_format(key)", "self._to_pool_format(-key)")),
    "torch_paged": Bug(
        "", TorchPagedAttention, mutations.replace("(self._keys[layer], key)", "(self._keys[layer], -key)")
    ),
}
"""By backend: it stores keys wrongly."""


@pytest.mark.usefixtures("best_and_none")
@pytest.mark.parametrize("fault", [*FAULTS, STORED_KEYS], ids=lambda fault: getattr(fault, "title", "keys are negated"))
def test_wrong_answers_fail(fault: Bug | dict[str, Bug]) -> None:
    loaded = wrap_model(tiny_model("llama", seed=3, **WIDE))
    right = self_test.expected_answers(loaded)
    runner = runner_of(loaded, block_size=16)
    assert runner.backend_name == ("torch_paged" if selected_library() is None else "native")
    bug = fault[runner.backend_name] if isinstance(fault, dict) else fault
    with planted(bug), pytest.raises(SelfTestFailed):
        self_test.check(runner, right, loaded.dtype)
    self_test.check(runner, right, loaded.dtype)


@pytest.mark.usefixtures("best_and_none")
def test_wrong_weight_fails() -> None:
    loaded = wrap_model(tiny_model("llama", seed=3, **WIDE))
    right = self_test.expected_answers(loaded)
    runner = runner_of(loaded, block_size=16)
    with torch.no_grad():
        loaded.model.model.layers[0].mlp.down_proj.weight.mul_(-1)
    with pytest.raises(SelfTestFailed):
        self_test.check(runner, right, loaded.dtype)


def test_failed_step_fails_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = wrap_model(tiny_model("llama"))
    right = self_test.expected_answers(loaded)
    monkeypatch.setattr(LoadedModel, "logits", Mock(side_effect=RuntimeError("device")))
    with pytest.raises(SelfTestFailed, match="step 1 of the self-test failed: RuntimeError at"):
        self_test.check(runner_of(loaded), right, loaded.dtype)


def test_ties_pass() -> None:
    loaded = wrap_model(tiny_model("llama"))
    right = self_test.expected_answers(loaded)
    one = right[0]
    first, second = one.logits[0].topk(2).indices.tolist()
    tied = one.logits.clone()
    tied[0, second] = tied[0, first] + 1e-4 * tied[0].std()  # the oracle would have taken the other one
    self_test.check(runner_of(loaded), [replace(one, logits=tied)], loaded.dtype)
    tied[0, second] = tied[0, first] + tied[0].std()
    with pytest.raises(SelfTestFailed, match="token 0 after a prompt of 19"):
        self_test.check(runner_of(loaded), [replace(one, logits=tied)], loaded.dtype)
