"""Traces of real steps: what ran is in them, and its times add up to those of the steps."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.families import WIDE, tiny_model
from support.kernel_variants import needs_kernels

from lineclear.client import StepProfile
from lineclear.wire.messages import Decodes, Row, RowOutput, Sampling, SlotInit, StepPlan, StepResult
from lineclear.worker.kernels.call_graph import CallGraph
from lineclear.worker.kernels.native_library import prefers_float32_gemm
from lineclear.worker.model.loader import build_fused, wrap_model
from lineclear.worker.runner import step_recorder
from lineclear.worker.runner.model_runner import ModelRunner, RunnerOptions
from lineclear.worker.runner.step_recorder import TorchStepRecorder

PROMPT = (5, 17, 11, 60)


def runner(fused: bool) -> ModelRunner:
    loaded = wrap_model(tiny_model("llama", **WIDE))
    found = build_fused(loaded, keep_weights=True) if fused else loaded
    assert found is not None
    assert (found.decoder is not None) == fused
    return ModelRunner(found, RunnerOptions(num_blocks=8, block_size=16, num_slots=2))


def plans() -> list[StepPlan]:
    """Return a prompt and three decodes."""
    init = SlotInit(0, PROMPT, len(PROMPT), (), Sampling())
    prompt = StepPlan(1, 1, (Row(0, 0, len(PROMPT), RowOutput.SAMPLE, (1,)),), (init,))
    return [prompt, *(StepPlan(1, step, decodes=Decodes((0,), (len(PROMPT) + step - 2,))) for step in (2, 3, 4))]


def tokens(results: list[StepResult]) -> list[int]:
    return [token for result in results for token in result.tokens]


def recorded(fused: bool) -> tuple[StepProfile, list[dict[str, Any]], list[int]]:
    """Record the plans. Return the profile, its events and the tokens."""
    found = runner(fused)
    recorder = TorchStepRecorder(found)
    results = [recorder.launch(plan).result() for plan in plans()]
    trace = recorder.stop()
    return StepProfile(trace, len(results)), json.loads(gzip.decompress(trace))["traceEvents"], tokens(results)


@needs_kernels
def test_kernels_of_the_fused_pass_are_in_their_steps() -> None:
    profile, events, found = recorded(fused=True)
    assert found == _plain(True)
    steps = [event for event in events if event.get("cat") == "step"]
    assert [step["args"] for step in steps] == [
        {"step": number, "rows": 1, "tokens": 4 if number == 1 else 1} for number in (1, 2, 3, 4)
    ]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    product = "lineclear_gemm" if prefers_float32_gemm() else "multiply"
    assert {product, "lineclear_paged_attention"} <= {kernel["name"] for kernel in kernels}
    for kernel in kernels:
        middle = kernel["ts"] + kernel["dur"] / 2
        assert any(step["ts"] < middle < step["ts"] + step["dur"] for step in steps), kernel
    for one, next_one in pairwise(kernels):
        assert next_one["ts"] >= one["ts"] + one["dur"] - 0.01, "one after the other"
    attention = next(x for x in profile.operations() if x.name == "lineclear_paged_attention")
    assert (attention.is_kernel, attention.calls) == (True, 4 * tiny_model("llama").config.num_hidden_layers)


@pytest.mark.parametrize("fused", [pytest.param(True, marks=needs_kernels), False])
def test_times_add_up_to_those_of_the_steps(fused: bool) -> None:
    profile, _, found = recorded(fused)
    assert found == _plain(fused)
    operations = profile.operations()
    assert sum(x.seconds for x in operations) == pytest.approx(profile.step_seconds(), rel=0.01)
    assert [x.name for x in operations].count("step") == 1
    assert fused or {x.name for x in operations}.intersection(("aten::addmm", "aten::mm"))


def test_a_part_that_crosses_the_end_of_a_kernel_counts_once() -> None:
    """Kernels are placed one after the other, without the gaps between them: an operation of one can reach the next."""
    times = [("step", "step", 0, 100), ("kernel", "a", 10, 20), ("cpu_op", "part", 25, 10), ("kernel", "b", 30, 60)]
    events = [{"ph": "X", "pid": 1, "tid": 1, "cat": c, "name": n, "ts": t, "dur": d} for c, n, t, d in times]
    profile = StepProfile(gzip.compress(json.dumps({"traceEvents": events}).encode()), 1)
    found = {x.name: round(x.seconds * 1e6) for x in profile.operations()}
    assert found == {"step": 20, "a": 15, "part": 5, "b": 60}


@needs_kernels
def test_long_recordings_are_written_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The profiler holds up the process for each event that it writes, so it never keeps many of them."""
    monkeypatch.setattr(step_recorder, "_PART_BYTES", 100_000)
    found = runner(True)
    recorder = TorchStepRecorder(found)
    sizes: list[int] = []
    write_part = recorder._write_part
    monkeypatch.setattr(recorder, "_write_part", lambda: sizes.append(write_part()) or sizes[-1])
    written: list[int] = []
    for step, plan in enumerate(15 * plans(), 1):
        recorder.launch(replace(plan, step=step)).result()
        written.append(recorder.write())
    profile = StepProfile(recorder.stop(), len(written))
    assert len(sizes) > 3
    assert max(sizes) < 2 * 100_000 < sum(sizes)
    assert written == sorted(written)
    assert 0 < written[-1] <= len(profile.trace)
    events = json.loads(gzip.decompress(profile.trace))["traceEvents"]
    assert [event["args"]["step"] for event in events if event.get("cat") == "step"] == list(range(1, 61))
    assert sum(x.seconds for x in profile.operations()) == pytest.approx(profile.step_seconds(), rel=0.01)
    calls = {x.name: x.calls for x in profile.operations()}
    assert calls["lineclear_paged_attention"] == 60 * tiny_model("llama").config.num_hidden_layers


def test_nothing_is_recorded_after_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    plain = CallGraph.replay
    recorder = TorchStepRecorder(runner(False))
    recorder.stop()
    assert CallGraph.replay is plain
    assert not torch.autograd.profiler._is_profiler_enabled
    assert capfd.readouterr().err == "", "standard error is the log"


def test_a_recorder_that_fails_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its start, as beside another profiler, and in its end, as on a device that has failed."""
    plain = CallGraph.replay
    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd.profiler, "profile", Mock(side_effect=RuntimeError))
        with pytest.raises(RuntimeError) as kept:  # with its frames, and what they hold
            TorchStepRecorder(runner(False))
        assert CallGraph.replay is plain, kept
    recorder = TorchStepRecorder(runner(False))
    monkeypatch.setattr(torch.autograd.profiler, "_run_on_profiler_stop", Mock(side_effect=RuntimeError))
    with pytest.raises(RuntimeError):
        recorder.stop()
    assert CallGraph.replay is plain


def _plain(fused: bool) -> list[int]:
    found = runner(fused)
    return tokens([found.launch(plan).result() for plan in plans()])
