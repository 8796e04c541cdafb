"""Requests that start together share the blocks of their prompts, and answer token for token as without sharing.

Rows of one step read blocks that other rows of the step write: each layer writes all keys and values before it attends.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.families import WIDE, tiny_model
from support.inprocess import InProcess

from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.sequence import Request
from lineclear.wire.messages import Sampling
from lineclear.worker.attention.registry import BACKENDS
from lineclear.worker.kernels.native_library import selected_library
from lineclear.worker.model.loaded_model import LoadedModel
from lineclear.worker.model.loader import build_fused, to_int8, wrap_model
from lineclear.worker.model_runner import ModelRunner, RunnerOptions

PREFIX = tuple(3 + i * 37 % 200 for i in range(52))
TAILS = ((), (), (9,), (9, 10, 11), tuple(range(40, 75)), ())
"""Equal prompts, and prompts with a common prefix. A block has 16 tokens, so the prefix ends within a block."""
LIMITS = CoreLimits(max_batch_size=8, target_batch_tokens=512)
MAX_TOKENS = 10


def requests() -> list[Request]:
    sampling = Sampling(banned_ids=(2,))
    return [Request(f"r{i}", (*PREFIX, *tail), sampling, MAX_TOKENS) for i, tail in enumerate(TAILS)]


def serve(loaded: LoadedModel, limits: CoreLimits, **options: Any) -> tuple[dict[str, list[int]], InProcess]:
    runner = ModelRunner(loaded, RunnerOptions(num_blocks=64, num_slots=8, max_step_tokens=512, **options))
    server = InProcess(runner, limits)
    return server.serve(requests()), server


def check(loaded: LoadedModel, expected: dict[str, list[int]] | None = None, **options: Any) -> None:
    """Compare answers with and without shared prefixes, in one step and in chunks, and with `expected`."""
    alone, _ = serve(loaded, replace(LIMITS, prefix_cache=False), **options)
    together, server = serve(loaded, LIMITS, **options)
    assert [len(init.blocks) for init in server.plans[0].inits] == [0, 3, 3, 3, 3, 3], (
        "one step computes the prefix once"
    )
    chunked, _ = serve(loaded, replace(LIMITS, target_batch_tokens=20, pipeline_depth=3), **options)
    assert together == chunked == alone
    assert expected is None or together == expected


def generated(model: Any) -> dict[str, list[int]]:
    """Return transformers' greedy answers."""
    found = {}
    for request in requests():
        ids = torch.tensor([request.prompt])
        lengths = {"min_new_tokens": MAX_TOKENS, "max_new_tokens": MAX_TOKENS}
        output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, eos_token_id=2, **lengths)
        found[request.request_id] = output[0, len(request.prompt) :].tolist()
    return found


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_every_backend_reads_what_the_step_writes(backend: str, family: str) -> None:
    if backend == "native" and selected_library() is None:
        pytest.skip("no native kernels here")
    expected = generated(tiny_model(family, **WIDE))
    check(wrap_model(tiny_model(family, **WIDE)), expected, attention_backend=backend)


@pytest.mark.usefixtures("best_and_none")
def test_fused_and_plain_layers() -> None:
    loaded = wrap_model(tiny_model("llama", **WIDE))
    check(build_fused(loaded) or loaded, generated(tiny_model("llama", **WIDE)))


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
def test_int8(kv_dtype: torch.dtype | None) -> None:
    if selected_library() is None:
        pytest.skip("no native kernels here")
    check(to_int8(wrap_model(tiny_model("llama", **WIDE))), kv_dtype=kv_dtype)
