"""The whole runner on tensors without values: reading a value on the path of a step is an error.

With a PyTorch built for CUDA (`make gpu-dry-run`) these are fake tensors on the device `cuda`, for which no GPU is
needed. With a PyTorch for CPUs they are tensors on `meta`, which takes every path that is not for CPUs.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support.card import Event
from support.divided_models import Alone
from support.families import tiny_model
from support.graphs import recorded
from support.launches import fused_on_cuda, steps, without_kernels
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from lineclear.wire.messages import (
    BlockCopy,
    Decodes,
    Pooling,
    PoolingKind,
    Row,
    RowOutput,
    Sampling,
    SlotInit,
    StepPlan,
)
from lineclear.worker.device.staging import Staging
from lineclear.worker.loop.runner_interface import StepFailed
from lineclear.worker.model.decode_graphs import DecodeGraphs
from lineclear.worker.model.division import divide
from lineclear.worker.model.loaded_model import LoadedModel
from lineclear.worker.model.loader import wrap_model
from lineclear.worker.runner import input_batch, launched_step
from lineclear.worker.runner.model_runner import ModelRunner, RunnerOptions
from lineclear.worker.tensor_parallel import shard

FAMILIES = ("llama", "qwen3_moe", "gemma3_text", "gpt_oss")
FUSED, RANK = "fused ", "rank of "
OF_LLAMA = (f"{FUSED}llama", f"{RANK}llama", f"{RANK}{FUSED}llama")
IS_CUDA = torch.backends.cuda.is_built()
DEVICE = torch.device("cuda" if IS_CUDA else "meta")
GREEDY = Sampling()
KINDS = {
    "greedy": GREEDY,
    "drawn": Sampling(temperature=0.8, seed=1),
    "top-p": Sampling(temperature=0.8, top_p=0.9, seed=1),
    "top-k": Sampling(temperature=0.8, top_k=5, min_p=0.1, seed=1),
    "logprobs": Sampling(logprobs=2),
    "penalties": Sampling(temperature=0.8, seed=1, repetition_penalty=1.2, frequency_penalty=0.5),
}


@dataclass
class DryMachine:
    """Makes runners whose tensors have no values."""

    mode: FakeTensorMode | None

    def active(self) -> AbstractContextManager[object]:
        return self.mode or contextlib.nullcontext()

    def without_values(self, loaded: LoadedModel) -> LoadedModel:
        """Move the model to the device: its modules stay the same."""
        with self.active():
            loaded.model.to(DEVICE)
            layers = tuple(
                layer if layer.sinks is None else replace(layer, sinks=layer.sinks.to(DEVICE))
                for layer in loaded.layers
            )
        return replace(loaded, device=DEVICE, layers=layers)

    def runner(self, family: str, *, graphs: bool, num_slots: int = 4) -> ModelRunner:
        options = RunnerOptions(
            num_blocks=64, block_size=16, num_slots=num_slots, max_step_tokens=128, attention_backend="triton_paged"
        )
        name = family.removeprefix(RANK).removeprefix(FUSED)
        model = tiny_model(name, dtype=torch.bfloat16)
        if family.startswith(RANK):
            divide(model, 0, 2)
        loaded = self.without_values(wrap_model(model))
        with self.active():
            loaded = fused_on_cuda(loaded) if FUSED in family else loaded
            return ModelRunner(loaded, options, graphs=DecodeGraphs([1, 4], recorded) if graphs else None)


def dry_staging(device: torch.device, num_bytes: int) -> Staging:
    """The staging of a card: places without values on the device, real buffers on the host."""
    with unset_fake_temporarily():
        made = Staging(torch.device("cpu"), num_bytes, is_direct=False)
    made.device, made._is_cuda = device, IS_CUDA
    made._on_device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return made


@pytest.fixture(name="machine")
def make_machine(monkeypatch: pytest.MonkeyPatch) -> DryMachine:
    without_kernels(monkeypatch)
    monkeypatch.setattr(input_batch, "Staging", dry_staging)
    monkeypatch.setattr(launched_step, "to_host", lambda value: value)  # copies that nobody waits for
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)  # needs a driver
    monkeypatch.setattr(shard, "distributed", Alone(2))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the stream")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))  # experts ask for it
    return DryMachine(FakeTensorMode(allow_non_fake_inputs=True) if IS_CUDA else None)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(
    ("family", "kind"), [*itertools.product(FAMILIES, sorted(KINDS)), *((family, "greedy") for family in OF_LLAMA)]
)
def test_steps_read_no_value(family: str, kind: str, graphs: bool, machine: DryMachine) -> None:
    runner = machine.runner(family, graphs=graphs)
    runner.reset()
    with machine.active():
        for plan in steps(runner, 4, 3, KINDS[kind]):
            inflight = runner.launch(plan)
            assert isinstance(inflight, launched_step.LaunchedStep)
            assert not inflight.is_complete, "the host would wait"
            assert inflight._outputs is not None
            assert inflight._outputs.tokens.device.type == DEVICE.type


def mixed_plans() -> Iterator[StepPlan]:
    """A prompt in chunks beside decodes, with copied and zeroed blocks, a score and a vector."""
    pooling = [None, None, None, Pooling(PoolingKind.MEAN)]
    init = [SlotInit(slot, tuple(range(3, 43)), 40, (), GREEDY, pooling=pooling[slot]) for slot in range(4)]
    yield StepPlan(1, 1, (Row(0, 0, 40, RowOutput.SAMPLE, (0, 1, 2)),), (init[0],))
    chunk = Row(1, 0, 20, RowOutput.NONE, (3, 4))
    yield StepPlan(1, 2, (chunk,), (init[1],), decodes=Decodes((0,), (40,)), zero_blocks=(9,))
    rest, score = Row(1, 20, 20, RowOutput.SAMPLE, (5,)), Row(2, 7, 13, RowOutput.SCORE, (6, 7))
    pool = Row(3, 0, 40, RowOutput.POOL, (8, 9, 10))
    copy = (BlockCopy(0, 6, 7),)
    yield StepPlan(1, 3, (rest, score, pool), (init[2], init[3]), decodes=Decodes((0,), (41,)), copy_blocks=copy)


@pytest.mark.parametrize("family", [*FAMILIES, *OF_LLAMA])
def test_mixed_steps_read_no_value(family: str, machine: DryMachine) -> None:
    runner = machine.runner(family, graphs=True)
    runner.reset()
    with machine.active():
        for plan in mixed_plans():
            runner.launch(plan)


@pytest.mark.parametrize(
    "read",
    [
        lambda tokens: tokens[0].item(),
        lambda tokens: tokens.tolist(),
        lambda tokens: tokens.nonzero(),
        lambda x: bool(x[0]),
    ],
    ids=["item", "tolist", "nonzero", "bool"],
)
def test_read_value_fails_the_step(
    read: Callable[[Tensor], object], machine: DryMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = machine.runner("llama", graphs=False)
    runner.reset()
    write = runner._batch.write_sampled

    def reading(packed: Any, tokens: Tensor, host_tokens: list[int] | None) -> None:
        read(tokens)
        write(packed, tokens, host_tokens)

    monkeypatch.setattr(runner._batch, "write_sampled", reading)
    (plan, *_) = steps(runner, 4, 1, GREEDY)
    with machine.active(), pytest.raises(StepFailed):
        runner.launch(plan)
