"""The memory of the bookkeeping of KV blocks, counted."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import replace

from core.harness import make_request
from support.toy_runner import ToyRunner

from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.wire.messages import StepResult

_NUM_BLOCKS, _BLOCK_SIZE, _PER_PROMPT = 4096, 16, 128


def test_cached_block_of_16_tokens_takes_640_bytes() -> None:
    """docs/performance.md states the bytes."""
    core = Scheduler(CoreLimits(pipeline_depth=1))
    hello = replace(ToyRunner(num_blocks=_NUM_BLOCKS, block_size=_BLOCK_SIZE).hello(1), vocab_size=1 << 17)
    tracemalloc.start()
    try:
        core.worker_joined(replace(hello, max_model_len=4096), 0.0)
        for number in range(2 * _NUM_BLOCKS // _PER_PROMPT):
            size = _PER_PROMPT * _BLOCK_SIZE
            core.submit(make_request(f"r{number}", range(1000 + number * size, 1001 + (number + 1) * size), 1), 0.0)
            while core.num_live:
                plan = core.plan(1, 0.0)
                assert plan is not None
                core.apply(StepResult(1, plan.step, (5,) * plan.num_samples, step_seconds=0.01), 0.0)
        core.drain_events()
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert core.snapshot().blocks_cached >= _NUM_BLOCKS - 1
    assert taken < 640 * _NUM_BLOCKS
