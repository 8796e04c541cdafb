"""Counts what a step launches on a GPU, without one: operations, copies, and waits of the host.

Torch's operations are counted as they are dispatched, and the Triton kernels by stand-ins that compute nothing.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lineclear.wire.messages import Decodes, Row, RowOutput, Sampling, SlotInit, StepPlan
from lineclear.worker.decoder.decoder_layers import describe
from lineclear.worker.device.staging import Staging
from lineclear.worker.model.decode_graphs import DecodeGraphs
from lineclear.worker.model.loaded_model import LoadedModel
from lineclear.worker.runner import launched_step
from lineclear.worker.runner.launched_step import StepTimer
from lineclear.worker.runner.model_runner import ModelRunner, RunnerOptions
from lineclear.worker.sampling import logits, truncation
from lineclear.worker.sampling.logits import Logits

from .graphs import recorded
from .triton_package import FOLDER

NO_LAUNCH = {
    *(
        "view",
        "_unsafe_view",
        "slice",
        "select",
        "unsqueeze",
        "squeeze",
        "transpose",
        "expand",
        "permute",
        "t",
        "unbind",
    ),
    *("detach", "alias", "split", "split_with_sizes", "as_strided", "reshape", "_reshape_alias", "chunk", "narrow"),
    *("empty", "empty_like", "empty_strided", "new_empty", "resolve_neg", "lift_fresh"),
}
WAITS = {"resolve_conj", "_local_scalar_dense", "nonzero", "item", "is_nonzero", "equal", "masked_select", "unique"}
"""What a wait of the host begins with; `tolist` with the first."""


class Launches(TorchDispatchMode):
    """Counts the operations that launch a kernel or a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()
        self.is_counting = True

    def note(self, name: str) -> None:
        """Count an operation that is not dispatched."""
        self.counts[name] += self.is_counting

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if self.is_counting and name not in NO_LAUNCH:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


_KERNELS = {
    "lineclear.worker.attention.triton_paged": ("attend_kernel", "combine_kernel", "write_kernel"),
    "lineclear.worker.cuda.layer_kernels": ("add_norm_kernel", "rotate_kernel", "activate_kernel"),
    "lineclear.worker.sampling.triton_threshold": ("largest_reaching_kernel",),
}


class Kernel:
    """Stands for a Triton kernel."""

    def __init__(self, name: str, launches: Launches) -> None:
        self._name, self._launches = name, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            assert min(grid) > 0
            self._launches.note(self._name)

        return launch


def copied(value: Any) -> Any:
    """Copy the tensors in a value, as `to_host` does on a GPU."""
    if isinstance(value, tuple):
        parts = [copied(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value.clone() if isinstance(value, torch.Tensor) else value


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Replace the Triton kernels, so that the backend of a GPU runs on any device; return what counts launches."""
    monkeypatch.syspath_prepend(FOLDER)
    launches = Launches()
    for module_name, names in _KERNELS.items():
        for name in names:
            monkeypatch.setattr(importlib.import_module(module_name), name, Kernel(name, launches))
    for module in (logits, truncation):
        monkeypatch.setattr(module, "is_on_host", lambda tensor: False)
    # Or a launch on a CPU reads the result instead of copying it.
    monkeypatch.setattr(StepTimer, "stop", lambda timer: False)
    monkeypatch.setattr(launched_step, "to_host", copied)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # or the backend refuses a CPU
    return launches


def fused_on_cuda(loaded: LoadedModel) -> LoadedModel:
    """Return the model with the fused forward pass of a GPU. Its logits are not compared: kernels compute nothing."""
    fused_decoder = importlib.import_module("lineclear.worker.cuda.fused_decoder")
    spec = loaded.layers[0]
    described = describe(loaded.model, spec.num_heads, spec.num_kv_heads, spec.head_dim)
    assert described is not None
    with torch.inference_mode():
        return replace(loaded, decoder=fused_decoder.CudaFusedDecoder(described, loaded.max_model_len))


def steps(
    runner: ModelRunner, batch_size: int, num_steps: int, sampling: Sampling, prompt_len: int = 3
) -> Iterator[StepPlan]:
    """Return the prompt step of a batch, then `num_steps` decodes, none of which needs a new block."""
    num_blocks = -(-(prompt_len + num_steps) // runner.capacity.block_size)
    prompt = tuple(5 + place % 3 for place in range(prompt_len))
    inits = tuple(SlotInit(slot, prompt, prompt_len, (), sampling) for slot in range(batch_size))
    blocks = [tuple(range(slot * num_blocks, (slot + 1) * num_blocks)) for slot in range(batch_size)]
    rows = tuple(Row(slot, 0, prompt_len, RowOutput.SAMPLE, blocks[slot]) for slot in range(batch_size))
    yield StepPlan(1, 1, rows, inits)
    for step in range(num_steps):
        slots = tuple(range(batch_size))
        yield StepPlan(1, step + 2, decodes=Decodes(slots, (prompt_len + step,) * batch_size))


def runner_of(
    loaded: LoadedModel,
    batch_size: int,
    launches: Launches,
    *,
    graphs: bool = True,
    prompt_len: int = 3,
    **options: Any,
) -> ModelRunner:
    """Return a runner that takes its arrays in copies, as on a GPU. A replay of a graph counts as one launch."""

    def capture(run: Callable[[], Logits]) -> tuple[Logits, Callable[[], None]]:
        found, replay = recorded(run)

        def uncounted() -> None:
            launches.is_counting = False
            replay()
            launches.is_counting = True
            launches.counts["replay"] += 1

        return found, uncounted

    staging = Staging(torch.device("cpu"), 1 << 20, is_direct=False)
    sizes = RunnerOptions(
        num_blocks=max(64, batch_size),
        block_size=16,
        num_slots=batch_size,
        max_step_tokens=max(128, prompt_len * batch_size),
        attention_backend="triton_paged",
    )
    made = DecodeGraphs([1, 32, 256], capture) if graphs else None
    runner = ModelRunner(loaded, sizes, staging=staging, graphs=made, **options)
    runner.reset()
    return runner


def last_step(runner: ModelRunner, plans: Iterable[StepPlan], launches: Launches) -> tuple[Counter[str], int]:
    """Return the launches of the last plan, and its copies to the device."""
    staging, copies = vars(runner)["_batch"].staging, 0
    with launches:
        for plan in plans:
            launches.counts.clear()
            copies = staging.num_copies
            inflight = runner.launch(plan)
            launches.is_counting = False
            inflight.result()
            launches.is_counting = True
    return Counter(launches.counts), staging.num_copies - copies


def counted(
    loaded: LoadedModel,
    batch_size: int,
    launches: Launches,
    sampling: Sampling,
    *,
    graphs: bool,
    prompt_len: int = 3,
) -> tuple[Counter[str], int]:
    """Return the launches of one decode step, and its copies to the device."""
    runner = runner_of(loaded, batch_size, launches, graphs=graphs, prompt_len=prompt_len)
    return last_step(runner, steps(runner, batch_size, 3, sampling, prompt_len), launches)
