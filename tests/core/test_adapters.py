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


def test_prefix_is_shared_within_an_adapter_only() -> None:
    harness = harness_with(FIRST, SECOND)
    prompt = list(range(9))
    for name, key in (("a", b""), ("b", FIRST), ("c", SECOND), ("d", FIRST), ("e", b"")):
        harness.submit(name, prompt, 1, adapter=key)
        harness.run()
    assert [harness.end(name).stats.cached_tokens for name in "abcde"] == [0, 0, 0, 8, 8]


def test_prefix_of_an_adapter_is_not_shared_with_another_salt() -> None:
    harness = harness_with(FIRST)
    prompt = list(range(9))
    for name, salt in (("a", b"x" * 16), ("b", b"y" * 16), ("c", b"x" * 16)):
        harness.submit(name, prompt, 1, adapter=FIRST, cache_salt=salt)
        harness.run()
    assert [harness.end(name).stats.cached_tokens for name in "abc"] == [0, 0, 8]


def test_part_of_a_block_is_not_copied_from_another_adapter() -> None:
    harness = harness_with(FIRST)
    harness.submit("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], 1)
    harness.run()
    harness.submit("b", [1, 2, 3, 50, 51], 1, adapter=FIRST)
    harness.run()
    assert harness.end("b").stats.cached_tokens == 0


def test_unknown_adapter_is_rejected() -> None:
    harness = harness_with(FIRST)
    with pytest.raises(AdapterNotFound):
        harness.submit("a", 4, adapter=SECOND)
    assert harness.core.num_live == 0


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
    assert harness.core.load_adapter(FIRST, 0.0) == 1
    harness.submit("b", 9, 6, adapter=FIRST)
    harness.run()
    assert harness.core.adapters == {FIRST: 1}


def test_unloading_an_unknown_adapter_does_nothing() -> None:
    harness = harness_with(FIRST)
    assert harness.core.unload_adapter(SECOND, 0.0) == 0
    assert harness.core.adapters == {FIRST: 1}
