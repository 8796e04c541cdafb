"""The model runner: Hello, results, and errors in a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.families import WIDE, tiny_model
from support.inprocess import Failure, InProcess

from lineclear.errors import NonFiniteLogits
from lineclear.process.settings_base import ConfigurationError
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.sequence import Request
from lineclear.wire.messages import Decodes, Row, Sampling, SlotInit, StepErrorKind, StepPlan, StepResult
from lineclear.worker.kernels.native_library import NONE
from lineclear.worker.loop.runner_interface import StepFailed
from lineclear.worker.model.loaded_model import LoadedModel
from lineclear.worker.model.loader import build_fused, wrap_model
from lineclear.worker.runner.model_runner import ModelRunner, RunnerOptions

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]),
]


def runner_of(loaded: LoadedModel, num_blocks: int = 64) -> ModelRunner:
    return ModelRunner(loaded, RunnerOptions(num_blocks=num_blocks, block_size=4, num_slots=8, max_step_tokens=256))


def asked(name: str, prompt: tuple[int, ...], **sampling: Any) -> Request:
    return Request(name, prompt, Sampling(**sampling), max_tokens=8)


def test_hello_has_capacities_and_versions(each_way: str) -> None:
    hello = runner_of(wrap_model(tiny_model("llama"), "tiny")).hello(7)
    assert (hello.epoch, hello.num_blocks, hello.block_size, hello.num_slots) == (7, 64, 4, 8)
    assert (hello.max_model_len, hello.vocab_size, hello.eos_token_ids, hello.max_step_tokens) == (256, 211, (2,), 256)
    assert (hello.model_id, hello.family, hello.dtype, hello.device) == ("tiny", "llama", "float32", "cpu")
    assert hello.attention_backend == "torch_paged", "in blocks of 4"
    found = ModelRunner(wrap_model(tiny_model("llama", **WIDE)), RunnerOptions(num_blocks=4)).hello(7).attention_backend
    assert found == ("torch_paged" if each_way == NONE else "native")


def results_of(runner: ModelRunner, plans: list[StepPlan], *, late: bool) -> list[StepResult]:
    """Run the plans; `late` reads the results when all steps were launched."""
    if late:
        inflight = [runner.launch(plan) for plan in plans]
        return [step.result() for step in inflight]
    return [runner.launch(plan).result() for plan in plans]


@pytest.mark.usefixtures("best_and_none")
def test_late_result_is_of_its_own_step() -> None:
    """The next step overwrites the memory of a step's samples."""
    loaded = build_fused(wrap_model(tiny_model("llama", **WIDE)))
    assert loaded is not None
    init = SlotInit(0, (5, 6, 7, 8, 9), 5, (), Sampling())
    plans = [StepPlan(1, 1, (Row(0, 0, 5, True, (3,)),), (init,))]
    plans += [StepPlan(1, step, decodes=Decodes((0,), (3 + step,))) for step in range(2, 8)]
    early, late = (
        [result.tokens for result in results_of(ModelRunner(loaded, RunnerOptions(num_blocks=8)), plans, late=late)]
        for late in (False, True)
    )
    assert len(set(early)) > 1, "every step gave the same token"
    assert early == late


@pytest.mark.parametrize("device", DEVICES)
def test_slot_has_next_owner_before_result_of_the_last_row(device: str) -> None:
    """The scheduler hands a slot on when its owner's last row is planned."""
    model = tiny_model("llama").to(device)
    first, second = (Sampling(temperature=0.9, seed=seed, logprobs=2, repetition_penalty=1.3) for seed in (1, 2))
    plans = [
        StepPlan(1, 1, (Row(0, 0, 5, True, (3, 4)),), (SlotInit(0, (5, 6, 7, 8, 9), 5, (), first),)),
        StepPlan(1, 2, decodes=Decodes((0,), (5,))),
        StepPlan(1, 3, (Row(0, 0, 4, True, (5, 6)),), (SlotInit(0, (60, 61, 62, 63), 4, (), second),)),
        StepPlan(1, 4, decodes=Decodes((0,), (4,))),
    ]
    second_alone = [replace(plan, step=step) for step, plan in enumerate(plans[2:], 1)]
    early, late, alone = (
        [(result.tokens, result.logprobs) for result in results_of(runner_of(wrap_model(model)), asked, late=late)]
        for asked, late in ((plans, False), (plans, True), (second_alone, False))
    )
    assert early == late
    assert early[2:] == alone


