"""8-bit weights, keys and values end to end: answers are equal in any batching, chunking and preemption."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.families import WIDE, tiny_model
from support.inprocess import InProcess
from support.kernel_variants import needs_kernels

from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.sequence import Request
from lineclear.wire.messages import Sampling
from lineclear.worker.decoder.decoder_layers import FAMILIES
from lineclear.worker.model.loaded_model import LoadedModel
from lineclear.worker.model.loader import to_quantized, wrap_model
from lineclear.worker.runner.model_runner import ModelRunner, RunnerOptions

pytestmark = needs_kernels
PROMPT_LENS = (5, 1, 17, 33, 40, 24)
MAX_TOKENS = 20
LIMITS = CoreLimits(max_batch_size=16, target_batch_tokens=128, prefix_cache=False)


def requests() -> list[Request]:
    torch.manual_seed(5)
    prompts = [tuple(torch.randint(3, 200, (n,)).tolist()) for n in PROMPT_LENS]
    return [Request(str(i), prompt, Sampling(logprobs=0), MAX_TOKENS) for i, prompt in enumerate(prompts)]


def server(
    loaded: LoadedModel,
    limits: CoreLimits = LIMITS,
    num_blocks: int = 64,
    kv_dtype: torch.dtype | None = None,
    swap_memory_bytes: int = 0,
) -> InProcess:
    options = RunnerOptions(num_blocks=num_blocks, num_slots=16, max_step_tokens=512, kv_dtype=kv_dtype)
    runner = ModelRunner(loaded, replace(options, swap_memory_bytes=swap_memory_bytes))
    runner._swap_seconds = 0.0  # so that it is always cheaper
    return InProcess(runner, limits)


@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    # The tiny Ministral 3 scales its queries, so that it is not fused.
    [*((family, None) for family in sorted(FAMILIES - {"ministral3"})), ("llama", torch.int8)],
)
def test_answers_do_not_depend_on_the_batch(family: str, kv_dtype: torch.dtype | None) -> None:
    loaded = to_quantized(wrap_model(tiny_model(family, **WIDE)))
    alone = server(loaded, kv_dtype=kv_dtype)
    expected = {x.request_id: alone.serve([x])[x.request_id] for x in requests()}
    assert server(loaded, kv_dtype=kv_dtype).serve(requests()) == expected

    chunks = server(loaded, replace(LIMITS, target_batch_tokens=7), kv_dtype=kv_dtype)
    assert chunks.serve(requests()) == expected
    assert max(len(plan.rows) for plan in chunks.plans) > 1

    preempted = server(loaded, num_blocks=8, kv_dtype=kv_dtype)
    assert preempted.serve(requests()) == expected
    assert preempted.counters.preemptions > 0

    swapped = server(loaded, num_blocks=8, kv_dtype=kv_dtype, swap_memory_bytes=1 << 22)
    assert swapped.serve(requests()) == expected
    assert swapped.counters.swapped_in_tokens > 0

    cached = server(loaded, replace(LIMITS, prefix_cache=True), kv_dtype=kv_dtype)
    cached.serve(requests())
    again = [replace(x, request_id=f"again-{x.request_id}") for x in requests()]
    assert list(cached.serve(again).values()) == list(expected.values())
    assert cached.finished("again-4").stats.cached_tokens == 39  # all but the last of its prompt

    lost = server(loaded, kv_dtype=kv_dtype)
    assert lost.serve(requests(), lose_worker_after_steps=6) == expected


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probabilities_are_bitwise_reproducible(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    """Bfloat16 weights cannot guarantee that: the order of their sums, and so the rounding, depends on the batch."""
    loaded = to_quantized(wrap_model(tiny_model("llama", dtype=dtype, **WIDE)))
    alone = server(loaded, kv_dtype=kv_dtype)
    for x in requests():
        alone.serve([x])
    together = server(loaded, replace(LIMITS, target_batch_tokens=50), kv_dtype=kv_dtype)
    together.serve(requests())
    for x in requests():
        assert together.logprobs(x.request_id) == alone.logprobs(x.request_id)
