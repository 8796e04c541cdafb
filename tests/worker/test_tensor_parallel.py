"""Models divided over the ranks of a worker: their answers are those of the whole model, or they are refused."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections import deque
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.divided_models import ALTERED, FUSED, Alone, model_of
from support.engine_harness import ENVIRONMENT
from support.families import tiny_model
from support.processes import is_running
from support.time_limits import PATIENCE_SECONDS
from support.waiting import eventually
from torch import nn

from lineclear.exit_codes import ExitCode
from lineclear.model_files.adapter_files import AdapterFilesRefused
from lineclear.wire.messages import StepErrorKind, StepPlan, StepResult
from lineclear.worker.device.machine_share import MachineShare
from lineclear.worker.drafts.verification import Drafts, PendingDrafts
from lineclear.worker.kernels.native_library import selected_library
from lineclear.worker.loop.runner_interface import StepFailed
from lineclear.worker.model import division
from lineclear.worker.model.loaded_model import ModelRefused
from lineclear.worker.model.loader import wrap_model
from lineclear.worker.runner import rank_runner, runner_factory
from lineclear.worker.runner.model_runner import ModelRunner
from lineclear.worker.runner.rank_runner import LeadingRunner
from lineclear.worker.settings import WorkerSettings
from lineclear.worker.tensor_parallel import ranks, shard
from lineclear.worker.tensor_parallel.ranks import Kind, OutOfStep, Ranks

WITH_WHOLE_ATTENTION = {"deepseek_v3": 1, "olmo2": 4, "phi3": 4}
"""Families of which each rank computes all heads, and the number of heads in its KV cache."""
FAMILIES = {
    2: (
        "deepseek_v3",
        "gemma2",
        "lfm2",
        "llama",
        "llama4_text",
        "qwen3_moe",
        "qwen3_next",
        "fused gpt_oss",
        "fused granite",
        "fused olmo2",
        "fused phi3",
        "fused qwen2_moe",
        "fused qwen3",
    ),
    4: ("llama", "fused phi3", "fused qwen2"),
}
"""By number of ranks. `python -m support.divided_models N FAMILY...` tries others, a minute for all of them."""


def run(*command: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, *command], env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == code, done.stderr[-3000:]
    return done.stdout


@cache
def served(count: int) -> str:
    """Return the output of the ranks. With two ranks, one of them draws another token at the end."""
    more, code = ((ALTERED,), ExitCode.INTERNAL) if count == 2 else ((), 0)
    return run("-m", "support.divided_models", str(count), *FAMILIES[count], *more, code=code)


@pytest.mark.parametrize("count", FAMILIES)
def test_divided_models_give_the_tokens_of_whole_ones(count: int) -> None:
    lines = [json.loads(line) for line in served(count).splitlines() if line.startswith("{")]
    answers = {found.pop("family"): found for found in lines}
    assert answers.keys() == set(FAMILIES[count])
    for family, found in answers.items():
        assert found["divided"] == found["whole"], family
        assert sum(map(len, found["whole"].values())) > 20, family
        assert found["fused"] == (family.startswith(FUSED) and selected_library() is not None), family
        num_heads = WITH_WHOLE_ATTENTION.get(family.removeprefix(FUSED), 4 // count)
        assert {*found["kv_heads"]} <= {num_heads, 2 * num_heads}, family


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gpt2", {}, "gpt2 models have no layers that can be divided; leave --tensor-parallel-size at 1"),
        ("llama", {}, "--tensor-parallel-size 4: its 6 attention heads cannot be divided by 4"),
        ("qwen3", {"num_attention_heads": 8}, "its 2 key-value heads cannot be divided by 4"),
        ("phi3", {"intermediate_size": 66}, "the 66 features inside model.layers.0.mlp cannot be divided by 4"),
        ("mixtral", {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 66}, "each expert of"),
    ],
)
def test_model_that_cannot_be_divided_is_refused(family: str, changes: dict[str, int], reason: str) -> None:
    with pytest.raises(ModelRefused, match=reason):
        division.divide(tiny_model(family, **changes), 0, 4)


def test_unknown_layer_is_refused() -> None:
    model = model_of("llama")
    model.model.layers[1].self_attn.register_module("extra", None)
    model.model.layers[1].adapter = nn.Linear(64, 64)
    with pytest.raises(ModelRefused, match=r"linear layer model\.layers\.1\.adapter is of no kind that can be divided"):
        division.divide(model, 0, 2)


def test_wrong_division_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of the other rank are missing, as they would be if a layer were divided in the wrong way."""

    monkeypatch.setattr(shard, "distributed", Alone(2))
    first = SimpleNamespace(rank=0, count=2, in_turn=contextlib.nullcontext)
    with pytest.raises(ModelRefused, match="llama models cannot be divided: their logits change"):
        division.load_divided(cast("Ranks", first), lambda: model_of("llama"), wrap_model)


