"""Requests that share blocks of their prompts, or a part of one, answer token for token as without a prefix cache.

Rows of one step read blocks that other rows of the step write: each layer writes all keys and values before it attends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from e2e.transformers_answers import generated
from support.families import WIDE, tiny_model
from support.inprocess import InProcess

from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.sequence import Request
from lineclear.wire.messages import Sampling
from lineclear.worker.attention.registry import BACKENDS, ON_CUDA
from lineclear.worker.kernels.native_library import selected_library
from lineclear.worker.model.loaded_model import LoadedModel
from lineclear.worker.model.loader import build_fused, to_quantized, wrap_model
from lineclear.worker.runner.model_runner import ModelRunner, RunnerOptions

BLOCK_SIZE, MAX_TOKENS = 16, 6
PREFIX = tuple(3 + i * 37 % 200 for i in range(52))
TAILS = ((), (), (9,), (9, 10, 11), tuple(range(40, 75)), ())
"""Equal prompts, and prompts with a common prefix, which ends within a block."""
COMMON = (1, 3, 4, 9, 15)
"""Common positions of a block. Fewer than a quarter of a block are not copied."""
LIMITS = CoreLimits(max_batch_size=16)
CASES = [
    *(
        (family, "plain", {"attention_backend": name})
        for family in ("llama", "gemma2")
        for name in sorted({*BACKENDS} - {*ON_CUDA})
    ),
    ("llama", "fused", {}),
    ("llama", "int8", {}),
    ("llama", "int8", {"kv_dtype": torch.int8}),
]


@dataclass(frozen=True)
class Served:
    """A model with its backend, and transformers' model if it computes the same."""

    loaded: LoadedModel
    options: dict[str, Any]
    original: Any

    def serve(self, limits: CoreLimits, *rounds: list[Request]) -> tuple[dict[str, list[int]], InProcess]:
        sizes = {"num_blocks": 160, "block_size": BLOCK_SIZE, "num_slots": 16, "max_step_tokens": 512}
        server = InProcess(ModelRunner(self.loaded, RunnerOptions(**sizes, **self.options)), limits)
        answers: dict[str, list[int]] = {}
        for requests in rounds:
            answers |= server.serve(requests)
        return answers, server

    def check(self, answers: dict[str, list[int]], requests: list[Request]) -> None:
        if self.original is not None:
            assert answers == generated(self.original, requests, eos_token_id=2, min_new_tokens=MAX_TOKENS)


@pytest.fixture(scope="module", params=CASES, ids=str, name="served")
def make_served(request: pytest.FixtureRequest) -> Served:
    family, layers, options = request.param
    if selected_library() is None and (layers != "plain" or options["attention_backend"] == "native"):
        pytest.skip("no native kernels here")
    loaded = wrap_model(tiny_model(family, **WIDE))
    if layers == "fused":
        found = build_fused(loaded)
        assert found is not None
        loaded = found
    elif layers == "int8":
        return Served(to_quantized(loaded), options, None)
    return Served(loaded, options, tiny_model(family, **WIDE))


def test_common_prefix(served: Served) -> None:
    requests = [
        Request(f"r{i}", (*PREFIX, *tail), Sampling(banned_ids=(2,)), MAX_TOKENS) for i, tail in enumerate(TAILS)
    ]
    limits = replace(LIMITS, target_batch_tokens=512)
    alone, _ = served.serve(replace(limits, prefix_cache=False), requests)
    together, server = served.serve(limits, requests)
    assert [len(init.blocks) for init in server.plans[0].inits] == [0, 3, 3, 3, 3, 3], (
        "one step computes the prefix once"
    )
    chunked, _ = served.serve(replace(limits, target_batch_tokens=20, pipeline_depth=3), requests)
    assert together == chunked == alone
    served.check(alone, requests)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_common_part_of_a_block(served: Served, temperature: float) -> None:
    """One prompt, others that share a block and a part of its second block, and then a copy of each."""
    longest = PREFIX[:40]
    prompts = [longest, *((*longest[: BLOCK_SIZE + n], 205, n, 206) for n in COMMON)] * 2
    samplings = [Sampling(banned_ids=(2,), temperature=temperature, seed=i) for i in range(len(prompts))]
    requests = [Request(f"r{i}", prompts[i], sampling, MAX_TOKENS) for i, sampling in enumerate(samplings)]
    limits = replace(LIMITS, target_batch_tokens=48)
    alone, _ = served.serve(replace(limits, prefix_cache=False), requests)
    together, server = served.serve(limits, requests)
    assert sum(len(plan.copy_blocks) for plan in server.plans) > 4
    deep, _ = served.serve(replace(limits, pipeline_depth=3), requests)
    in_turn, server = served.serve(limits, *([request] for request in requests))
    assert together == deep == in_turn == alone
    cached = [server.finished(f"r{i}").stats.cached_tokens for i in range(1, 1 + len(COMMON))]
    assert cached == [BLOCK_SIZE + (n if n >= BLOCK_SIZE // 4 else 0) for n in COMMON]
    computed = sum(plan.num_tokens for plan in server.plans) - len(requests) * (MAX_TOKENS - 1)
    assert server.counters.prefix_cache_hits + computed == server.counters.prefix_cache_queries
    if not temperature:
        served.check(alone, requests)
