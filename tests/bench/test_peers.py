"""The drivers of peers that run in the driver's process, with engines that answer at once: who is asked for what, and
whose tokens are counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from bench.measure import Run
from bench.peer_ctranslate2 import generate
from bench.peer_openvino import feed
from bench.workloads import Job, Workload

JOBS = tuple(Job(f"r{n}", (n, 7), tokens, n / 100) for n, tokens in enumerate((2, 5, 1)))


def run_of(*jobs: Job) -> Run:
    return Run(Workload("w1", 0, 10, 0.0, jobs))


@dataclass
class Handle:
    """A request of OpenVINO GenAI: one token in each step."""

    missing: int
    unread: list[int] = field(default_factory=list)

    def can_read(self) -> bool:
        return bool(self.unread)

    def read(self) -> dict[int, Any]:
        return {0: SimpleNamespace(generated_ids=[self.unread.pop(0)])}


class Pipeline:
    def __init__(self) -> None:
        self.added: dict[str, Handle] = {}
        self.rows: list[int] = []

    def add(self, job: Job) -> Handle:
        return self.added.setdefault(job.id, Handle(job.max_tokens))

    def has_non_finished_requests(self) -> bool:
        return any(handle.missing for handle in self.added.values())

    def step(self) -> None:
        running = [handle for handle in self.added.values() if handle.missing]
        self.rows.append(len(running))
        for handle in running:
            handle.missing -= 1
            handle.unread.append(handle.missing)


@pytest.mark.parametrize(("concurrency", "rows"), [(0, [3, 2, 1, 1, 1]), (2, [2, 2, 2, 1, 1]), (1, [1] * 8)])
def test_openvino_gets_all_jobs_and_no_more_at_once(concurrency: int, rows: list[int]) -> None:
    pipeline, run = Pipeline(), run_of(*(Job(job.id, job.prompt, job.max_tokens) for job in JOBS))
    feed(pipeline, pipeline.add, run, concurrency)
    assert pipeline.rows == rows
    assert {job_id: len(times) for job_id, times in run.times.items()} == {"r0": 2, "r1": 5, "r2": 1}
    assert run._answers == {"r0": [1, 0], "r1": [4, 3, 2, 1, 0], "r2": [0]}


def test_openvino_gets_jobs_when_they_are_due() -> None:
    pipeline, run = Pipeline(), run_of(*JOBS)
    feed(pipeline, pipeline.add, run, 0)
    assert all(run.times[job.id][0] >= job.arrival_seconds for job in JOBS)


class Generator:
    """CTranslate2: batches of `max_batch_size`, and rows that the callback ends."""

    def generate_batch(
        self,
        prompts: list[list[str]],
        *,
        max_batch_size: int,
        max_length: int,
        min_length: int,
        include_prompt_in_result: bool,
        callback: Callable[[Any], bool],
    ) -> None:
        self.prompts, self.batches = prompts, []
        assert min_length == max_length
        assert not include_prompt_in_result
        for begin in range(0, len(prompts), max_batch_size):
            rows = list(range(begin, min(begin + max_batch_size, len(prompts))))
            self.batches.append(len(rows))
            for token in range(max_length):
                rows = [row for row in rows if not callback(SimpleNamespace(batch_id=row, token_id=token))]


def test_rows_of_ctranslate2_end_with_their_answers() -> None:
    generator, run = Generator(), run_of(*JOBS)
    generate(generator, [f"<{n}>" for n in range(8)], run, 2)
    assert generator.prompts == [["<0>", "<7>"], ["<1>", "<7>"], ["<2>", "<7>"]]
    assert generator.batches == [2, 1]
    assert run._answers == {"r0": [0, 1], "r1": [0, 1, 2, 3, 4], "r2": [0]}