def test_each_rank_has_its_own_part_of_the_machine() -> None:
    def places(device: str, share: str = "0/1") -> list[tuple[str, str]]:
        settings = WorkerSettings(model="m", socket_directory="d", device=device, machine_share=share)
        parts = [ranks.part_of(settings, rank, 2) for rank in range(2)]
        return [(part.device, part.machine_share) for part in parts]

    assert places("cuda", "1/2") == [("cuda", "2/4"), ("cuda", "3/4")]
    assert places("cuda:2", "1/2") == [("cuda:2", "1/2"), ("cuda:3", "1/2")]
    assert places("cpu") == [("cpu", "0/2"), ("cpu", "1/2")]
    cores = [{*part.removeprefix("cpu:").split(",")} for part, _ in places("cpu:0,1")]
    assert cores == [{"0"}, {"1"}]


_ONE_DIES = """
import os, signal, sys, time
from lineclear.worker.tensor_parallel.ranks import Kind, Ranks

ranks = Ranks.join(3, [sys.executable, "-c", sys.argv[1], *sys.argv[1:]])
if ranks.rank == 2:
    {death}
if ranks.rank:
    ranks.receive(Kind.CALL)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("death", "code"),
    [
        ("os._exit(78)", 78),
        ("os.kill(os.getpid(), signal.SIGABRT)", -signal.SIGABRT),
    ],
)
def test_worker_ends_as_its_rank_does(death: str, code: int) -> None:
    """So the scheduler tells a crash from a signal from outside."""
    script = _ONE_DIES.format(death=death)
    run("-c", script, script, code=code)


_ALL_END = """
import os, signal, subprocess, sys
from lineclear.process import parent_death
from lineclear.worker.tensor_parallel.ranks import Kind, Ranks

parent_death.die_with_parent()
ranks = Ranks.join(3, [sys.executable, "-c", sys.argv[1], *sys.argv[1:]])
print(os.getpid(), flush=True)
if ranks.rank:
    ranks.receive(Kind.CALL)
else:
    {end}
"""


@pytest.mark.parametrize(
    ("end", "hangs"),
    [("ranks.close()", False), *(("os.kill(os.getpid(), signal.SIGKILL)", hangs) for hangs in (False, True))],
)
def test_ranks_end_with_their_worker(end: str, hangs: bool) -> None:
    script = _ALL_END.format(end=f"sys.stdin.readline(); {end}")
    with subprocess.Popen(
        [sys.executable, "-c", script, script], env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        pids = [int(worker.stdout.readline()) for _ in range(3)]
        assert all(map(is_running, pids))
        if hangs:
            os.kill(next(pid for pid in pids if pid != worker.pid), signal.SIGSTOP)
        worker.stdin.close()
        worker.wait(PATIENCE_SECONDS)
        for pid in pids:
            eventually(lambda pid=pid: not is_running(pid), what=f"the end of {pid}")


def test_rank_0_goes_on_after_no_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks may wait for it in the middle of the step, so even a step without memory ends the worker."""

    def fail(self: ModelRunner, plan: StepPlan) -> None:
        raise StepFailed(StepErrorKind.OUT_OF_MEMORY, "no memory")

    monkeypatch.setattr(ModelRunner, "launch", fail)
    monkeypatch.setattr(ranks, "_LOSS_SECONDS", 0.0)
    runner = object.__new__(LeadingRunner)
    runner._ranks, runner._draws = Ranks(0, -1, ()), rank_runner._Draws()
    with pytest.raises(StepFailed) as failed:
        runner.launch(StepPlan(1, 1, ()))
    assert failed.value.kind is StepErrorKind.EXCEPTION


def test_rank_that_draws_another_token_ends_the_worker() -> None:
    """Its keys and values would not be those of the other ranks from then on."""
    assert re.search(r"rank_out_of_step .*the tokens of its first 3 steps are not those of rank 0.*rank=1", served(2))


class _Step:
    """A launched step of a rank, which is over when the test says so."""

    def __init__(self, *tokens: int) -> None:
        self.done, self._tokens = False, tokens

    def is_over(self) -> bool:
        return self.done

    def result(self) -> StepResult:
        assert self.done, "the rank would wait for its device"
        return StepResult(1, 1, self._tokens)