def test_num_blocks_is_limited_by_slots() -> None:
    runner = ModelRunner(wrap_model(tiny_model("llama")), RunnerOptions(block_size=16, num_slots=3))
    assert runner.capacity.num_blocks == 2 * 3 * (256 // 16)


def test_too_little_memory_for_a_block_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lineclear.worker.device.memory_budget.free_bytes", lambda device: 1000)
    with pytest.raises(ConfigurationError, match=r"does not hold one KV block of [0-9]+ bytes$"):
        ModelRunner(wrap_model(tiny_model("llama")))


@pytest.mark.usefixtures("best_and_none")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_stays_in_its_sequence(dtype: torch.dtype, device: str) -> None:
    """Token 7 embeds to NaN. Its request fails; all others are answered as without it, also in its blocks, reused."""
    model = tiny_model("gemma2", dtype=dtype).to(device)
    others = [
        asked(f"other-{i}", tuple(range(10 + i, 20 + 3 * i)), temperature=0.7, seed=i, banned_ids=(7,))
        for i in range(5)
    ]
    wanted = InProcess(runner_of(wrap_model(model))).serve(others)
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = float("nan")
    # So few blocks that those of the failed request are given to others at once.
    server = InProcess(runner_of(wrap_model(model), num_blocks=20), CoreLimits(max_batch_size=8))
    for request in others:
        server.events += server.core.submit(replace(request, request_id=f"early-{request.request_id}"), 0)
    with pytest.raises(Failure) as caught:
        server.serve([asked("bad", (9, 8, 7, 9, 9, 9, 9, 9, 9))])
    assert isinstance(caught.value.args[0], NonFiniteLogits)
    again = server.serve(others)
    assert any(plan.zero_blocks for plan in server.plans)
    if dtype is torch.float32:  # in bfloat16 other batches give other roundings
        assert again == wanted
    assert all(len(tokens) == 8 for tokens in again.values())


@pytest.mark.usefixtures("best_and_none")
def test_logprobs_are_those_requested() -> None:
    model = tiny_model("qwen2")
    runner = runner_of(wrap_model(model))
    server = InProcess(runner)
    prompt = tuple(range(20, 33))
    requests = [
        asked("with", prompt, logprobs=3),
        asked("without", prompt),
        asked("given", prompt, logprobs=0, logprob_ids=(7, 3, 150)),
        asked("both", prompt, logprobs=1, logprob_ids=(150,)),
        asked("chosen only", prompt, logprobs=0),
    ]
    outputs = server.serve(requests)
    assert len({tuple(tokens) for tokens in outputs.values()}) == 1
    plain = tiny_model("qwen2")
    with torch.no_grad():
        logits = plain(torch.tensor([[*prompt, *outputs["with"]]])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits, dim=-1)
    wanted = logprobs.topk(3)
    assert len(server.logprobs("with")) == len(server.logprobs("chosen only")) == 8
    for i, entry in enumerate(server.logprobs("with")):
        assert [token for token, _ in entry.top] == wanted.indices[i].tolist()
        assert [value for _, value in entry.top] == pytest.approx(wanted.values[i].tolist(), abs=1e-4)
        assert entry.logprob == pytest.approx(entry.top[0][1])
    for row, given, both in zip(logprobs, server.logprobs("given"), server.logprobs("both"), strict=True):
        assert [token for token, _ in given.top] == [7, 3, 150]
        assert [value for _, value in given.top] == pytest.approx(row[[7, 3, 150]].tolist(), abs=1e-4)
        assert [token for token, _ in both.top] == [int(row.argmax()), 150]
        assert both.top[1] == pytest.approx(given.top[2])
    assert all(entry.top == () for entry in server.logprobs("chosen only"))
    assert not server.logprobs("without")


def first_plan(tokens: tuple[int, ...] = (3, 4, 5)) -> StepPlan:
    return StepPlan(1, 1, (Row(0, 0, len(tokens), True, (0,)),), (SlotInit(0, tokens, len(tokens), (), Sampling()),))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("secret"), StepErrorKind.OUT_OF_MEMORY),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"),
            StepErrorKind.OUT_OF_MEMORY,
        ),
        (RuntimeError("Triton Error [CUDA]: out of memory"), StepErrorKind.OUT_OF_MEMORY),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), StepErrorKind.OUT_OF_MEMORY),
        (ZeroDivisionError("secret"), StepErrorKind.EXCEPTION),
        (torch.AcceleratorError("CUDA error: secret device-side assert"), StepErrorKind.EXCEPTION),
    ],
)
def test_step_error_has_kind_and_location(error: Exception, kind: StepErrorKind) -> None:
    model = tiny_model("llama")
    runner = runner_of(wrap_model(model))

    def fail(*args: Any) -> None:
        raise error

    handle = model.lm_head.register_forward_pre_hook(fail)
    with pytest.raises(StepFailed) as caught:
        runner.launch(first_plan()).result()
    assert caught.value.kind is kind
    assert type(error).__name__ in caught.value.summary
    assert "test_model_runner.py:" in caught.value.summary
    assert "secret" not in caught.value.summary
    handle.remove()
    runner.reset()
    assert len(runner.launch(first_plan()).result().tokens) == 1


@pytest.mark.usefixtures("best_and_none")
def test_plan_without_samples_gives_an_empty_result() -> None:
    runner = runner_of(wrap_model(tiny_model("llama")))
    assert runner.launch(StepPlan(1, 1, (), zero_blocks=(1, 2))).result().tokens == ()
    half = StepPlan(1, 2, (Row(0, 0, 2, False, (0,)),), (SlotInit(0, (3, 4, 5), 3, (), Sampling()),))
    result = runner.launch(half).result()
    assert (result.epoch, result.step, result.tokens, result.logprobs) == (1, 2, (), ())
    assert result.step_seconds > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_gpu_tokens_equal_cpu_tokens(family: str) -> None:
    requests = [asked(f"r{i}", tuple(range(i + 3, 4 * i + 9)), temperature=0.8, seed=i) for i in range(8)]
    wanted = InProcess(runner_of(wrap_model(tiny_model(family)))).serve(requests)
    server = InProcess(runner_of(wrap_model(tiny_model(family).to("cuda"))), CoreLimits(pipeline_depth=3))
    assert server.serve(requests) == wanted
