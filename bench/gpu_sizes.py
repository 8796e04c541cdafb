"""Sizes of `bench.gpu` on a card and in its rehearsal on a CPU. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.workloads import Workload, make

FAMILIES = ("llama", "gemma3_text", "gpt_oss")
"""Of `bench.models`, whose tokens are compared."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of all parts."""

    copy_bytes: int
    matmul_size: int
    step_shape: str
    """Of `bench.models`, for the steps; made in memory."""
    context: int
    """Positions of each sequence before the first decode."""
    batches: tuple[int, ...]
    eager_batches: tuple[int, ...]
    steps: int
    served_shape: str
    """Of the served model, made as a directory."""
    requests: int
    slots: int
    prompt_lens: tuple[int, ...]
    """Of the compared answers."""
    answer_len: int
    longest_answer: int
    """Of the served requests."""
    streams: int
    """While the memory runs out and the worker is killed."""

    def workload(self, kind: str, seed: int, rate: float = 0.0) -> Workload:
        """Return the requests of a workload."""
        made = make(kind, self.requests, seed=seed, rate=rate)
        jobs = (replace(job, max_tokens=min(job.max_tokens, self.longest_answer)) for job in made.jobs)
        return replace(made, jobs=tuple(jobs))


CARD = Sizes(
    copy_bytes=4 << 30,
    matmul_size=8192,
    step_shape="llama-8b-shape",
    context=1024,
    batches=(1, 8, 32, 128, 256),
    eager_batches=(1, 32),
    steps=30,
    served_shape="llama-1b-shape",
    requests=256,
    slots=256,
    prompt_lens=(5, 1, 16, 33, 70, 9, 128, 24),
    answer_len=24,
    longest_answer=256,
    streams=16,
)
REHEARSAL = Sizes(
    copy_bytes=8 << 20,
    matmul_size=256,
    step_shape="llama-7m-shape",
    context=24,
    batches=(1, 4),
    eager_batches=(1,),
    steps=4,
    served_shape="llama-7m-shape",
    requests=4,
    slots=4,
    prompt_lens=(5, 33),
    answer_len=5,
    longest_answer=8,
    streams=4,
)


def sizes_of(device: str) -> Sizes:
    """Return the sizes for a device of torch."""
    return REHEARSAL if device == "cpu" else CARD
