"""What a decode step launches on a GPU, counted without one: operations, copies, and waits of the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from support.adapters import save_adapter
from support.divided_models import Alone
from support.families import tiny_model
from support.launches import WAITS, Launches, counted, fused_on_cuda, last_step, runner_of, steps, without_kernels

from lineclear.model_files.adapter_files import read as read_adapter
from lineclear.wire.messages import Row, RowOutput, Sampling, StepPlan
from lineclear.worker.drafts.verification import Drafts, ReadTokens
from lineclear.worker.model.division import divide
from lineclear.worker.model.loaded_model import LoadedModel
from lineclear.worker.model.loader import wrap_model
from lineclear.worker.runner import draft_model
from lineclear.worker.runner.model_runner import ModelRunner
from lineclear.worker.tensor_parallel import shard

FAMILIES = ("llama", "qwen3_moe", "gemma3_text", "gpt_oss")


@pytest.fixture(name="launches")
def make_launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return without_kernels(monkeypatch)


@pytest.mark.parametrize("batch_size", [1, 32, 256])
@pytest.mark.parametrize("family", FAMILIES)
def test_decode_step_is_one_replay_and_few_operations(family: str, batch_size: int, launches: Launches) -> None:
    counts, num_copies = counted(wrap_model(tiny_model(family)), batch_size, launches, Sampling(), graphs=True)
    assert counts.pop("replay") == 1
    assert num_copies == 1
    assert sum(counts.values()) <= 6, counts
    assert not WAITS.intersection(counts)


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_of_an_eager_layer_is_two_kernels(family: str, launches: Launches) -> None:
    counts, num_copies = counted(wrap_model(tiny_model(family)), 32, launches, Sampling(), graphs=False)
    num_layers = tiny_model(family).config.get_text_config().num_hidden_layers
    assert counts["attend_kernel"] == counts["write_kernel"] == num_layers
    assert counts["combine_kernel"] == 0, "a context of one split"
    assert num_copies == 1
    assert not WAITS.intersection(counts), counts


@pytest.mark.parametrize("family", ["llama", "granite", "olmo2", "phi3", "qwen3"])
def test_fused_layer_is_ten_launches(family: str, launches: Launches) -> None:
    """Four products, two norms with the sum before them, heads, write of keys and values, attention, gate."""

    def launched(num_layers: int, make: Callable[[LoadedModel], LoadedModel]) -> int:
        changes = {"num_hidden_layers": num_layers, "layer_types": ["full_attention"] * num_layers}
        loaded = make(wrap_model(tiny_model(family, **changes)))
        return counted(loaded, 32, launches, Sampling(), graphs=False)[0].total()

    assert launched(3, lambda loaded: loaded) - launched(2, lambda loaded: loaded) >= 39, "of transformers' modules"
    assert launched(3, fused_on_cuda) - launched(2, fused_on_cuda) == 10


@pytest.mark.parametrize("batch_size", [1, 256])
def test_fused_step_is_one_replay_and_few_operations(batch_size: int, launches: Launches) -> None:
    loaded = fused_on_cuda(wrap_model(tiny_model("llama")))
    counts, num_copies = counted(loaded, batch_size, launches, Sampling(), graphs=True)
    assert counts.pop("replay") == num_copies == 1
    assert counts.total() <= 6, counts
    assert not WAITS.intersection(counts)


@pytest.mark.parametrize("batch_size", [1, 32])
@pytest.mark.parametrize(
    ("make", "num_others"), [(fused_on_cuda, 10), (lambda loaded: loaded, 39)], ids=["fused", "modules"]
)
def test_rank_adds_twice_a_layer_and_gathers_once_a_step(
    make: Callable[[LoadedModel], LoadedModel],
    num_others: int,
    batch_size: int,
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside what one process launches. The collectives are in the graph."""
    monkeypatch.setattr(shard, "distributed", Alone(2, launches.note))

    def launched(num_layers: int, *, graphs: bool) -> Counter[str]:
        changes = {"num_hidden_layers": num_layers, "layer_types": ["full_attention"] * num_layers}
        model = tiny_model("llama", **changes)
        divide(model, 0, 2)
        counts, num_copies = counted(make(wrap_model(model)), batch_size, launches, Sampling(), graphs=graphs)
        assert num_copies == 1
        assert not WAITS.intersection(counts)
        return counts

    eager = launched(3, graphs=False)
    assert (eager["all_reduce"], eager["all_gather"]) == (3 * 2, 1)
    assert (eager - launched(2, graphs=False)).total() == num_others + 2
    graph = launched(3, graphs=True)
    assert graph.pop("replay") == 1
    assert graph.total() <= 6, graph
    assert graph["all_reduce"] == graph["all_gather"] == 0


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.8, seed=1), Sampling(temperature=0.8, top_p=0.9, seed=1), Sampling(logprobs=2)]
)
def test_sampled_step_copies_once_and_waits_for_nothing(sampling: Sampling, launches: Launches) -> None:
    counts, num_copies = counted(wrap_model(tiny_model("llama")), 32, launches, sampling, graphs=True)
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


