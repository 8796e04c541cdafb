"""Adapters in the core: which requests are admitted, the index in their slots, and the prefix cache."""

from __future__ import annotations

import pytest
from core.harness import VOCABULARY, CoreHarness
from support.toy import expected, with_adapter

from lineclear.errors import AdapterLimitReached, AdapterNotFound
from lineclear.scheduler.core.sequence import Request

FIRST, SECOND = b"1" * 32, b"2" * 32


def harness_with(*keys: bytes, max_loras: int = 8) -> CoreHarness:
    """Return a harness whose worker holds the adapters."""
    harness = CoreHarness(max_loras=max_loras)
    for key in keys:
        harness.runner.load_adapter(harness.core.load_adapter(key, 0.0), key)
    return harness


def answer(request: Request) -> list[int]:
    """Return the answer of a request that runs alone with its adapter."""
    model = with_adapter("", request.adapter)
    return expected(request.prompt, request.sampling, request.max_tokens, VOCABULARY, model)


def test_batch_mixes_adapters_and_none() -> None:
    harness = harness_with(FIRST, SECOND)
    requests = [harness.submit(f"r{i}", 9, 6, adapter=key) for i, key in enumerate((b"", FIRST, SECOND, FIRST))]
    plan = harness.step()
    assert plan is not None
    assert [init.adapter for init in plan.inits] == [0, 1, 2, 1]
    harness.run()
    assert [harness.outputs(r.request_id) for r in requests] == [answer(r) for r in requests]


def test_adapter_is_kept_over_a_worker_loss() -> None:
    harness = harness_with(FIRST)
    request = harness.submit("a", 9, 6, adapter=FIRST)
    harness.step()
    harness.step()
    harness.join()
    assert harness.core.adapters == {FIRST: 1}
    harness.runner.load_adapter(1, FIRST)
    harness.run()
    assert harness.outputs("a") == answer(request)


def test_prefix_is_shared_within_an_adapter_and_a_salt_only() -> None:
    harness = harness_with(FIRST, SECOND)
    scopes = [(b"", b""), (FIRST, b""), (SECOND, b""), (FIRST, b"x" * 16)]
    for number, (key, salt) in enumerate(2 * scopes):
        harness.submit(f"r{number}", list(range(9)), 1, adapter=key, cache_salt=salt)
        harness.run()
    assert [harness.end(f"r{number}").stats.cached_tokens for number in range(8)] == [0] * 4 + [8] * 4


def test_unloaded_adapter_takes_no_new_request_and_runs_the_others_to_their_end() -> None:
    harness = harness_with(FIRST, max_loras=1)
    request = harness.submit("a", 9, 6, adapter=FIRST)
    harness.step()
    assert harness.core.unload_adapter(FIRST, 0.0) == 1
    with pytest.raises(AdapterNotFound):
        harness.submit("b", 4, adapter=FIRST)
    with pytest.raises(AdapterLimitReached, match="1 adapters are loaded and in use, and the limit is 1"):
        harness.core.load_adapter(SECOND, 0.0)
    harness.run()
    assert harness.outputs("a") == answer(request)
    assert harness.core.adapters == {}
    assert harness.core.load_adapter(SECOND, 0.0) == 1


def test_adapter_that_is_loaded_again_takes_requests_again() -> None:
    harness = harness_with(FIRST)
    harness.submit("a", 9, 6, adapter=FIRST)
    harness.core.unload_adapter(FIRST, 0.0)
    assert harness.core.unload_adapter(SECOND, 0.0) == 0, "it is unknown"
    assert harness.core.load_adapter(FIRST, 0.0) == 1
    harness.submit("b", 9, 6, adapter=FIRST)
    harness.run()
    assert harness.core.adapters == {FIRST: 1}
