"""The device memory of the largest step, measured before the KV pools get the rest (vLLM's `profile_run`).

The pool of the measured runner has one block, which stands for every block of every row. So a row may have the longest
context that the settings allow, and the numbers that are computed mean nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from lineclear.process.settings_base import ConfigurationError
from lineclear.wire.messages import Row, RowOutput, Sampling, SlotInit, StateCopy, StepErrorKind, StepPlan
from lineclear.worker.device.memory_budget import PeakMemory
from lineclear.worker.kv_cache.pool_memory import LESS_PER_STEP, RunnerOptions, states_bytes
from lineclear.worker.kv_cache.slot_table import Capacity
from lineclear.worker.loop.runner_interface import StepFailed
from lineclear.worker.model.decode_graphs import DecodeGraphs
from lineclear.worker.model.loaded_model import LoadedModel

from .model_runner import ModelRunner
from .self_test import SelfTestFailed

_SAMPLING = Sampling(
    temperature=1.0, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1, logprobs=20
)
"""Of all rows: each kind of work that needs memory for whole rows of logits."""


def largest_step_bytes(
    loaded: LoadedModel,
    options: RunnerOptions,
    graphs: DecodeGraphs | None = None,
    peak_memory: Callable[[torch.device], PeakMemory] = PeakMemory,
) -> int:
    """Return the bytes of the runner's tables, largest steps and largest graph. Raises ConfigurationError."""
    peak = peak_memory(loaded.device)
    try:
        smallest = replace(options, num_blocks=1, swap_memory_bytes=0, num_state_snapshots=1)
        runner = ModelRunner(loaded, smallest, graphs=graphs)
        run_largest_steps(runner, 0 if graphs is None else graphs.max_batch_size, pretends_states=True)
    except torch.OutOfMemoryError:
        raise _too_little() from None
    num_bytes = max(0, peak.bytes() - states_bytes(loaded, smallest))
    del runner
    gc.collect()  # its memory is free when the pools are made
    return num_bytes


def run_largest_steps(runner: ModelRunner, max_graph_rows: int, *, pretends_states: bool = False) -> None:
    """Run a step with the most tokens, one with the most rows, and one with the most rows of a captured graph.

    Recurrent states are taken for those behind any position if `pretends_states`; else such rows start at position 0.
    Resets the runner. Raises ConfigurationError if the memory does not suffice, and SelfTestFailed for another failure.
    """
    runner.reset()
    try:
        for plan in _largest_plans(runner.capacity, max_graph_rows, pretends_states):
            runner.snapshots.update((copy.source, plan.chunks[0].start) for copy in plan.copy_states)
            runner.launch(plan).result()
    except StepFailed as error:
        if error.kind is StepErrorKind.OUT_OF_MEMORY:
            raise _too_little() from None
        raise SelfTestFailed(f"the largest step failed: {error.summary}") from error
    runner.reset()


def _too_little() -> ConfigurationError:
    return ConfigurationError(
        f"the device has too little memory for the largest step; {LESS_PER_STEP}, or leave it more by --num-blocks or"
        " --kv-cache-memory-fraction"
    )


def _largest_plans(capacity: Capacity, max_graph_rows: int, pretends_states: bool) -> Iterator[StepPlan]:
    num_rows = min(capacity.num_slots, capacity.max_step_tokens)
    num_graph_rows = min(num_rows, max_graph_rows)
    sizes = (num_rows, capacity.max_step_tokens), (num_rows, num_rows), (num_graph_rows, num_graph_rows)
    for step, size in enumerate(sizes, 1):
        if size[0]:
            yield _plan(step, *size, capacity, pretends_states)


def _plan(step: int, num_rows: int, num_tokens: int, capacity: Capacity, pretends_states: bool) -> StepPlan:
    """Return a plan that samples in all rows. The first row has most of the tokens, at the end of the context."""
    size, chunks, inits = capacity.block_size, list[Row](), list[SlotInit]()
    can_continue = pretends_states or not capacity.has_recurrent_state
    for slot in range(num_rows):
        count = min(num_tokens - (num_rows - 1 - slot), capacity.max_model_len)
        num_tokens -= count
        num_cached = 0 if slot or not can_continue else (capacity.max_model_len - count) // size
        start = num_cached * size
        inits.append(SlotInit(slot, (0,) * (start + count), start + count, (0,) * num_cached, _SAMPLING))
        chunks.append(Row(slot, start, count, RowOutput.SAMPLE, (0,) * -(-count // size)))
    copies = (StateCopy(capacity.num_slots, 0),) if capacity.has_recurrent_state and chunks[0].start else ()
    return StepPlan(1, step, tuple(chunks), tuple(inits), copy_states=copies)