def drafted_steps(runner: ModelRunner, batch_size: int, num_drafts: int) -> list[StepPlan]:
    """Return the prompt steps of a batch, a decode, and a step that verifies drafts."""
    rows = tuple(Row(slot, 4, 1, RowOutput.SAMPLE, (), num_drafts) for slot in range(batch_size))
    return [*steps(runner, batch_size, 1, Sampling()), StepPlan(1, 3, rows)]


@pytest.mark.parametrize("family", FAMILIES)
def test_step_with_drafts_copies_once_and_waits_for_nothing(family: str, launches: Launches) -> None:
    runner = runner_of(wrap_model(tiny_model(family)), 32, launches, drafter=LastTokens())
    counts, num_copies = last_step(runner, drafted_steps(runner, 32, 3), launches)
    assert num_copies == 1
    assert not WAITS.intersection(counts), counts


def test_draft_model_copies_once_a_pass_and_waits_for_nothing(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model, "choose", lambda name, *kind: "triton_paged")
    runner = runner_of(wrap_model(tiny_model("llama")), 32, launches, draft_model=wrap_model(tiny_model("llama")))
    plans = drafted_steps(runner, 32, 3)
    last_step(runner, plans[:-1], launches)
    staging = vars(vars(runner)["_drafter"])["_staging"]
    counts, num_copies = last_step(runner, plans[-1:], launches)
    assert (num_copies, staging.num_copies) == (1, 3)
    assert not WAITS.intersection(counts), counts


@pytest.mark.parametrize("make", [lambda loaded: loaded, fused_on_cuda], ids=["modules", "fused"])
def test_step_with_adapters_copies_once_and_waits_for_nothing(
    make: Callable[[LoadedModel], LoadedModel], launches: Launches, tmp_path: Path
) -> None:
    """Each adapter adds five operations to a layer that it adapts."""
    runner = runner_of(make(wrap_model(tiny_model("llama"))), 32, launches, graphs=False)
    for index in (1, 2):
        directory = save_adapter(tiny_model("llama"), tmp_path / str(index), seed=index)
        runner.load_adapter(index, read_adapter(directory, 8).key, str(directory))
    first, *rest = steps(runner, 32, 3, Sampling())
    plain, _ = last_step(runner, [first, *rest], launches)
    adapted = tuple(replace(init, adapter=init.slot % 3) for init in first.inits)
    counts, num_copies = last_step(runner, [replace(first, step=5, inits=adapted), *rest], launches)
    assert num_copies == 1
    num_modules = 7 * tiny_model("llama").config.num_hidden_layers
    assert counts.total() - plain.total() == 5 * 2 * num_modules
    assert not WAITS.intersection(counts), counts
