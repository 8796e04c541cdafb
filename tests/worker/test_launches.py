"""What a decode step launches on a GPU, counted without one: operations, copies, and waits of the host.

Torch's operations are counted as they are dispatched, those of a replayed graph as one, and the Triton kernels by
stand-ins that compute nothing.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.families import tiny_model
from support.graphs import recorded
from support.triton_package import FOLDER
from torch.utils._python_dispatch import TorchDispatchMode

from lineclear.wire.messages import Decodes, Row, RowOutput, Sampling, SlotInit, StepPlan
from lineclear.worker import logits
from lineclear.worker.logits import Logits
from lineclear.worker.model.decode_graphs import DecodeGraphs
from lineclear.worker.model.loader import wrap_model
from lineclear.worker.model_runner import ModelRunner, RunnerOptions
from lineclear.worker.staging import Staging

FAMILIES = ("llama", "qwen3_moe", "gemma3_text", "gpt_oss")
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
WAITS = {"_local_scalar_dense", "nonzero", "item", "is_nonzero", "equal", "masked_select", "unique"}
READS_RESULT = "resolve_conj"
"""What `tolist` of an output begins with: on a GPU a copy to the host that nobody waits for in `launch`."""


class Launches(TorchDispatchMode):
    """Counts the operations that launch a kernel or a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()
        self.is_counting = True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if self.is_counting and name not in NO_LAUNCH:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


class Kernel:
    """Stands for a Triton kernel."""

    def __init__(self, name: str, launches: Launches) -> None:
        self._name, self._launches = name, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            assert min(grid) > 0
            if self._launches.is_counting:
                self._launches.counts[self._name] += 1

        return launch


@pytest.fixture(name="launches")
def make_launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    monkeypatch.syspath_prepend(FOLDER)
    triton_paged = importlib.import_module("lineclear.worker.attention.triton_paged")
    launches = Launches()
    for name in ("attend_kernel", "combine_kernel", "write_kernel"):
        monkeypatch.setattr(triton_paged, name, Kernel(name, launches))
    monkeypatch.setattr(logits, "is_on_host", lambda tensor: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # or the backend refuses a CPU
    return launches


def steps(runner: ModelRunner, batch_size: int, num_steps: int, sampling: Sampling) -> Iterator[StepPlan]:
    """Return the prompt steps of a batch, then `num_steps` decodes."""
    size = runner.capacity.block_size
    inits = tuple(SlotInit(slot, (5, 6, 7), 3, (), sampling) for slot in range(batch_size))
    rows = tuple(Row(slot, 0, 3, RowOutput.SAMPLE, (slot,)) for slot in range(batch_size))
    yield StepPlan(1, 1, rows, inits)
    assert num_steps < size - 3, "no step needs a new block"
    for step in range(num_steps):
        slots = tuple(range(batch_size))
        yield StepPlan(1, step + 2, decodes=Decodes(slots, (3 + step,) * batch_size))


def counted(
    family: str, batch_size: int, launches: Launches, sampling: Sampling, *, graphs: bool
) -> tuple[Counter[str], int]:
    """Return the launches of one decode step, and its copies to the device."""

    def capture(run: Callable[[], Logits]) -> tuple[Logits, Callable[[], None]]:
        found, replay = recorded(run)

        def uncounted() -> None:
            launches.is_counting = False
            replay()
            launches.is_counting = True
            launches.counts["replay"] += 1

        return found, uncounted

    staging = Staging(torch.device("cpu"), 1 << 20, is_direct=False)
    options = RunnerOptions(
        num_blocks=64, block_size=16, num_slots=batch_size, max_step_tokens=128, attention_backend="triton_paged"
    )
    made = DecodeGraphs([1, 32], capture) if graphs else None
    runner = ModelRunner(wrap_model(tiny_model(family)), options, staging=staging, graphs=made)
    runner.reset()
    with launches:
        for plan in steps(runner, batch_size, 3, sampling):
            launches.counts.clear()
            copies = staging.num_copies
            runner.launch(plan)
    return launches.counts, staging.num_copies - copies


@pytest.mark.parametrize("batch_size", [1, 32])
@pytest.mark.parametrize("family", FAMILIES)
def test_decode_step_is_one_replay_and_few_operations(family: str, batch_size: int, launches: Launches) -> None:
    counts, num_copies = counted(family, batch_size, launches, Sampling(), graphs=True)
    assert counts.pop("replay") == 1
    assert num_copies == 1
    assert sum(counts.values()) <= 6, counts
    assert not WAITS.intersection(counts)


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_of_an_eager_layer_is_two_kernels(family: str, launches: Launches) -> None:
    counts, num_copies = counted(family, 32, launches, Sampling(), graphs=False)
    num_layers = tiny_model(family).config.get_text_config().num_hidden_layers
    assert counts["attend_kernel"] == counts["write_kernel"] == num_layers
    assert counts["combine_kernel"] == 0, "a context of one split"
    assert num_copies == 1
    assert not WAITS.intersection(counts), counts


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.8, seed=1), Sampling(temperature=0.8, top_p=0.9, seed=1), Sampling(logprobs=2)]
)
def test_sampled_step_copies_once_and_waits_for_nothing(sampling: Sampling, launches: Launches) -> None:
    counts, num_copies = counted("llama", 32, launches, sampling, graphs=True)
    assert (counts["replay"], num_copies) == (1, 1)
    assert not WAITS.intersection(counts), counts
