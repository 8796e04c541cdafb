"""Requests that share a part of a block copy its positions, and answer token for token as without a prefix cache."""

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

BLOCK_SIZE = 16
LONGEST = tuple(3 + i * 37 % 200 for i in range(40))
COMMON = range(1, BLOCK_SIZE)
LIMITS = CoreLimits(max_batch_size=16, target_batch_tokens=48)
MAX_TOKENS = 6
GREEDY = Sampling(banned_ids=(2,))


def requests(*, is_sampled: bool = False) -> list[Request]:
    """Return a prompt, and 15 that share a block and 1 to 15 positions of its second block. Then a copy of each."""
    prompts = [LONGEST, *((*LONGEST[: BLOCK_SIZE + n], 205, n, 206) for n in COMMON)]
    samplings = [replace(GREEDY, temperature=0.8, seed=i) if is_sampled else GREEDY for i in range(2 * len(prompts))]
    return [
        Request(f"r{i}", prompt, sampling, MAX_TOKENS)
        for i, (prompt, sampling) in enumerate(zip(2 * prompts, samplings, strict=True))
    ]


Answers = dict[str, list[int]]


def serve(
    loaded: LoadedModel, limits: CoreLimits, rounds: list[list[Request]], **options: Any
) -> tuple[Answers, InProcess]:
    runner = ModelRunner(
        loaded, RunnerOptions(num_blocks=160, block_size=BLOCK_SIZE, num_slots=16, max_step_tokens=512, **options)
    )
    server = InProcess(runner, limits)
    answers: Answers = {}
    for wave in rounds:
        answers |= server.serve(wave)
    return answers, server


def generated(model: Any) -> Answers:
    """Return transformers' greedy answers."""
    found = {}
    for request in requests():
        ids = torch.tensor([request.prompt])
        lengths = {"min_new_tokens": MAX_TOKENS, "max_new_tokens": MAX_TOKENS}
        output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, eos_token_id=2, **lengths)
        found[request.request_id] = output[0, len(request.prompt) :].tolist()
    return found


def check(loaded: LoadedModel, expected: Answers | None = None, **options: Any) -> None:
    """Compare answers together and one after the other with `expected` and with those without a prefix cache."""
    for is_sampled in (False, True):
        asked = requests(is_sampled=is_sampled)
        alone, _ = serve(loaded, replace(LIMITS, prefix_cache=False), [asked], **options)
        together, server = serve(loaded, LIMITS, [asked], **options)
        assert sum(len(plan.copy_blocks) for plan in server.plans) > 8
        deep, _ = serve(loaded, replace(LIMITS, pipeline_depth=3), [asked], **options)
        in_turn, server = serve(loaded, LIMITS, [[request] for request in asked], **options)
        assert together == deep == in_turn == alone
        assert is_sampled or expected is None or alone == expected
        cached = [server.finished(f"r{n}").stats.cached_tokens for n in COMMON]
        assert cached == [BLOCK_SIZE + (n if n >= BLOCK_SIZE // 4 else 0) for n in COMMON]
        computed = sum(plan.num_tokens for plan in server.plans) - len(asked) * (MAX_TOKENS - 1)
        assert server.counters.prefix_cache_hits + computed == server.counters.prefix_cache_queries


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_every_backend_copies(backend: str, family: str) -> None:
    if backend == "native" and selected_library() is None:
        pytest.skip("no native kernels here")
    expected = generated(tiny_model(family, **WIDE))
    check(wrap_model(tiny_model(family, **WIDE)), expected, attention_backend=backend)


def test_fused_pass() -> None:
    loaded = wrap_model(tiny_model("llama", **WIDE))
    check(build_fused(loaded) or loaded, generated(tiny_model("llama", **WIDE)))


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
def test_int8(kv_dtype: torch.dtype | None) -> None:
    if selected_library() is None:
        pytest.skip("no native kernels here")
    check(to_int8(wrap_model(tiny_model("llama", **WIDE))), kv_dtype=kv_dtype)
