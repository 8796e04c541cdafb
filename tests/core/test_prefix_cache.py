"""Which requests share cached prefixes. Blocks have 4 positions by default."""

from __future__ import annotations

from core.harness import CoreHarness


def test_same_prompt_hits_full_blocks_but_not_last_token() -> None:
    harness = CoreHarness()
    prompt = list(range(8))
    harness.submit("a", prompt, max_tokens=1)
    harness.run()
    harness.submit("b", prompt, max_tokens=1)
    harness.run()
    # Eight tokens are two blocks; the second holds the last token, which must be computed to sample the next.
    assert harness.end("b").stats.cached_tokens == 4
    harness.submit("c", [*prompt, 9], max_tokens=1)
    harness.run()
    assert harness.end("c").stats.cached_tokens == 8
    assert (harness.counters.prefix_cache_hits, harness.counters.prefix_cache_queries) == (12, 25)
    assert harness.outputs("b") == harness.outputs("a")


def test_answer_is_cached_for_the_next_message() -> None:
    harness = CoreHarness()
    first = harness.submit("a", 6, max_tokens=8)
    harness.run()
    # 13 positions were computed (the last output never is): three full blocks.
    harness.submit("b", [*first.prompt, *harness.outputs("a"), 1, 2], max_tokens=1)
    harness.run()
    assert harness.end("b").stats.cached_tokens == 12


def test_running_requests_share_computed_blocks_only() -> None:
    harness = CoreHarness(pipeline_depth=2)
    prompt = list(range(20))
    harness.submit("a", prompt, max_tokens=9)
    harness.plan()
    harness.submit("b", [*prompt, 5], max_tokens=9)
    harness.plan()
    harness.apply()
    harness.submit("c", [*prompt, 6], max_tokens=9)
    harness.plan()
    shared = {init.slot: len(init.blocks) for plan in harness.plans for init in plan.inits}
    assert shared == {0: 0, 1: 0, 2: 5}


def test_other_salt_misses() -> None:
    harness = CoreHarness()
    prompt = list(range(9))
    for request_id, salt in (("a", b"x"), ("b", b"y"), ("c", b"x")):
        harness.submit(request_id, prompt, max_tokens=1, cache_salt=salt)
        harness.run()
    assert [harness.end(i).stats.cached_tokens for i in "abc"] == [0, 0, 8]


def test_prefix_cache_can_be_disabled_and_cleared() -> None:
    for harness, hits in ((CoreHarness(prefix_cache=False), 0), (CoreHarness(), 8)):
        prompt = list(range(9))
        for request_id in "ab":
            harness.submit(request_id, prompt, max_tokens=1)
            harness.run()
        assert harness.end("b").stats.cached_tokens == hits
        harness.core.clear_prefix_cache()
        harness.submit("c", prompt, max_tokens=1)
        harness.run()
        assert harness.end("c").stats.cached_tokens == 0
