"""The comparison with static batches: equal settings, ratios to continuous batching, equal answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench import static_waves
from bench.contenders import Task
from bench.measure import Result, Run
from bench.workloads import Job, Workload, make

WORK = make("w1", 2)


def result(name: str, makespan: float, answers: tuple[tuple[int, ...], ...] = ((5, 6), (7,))) -> Result:
    run = Run(WORK)
    for job, ids in zip(WORK.jobs, answers, strict=True):
        for token_id in ids:
            run.answer(job.id, [token_id])
    return replace(run.end(name, "model", {}, makespan_seconds=makespan), disturbed=False)


def test_contenders_have_equal_slots_threads_and_types(tmp_path: Path) -> None:
    task = Task(tmp_path, tmp_path / "model", tmp_path / "w.json", "w1", 0, tmp_path / "out")
    chosen = static_waves.contenders(8, threads=2)
    for contender in chosen:
        command = contender.command(task)
        assert command[command.index("--dtype") + 1] == "float32"
        assert command[command.index("--threads") + 1] == "2"
        slots = command.index("--waves" if "waves" in contender.name else "--max-batch-size")
        assert command[slots + 1] == "8"


def test_ratios_are_to_the_first_contender() -> None:
    results = [result("a", 2.0), result("b", 3.0), result("a", 4.0), result("b", 8.0)]
    assert static_waves.ratios(results) == ["b: 1.83 times the makespan (turns: 1.50, 2.00)"]


@pytest.mark.parametrize(
    ("others", "equal"),
    [(((5, 6), (7,)), True), (((5, 6), (8,)), False), (((5,), (7,)), False), (((7,), (5, 6)), False)],
)
def test_answers_are_compared_by_token(others: tuple[tuple[int, ...], ...], equal: bool) -> None:
    assert static_waves.answers_are_equal([result("a", 1.0), result("b", 1.0, others)]) is equal


def test_useful_share_counts_to_the_longest_of_each_batch() -> None:
    jobs = tuple(Job(str(n), (1,), tokens) for n, tokens in enumerate((2, 4, 1, 3)))
    assert static_waves.useful_share(Workload("w1", 0, 10, 0.0, jobs), 2) == 10 / (2 * 4 + 2 * 3)


def test_full_batches_only(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        static_waves.main(["--model", str(tmp_path), "--count", "9"])