def test_comparison_waits_for_no_device() -> None:
    leading, following = rank_runner._Draws(), rank_runner._FollowingDraws()
    steps = [_Step(3), _Step(5), _Step(8)]
    following.steps.extend(cast("Any", steps))
    leading.add(StepResult(1, 1, (3,)))
    following.compare(leading.digest)
    leading.add(StepResult(1, 2, (6,)))
    following.compare(leading.digest)
    steps[0].done = True
    following.compare(leading.digest)
    following.compare(leading.digest)
    assert following.digest[0] == 1
    steps[1].done = steps[2].done = True
    with pytest.raises(OutOfStep, match="the tokens of its first 2 steps are not those of rank 0"):
        following.compare(leading.digest)
    assert len(following.steps) == 1, "rank 0 has no result of the last step yet"


def test_message_of_another_kind_or_call_is_found() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        leading, following = Ranks(0, -1, [ranks._Line(ours)]), Ranks(1, -1, [ranks._Line(theirs)])
        leading.send(Kind.CALL, b"a plan")
        assert following.receive(Kind.CALL) == b"a plan"
        leading.send(Kind.CALL, b"the next one")
        with pytest.raises(OutOfStep, match="waits for message number 1 of kind masks, and gets number 2 of kind call"):
            following.receive(Kind.MASKS)


class _Wire:
    """Ranks of which the others receive what rank 0 sends."""

    def __init__(self) -> None:
        self._messages = deque[tuple[Kind, bytes]]()

    def send(self, kind: Kind, message: bytes) -> None:
        self._messages.append((kind, message))

    def receive(self, kind: Kind) -> bytes:
        sent, message = self._messages.popleft()
        assert sent is kind
        return message


def test_drafts_that_are_on_the_device_reach_all_ranks() -> None:
    """Those of a draft model, which only rank 0 has."""
    pending, wire = PendingDrafts(2, lambda: [5, 7]), _Wire()
    found = list[Drafts]()
    for kind in (rank_runner.LeadingRunner, rank_runner.FollowingRunner):
        runner: Any = object.__new__(kind)
        runner._ranks, runner._batch = wire, SimpleNamespace(read_tokens=None)
        runner._drafter = SimpleNamespace(propose=lambda *_: {3: pending})
        found.append(runner._drafts(()))
    assert found == [{3: pending}, {3: [5, 7]}]


def test_adapter_that_rank_0_alone_cannot_load_is_on_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers of the others are read, so that they are not taken for those to the next adapter."""
    answers, unloaded, errors = iter([[b""], [b""]]), list[int](), [KeyError("lora_A")]

    def load(self: ModelRunner, *_: object) -> None:
        if errors:
            raise errors.pop()

    monkeypatch.setattr(ModelRunner, "load_adapter", load)
    monkeypatch.setattr(ModelRunner, "unload_adapter", lambda self, index: unloaded.append(index))
    runner = object.__new__(LeadingRunner)
    runner._ranks = cast("Ranks", SimpleNamespace(send=lambda *_: None, answers=lambda: next(answers)))
    runner._draws = rank_runner._Draws()
    with pytest.raises(AdapterFilesRefused, match="the worker cannot load it: KeyError"):
        runner.load_adapter(1, b"key", "path")
    assert unloaded == [1]
    runner.load_adapter(1, b"key", "path")
    assert next(answers, None) is None, "each load has read the answers to it"


def test_all_ranks_have_as_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three cores are one and two: the ranks would sum in another order, and might draw different tokens."""
    chosen = list[int]()
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(runner_factory, "load", lambda *_, **__: 1 / 0)
    other = SimpleNamespace(rank=1, count=2, connect=lambda device: None, least=lambda value: 1, agree=bool)
    settings = WorkerSettings(model="m", socket_directory="d", device="cpu", threads=2)
    with pytest.raises(ZeroDivisionError):
        runner_factory._make_part(settings, MachineShare(), cast("Ranks", other))
    assert chosen == [2, 1]


def test_size_is_refused_with_settings_that_it_excludes() -> None:
    for more, reason in (
        ({"quantization": "int8"}, "--quantization int8"),
        ({"device": "mps"}, "GPUs of NVIDIA"),
        (
            {"device": "cuda:MIG-4f1c"},
            "needs several GPUs, --device cuda:MIG-4f1c is one; give the number of the first",
        ),
    ):
        fixed: dict[str, Any] = {"model": "m", "socket_directory": "d", "tensor_parallel_size": 2}
        with pytest.raises(ValueError, match=reason):
            WorkerSettings(**fixed | more)
