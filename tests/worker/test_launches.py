"""What a decode step launches on a GPU, counted without one: operations, copies, and waits of the host.

Torch's operations are counted as they are dispatched, those of a replayed graph as one, and the Triton kernels by
stand-ins that compute nothing.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import save_adapter
from support.families import tiny_model
from support.graphs import recorded
from support.triton_package import FOLDER
from torch.utils._python_dispatch import TorchDispatchMode

from lineclear.model_files.adapter_files import read as read_adapter
from lineclear.wire.messages import Decodes, Row, RowOutput, Sampling, SlotInit, StepPlan
from lineclear.worker import draft_model, logits, truncation
from lineclear.worker.drafts.verification import Drafts, ReadTokens
from lineclear.worker.launched_step import StepTimer
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
WAITS = {"resolve_conj", "_local_scalar_dense", "nonzero", "item", "is_nonzero", "equal", "masked_select", "unique"}


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
    for module in (logits, truncation):
        monkeypatch.setattr(module, "is_on_host", lambda tensor: False)
    monkeypatch.setattr(StepTimer, "stop", lambda timer: False)  # or a launch on a CPU reads the result
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # or the backend refuses a CPU
    return launches


def steps(batch_size: int, num_steps: int, sampling: Sampling) -> Iterator[StepPlan]:
    """Return the prompt step of a batch, then `num_steps` decodes."""
    inits = tuple(SlotInit(slot, (5, 6, 7), 3, (), sampling) for slot in range(batch_size))
    rows = tuple(Row(slot, 0, 3, RowOutput.SAMPLE, (slot,)) for slot in range(batch_size))
    yield StepPlan(1, 1, rows, inits)
    for step in range(num_steps):
        slots = tuple(range(batch_size))
        yield StepPlan(1, step + 2, decodes=Decodes(slots, (3 + step,) * batch_size))


def runner_of(family: str, batch_size: int, launches: Launches, *, graphs: bool = True, **options: Any) -> ModelRunner:
    """Return a runner that takes its arrays in copies, as on a GPU."""

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
        num_blocks=2 * batch_size,
        num_slots=batch_size,
        max_step_tokens=4 * batch_size,
        attention_backend="triton_paged",
    )
    made = DecodeGraphs([1, 32, 256], capture) if graphs else None
    runner = ModelRunner(wrap_model(tiny_model(family)), sizes, staging=staging, graphs=made, **options)
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
    family: str, batch_size: int, launches: Launches, sampling: Sampling, *, graphs: bool
) -> tuple[Counter[str], int]:
    """Return the launches of one decode step, and its copies to the device."""
    runner = runner_of(family, batch_size, launches, graphs=graphs)
    return last_step(runner, steps(batch_size, 3, sampling), launches)


@pytest.mark.parametrize("batch_size", [1, 32, 256])
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


class LastTokens:
    """A drafter that reads what the host knows, as prompt lookup does."""

    def reset(self) -> None:
        pass

    def forget(self, slot: int) -> None:
        pass

    def propose(self, rows: Iterable[Row], read_tokens: ReadTokens) -> Drafts:
        return {row.slot: (read_tokens(row.slot, 0, row.start + 1) * 3)[: row.num_drafts] for row in rows}


def drafted_steps(batch_size: int, num_drafts: int) -> list[StepPlan]:
    """Return the prompt steps of a batch, a decode, and a step that verifies drafts."""
    rows = tuple(Row(slot, 4, 1, RowOutput.SAMPLE, (), num_drafts) for slot in range(batch_size))
    return [*steps(batch_size, 1, Sampling()), StepPlan(1, 3, rows)]


@pytest.mark.parametrize("family", FAMILIES)
def test_step_with_drafts_copies_once_and_waits_for_nothing(family: str, launches: Launches) -> None:
    runner = runner_of(family, 32, launches, drafter=LastTokens())
    counts, num_copies = last_step(runner, drafted_steps(32, 3), launches)
    assert num_copies == 1
    assert not WAITS.intersection(counts), counts


def test_draft_model_copies_once_a_pass_and_waits_for_nothing(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model, "choose", lambda name, *kind: "triton_paged")
    runner = runner_of("llama", 32, launches, draft_model=wrap_model(tiny_model("llama")))
    plans = drafted_steps(32, 3)
    last_step(runner, plans[:-1], launches)
    staging = vars(vars(runner)["_drafter"])["_staging"]
    counts, num_copies = last_step(runner, plans[-1:], launches)
    assert (num_copies, staging.num_copies) == (1, 3)
    assert not WAITS.intersection(counts), counts


def test_step_with_adapters_copies_once_and_waits_for_nothing(launches: Launches, tmp_path: Path) -> None:
    """Each adapter adds five operations to a layer that it adapts."""
    runner = runner_of("llama", 32, launches, graphs=False)
    for index in (1, 2):
        directory = save_adapter(tiny_model("llama"), tmp_path / str(index), seed=index)
        runner.load_adapter(index, read_adapter(directory, 8).key, str(directory))
    first, *rest = steps(32, 3, Sampling())
    plain, _ = last_step(runner, [first, *rest], launches)
    adapted = tuple(replace(init, adapter=init.slot % 3) for init in first.inits)
    counts, num_copies = last_step(runner, [replace(first, step=5, inits=adapted), *rest], launches)
    assert num_copies == 1
    num_modules = 7 * tiny_model("llama").config.num_hidden_layers
    assert counts.total() - plain.total() == 5 * 2 * num_modules
    assert not WAITS.intersection(counts), counts
