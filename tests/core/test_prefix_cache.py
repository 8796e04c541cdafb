"""What the prefix cache shares and with whom, in examples to check by hand. Blocks have 4 positions unless said."""

from __future__ import annotations

from core.harness import Rig


def test_the_same_prompt_again_hits_all_full_blocks_but_never_the_last_token() -> None:
    rig = Rig()
    prompt = list(range(8))
    rig.submit("a", prompt, max_tokens=1)
    rig.run()
    rig.submit("b", prompt, max_tokens=1)
    rig.run()
    # Eight tokens are two blocks; the second holds the last token, which must be computed to sample the next.
    assert rig.end("b").record.cached_tokens == 4
    rig.submit("c", [*prompt, 9], max_tokens=1)
    rig.run()
    assert rig.end("c").record.cached_tokens == 8
    assert (rig.counters.cached_tokens, rig.counters.looked_up_tokens) == (12, 25)
    assert rig.outputs("b") == rig.outputs("a")


def test_an_answer_is_cached_for_the_next_turn() -> None:
    rig = Rig()
    first = rig.submit("a", 6, max_tokens=8)
    rig.run()
    # 13 positions were computed (the last output never is): three full blocks.
    rig.submit("b", [*first.prompt, *rig.outputs("a"), 1, 2], max_tokens=1)
    rig.run()
    assert rig.end("b").record.cached_tokens == 12


def test_running_requests_share_what_is_computed_but_not_what_is_planned() -> None:
    rig = Rig(pipeline_depth=2)
    prompt = list(range(20))
    rig.submit("a", prompt, max_tokens=9)
    rig.plan()
    rig.submit("b", [*prompt, 5], max_tokens=9)
    rig.plan()
    rig.apply()
    rig.submit("c", [*prompt, 6], max_tokens=9)
    rig.plan()
    shared = {init.slot: len(init.blocks) for plan in rig.plans for init in plan.inits}
    assert shared == {0: 0, 1: 0, 2: 5}


def test_another_salt_misses() -> None:
    rig = Rig()
    prompt = list(range(9))
    for request_id, salt in (("a", b"x"), ("b", b"y"), ("c", b"x")):
        rig.submit(request_id, prompt, max_tokens=1, cache_salt=salt)
        rig.run()
    assert [rig.end(i).record.cached_tokens for i in "abc"] == [0, 0, 8]


def test_the_cache_can_be_off_and_can_be_emptied() -> None:
    for rig, hits in ((Rig(prefix_cache=False), 0), (Rig(), 8)):
        prompt = list(range(9))
        for request_id in "ab":
            rig.submit(request_id, prompt, max_tokens=1)
            rig.run()
        assert rig.end("b").record.cached_tokens == hits
        rig.core.clear_prefix_cache()
        rig.submit("c", prompt, max_tokens=1)
        rig.run()
        assert rig.end("c").record.cached_tokens == 0
