"""Decode steps as graphs: which steps are captured, and what happens where that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn
from unittest.mock import Mock

import pytest
import torch
from support.graphs import recorded
from torch import Tensor

from lineclear.worker.model import decode_graphs
from lineclear.worker.model.decode_graphs import DecodeGraphs
from lineclear.worker.sampling.logits import Logits, with_argmax


class Step:
    """A step whose logits are its input; `runs` counts how often it was computed."""

    def __init__(self, size: int) -> None:
        self.input = torch.arange(float(size * 4)).view(size, 4)
        self.runs = 0

    def run(self) -> Logits:
        self.runs += 1
        return with_argmax(self.input.clone())


def values(graphs: DecodeGraphs, step: Step, *, num_rows: int = 3, num_splits: int | None = 0) -> list[list[float]]:
    found: list[list[float]] = graphs.logits(num_rows, num_splits, [step.input], step.run).values.tolist()
    return found


def test_steps_take_the_next_larger_graph() -> None:
    graphs = DecodeGraphs([8, 1, 4, 4], recorded)
    assert [graphs.padded(rows) for rows in (1, 2, 4, 5, 8, 9)] == [1, 4, 4, 8, 8, 0]


def test_each_number_of_rows_and_splits_has_a_graph() -> None:
    captured: list[Tensor] = []

    def capture(run: Callable[[], Logits]) -> tuple[Logits, Callable[[], None]]:
        found = recorded(run)
        captured.append(found[0].values)
        return found

    graphs, steps = DecodeGraphs([4, 8], capture), [Step(4), Step(8)]
    for step in (*steps, *steps):
        for num_splits in (0, 2):
            assert values(graphs, step, num_splits=num_splits) == step.input[:3].tolist()
    assert len(captured) == 4
    assert graphs.num_replays == 8
    assert len({logits.data_ptr() for logits in captured}) == 1, "they share the memory of their logits"


def test_replay_reads_what_the_inputs_hold_now() -> None:
    graphs, step = DecodeGraphs([4], recorded), Step(4)
    values(graphs, step)
    step.input += 1
    assert values(graphs, step) == step.input[:3].tolist()


def test_moved_inputs_are_computed_anew() -> None:
    graphs, step = DecodeGraphs([4], recorded), Step(4)
    values(graphs, step)
    step.input = step.input + 1
    assert values(graphs, step) == step.input[:3].tolist()
    assert graphs.num_replays == 1


def test_kernels_that_no_graph_holds_run_each_time() -> None:
    graphs, step = DecodeGraphs([4], recorded), Step(4)
    assert values(graphs, step, num_splits=None) == step.input[:3].tolist()
    assert (step.runs, graphs.num_replays) == (1, 0)


def test_model_that_cannot_be_captured_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(run: Callable[[], Logits]) -> NoReturn:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(decode_graphs, "log", log := Mock())
    graphs, step = DecodeGraphs([4], capture), Step(4)
    assert values(graphs, step) == step.input[:3].tolist()
    assert graphs.padded(3) == 0, "later steps are not padded"
    ((name, fields),) = ((call.args, call.kwargs) for call in log.warning.call_args_list)
    assert name == ("cuda_graphs_not_used",)
    assert fields["problem"] == "operation not permitted when stream is capturing"


def test_capture_that_fails_on_another_rank_counts_on_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank would replay padded rows while the other computes those of the step."""
    monkeypatch.setattr(decode_graphs, "log", log := Mock())
    asked: list[bool] = []

    def agree(value: bool) -> bool:
        asked.append(value)
        return len(asked) < 2

    graphs, steps = DecodeGraphs([4, 8], recorded, agree), [Step(4), Step(8)]
    for step in (steps[0], *steps):
        assert values(graphs, step) == step.input[:3].tolist()
    assert asked == [True, True], "a replay asks nothing"
    assert graphs.padded(3) == 0
    assert log.warning.call_args.kwargs["problem"] == "another rank cannot capture it"


def test_rank_that_cannot_capture_asks_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graphs, "log", Mock())
    asked: list[bool] = []
    graphs, step = DecodeGraphs([4], Mock(side_effect=RuntimeError("no")), lambda x: not asked.append(x)), Step(4)
    assert values(graphs, step) == step.input[:3].tolist()
    assert asked == [False]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("CUDA error: out of memory")])
def test_memory_that_runs_out_in_a_capture_fails_the_step(error: Exception) -> None:
    """Later steps may be captured: the error of the driver is no property of the model."""

    def capture(run: Callable[[], Logits]) -> NoReturn:
        raise error

    graphs, step = DecodeGraphs([4], capture), Step(4)
    with pytest.raises(type(error)):
        values(graphs, step)
    assert graphs.padded(3) == 4
