"""What a request takes over from others: cached prefixes, states and host blocks. Blocks have 4 positions."""

from __future__ import annotations

from core.harness import CoreHarness, answer

from lineclear.scheduler.core.events import Failed
from lineclear.wire.messages import BlockCopy

PROMPT = list(range(3, 21))
"""Of 18 tokens: four full blocks, behind which the state is kept, and two positions."""


def copies(harness: CoreHarness) -> list[list[tuple[int, int]]]:
    """Return the copies of states of each plan with some. Slots have the states 0 to 7, and snapshots 8 to 11."""
    return [[(copy.source, copy.target) for copy in plan.copy_states] for plan in harness.plans if plan.copy_states]


def positions(harness: CoreHarness) -> list[list[tuple[int, int, int]]]:
    return [harness.rows(plan) for plan in harness.plans]


def test_same_prompt_hits_all_but_the_last_token() -> None:
    harness = CoreHarness()
    prompt = list(range(8))
    harness.submit("a", prompt, max_tokens=1)
    harness.run()
    harness.submit("b", prompt, max_tokens=1)
    harness.run()
    # Eight tokens are two blocks; the second holds the last token, which must be computed to sample the next. Its other
    # positions are copied.
    assert harness.end("b").stats.cached_tokens == 7
    assert harness.plans[-1].copy_blocks == (BlockCopy(1, 2, 3),)
    harness.submit("c", [*prompt, 9], max_tokens=1)
    harness.run()
    assert harness.end("c").stats.cached_tokens == 8
    assert (harness.counters.prefix_cache_hits, harness.counters.prefix_cache_queries) == (15, 25)
    assert harness.runner.num_positions == 25 - 15
    assert harness.outputs("b") == harness.outputs("a")


def test_prefix_is_shared_within_an_adapter_and_a_salt_only() -> None:
    harness = CoreHarness(max_loras=8)
    first, second = b"1" * 32, b"2" * 32
    for key in (first, second):
        harness.runner.load_adapter(harness.core.load_adapter(key, 0.0), key)
    scopes = [(b"", b""), (first, b""), (second, b""), (first, b"x" * 16)]
    for number, (key, salt) in enumerate(2 * scopes):
        harness.submit(f"r{number}", list(range(9)), 1, adapter=key, cache_salt=salt)
        harness.run()
    assert [harness.end(f"r{number}").stats.cached_tokens for number in range(8)] == [0] * 4 + [8] * 4


def test_shared_tainted_block_is_zeroed_after_last_release() -> None:
    prompt = list(range(8))
    harness = CoreHarness(worker_num_blocks=8, is_bad=lambda context: context[-1] == 90)
    harness.submit("clean", [*prompt, 1], max_tokens=6)
    harness.step()
    harness.submit("bad", [*prompt, 90], max_tokens=6)
    harness.step()  # shares the two blocks of the prompt, and fails
    assert isinstance(harness.end("bad"), Failed)
    harness.cancel("clean")
    harness.submit("next", 30, max_tokens=1)
    plan = harness.step()
    assert plan is not None
    assert {0, 1} <= set(plan.zero_blocks)


def test_state_is_kept_behind_the_last_full_block() -> None:
    harness = CoreHarness(worker_num_state_snapshots=4)
    first = harness.submit("first", PROMPT, max_tokens=2)
    harness.run()
    assert positions(harness) == [[(0, 0, 16)], [(0, 16, 18)], [(0, 18, 19)]]
    assert copies(harness) == [[(0, 8)]]
    harness.plans.clear()
    second = harness.submit("second", [*PROMPT, 50], max_tokens=2)
    harness.run()
    assert positions(harness) == [[(0, 16, 19)], [(0, 19, 20)]]
    assert copies(harness) == [[(8, 0)]]
    assert [harness.outputs(x.request_id) for x in (first, second)] == [answer(first), answer(second)]
    assert harness.finished("second").stats.cached_tokens == 16


def test_next_worker_has_no_states() -> None:
    harness = CoreHarness(worker_num_state_snapshots=4)
    request = harness.submit("first", PROMPT, max_tokens=6)
    for _ in range(4):
        harness.step()
    harness.join()
    harness.run()
    assert harness.outputs("first") == answer(request)
    assert copies(harness) == [[(0, 8)], [(0, 8)]], "the same state again"


def test_preempted_sequence_gets_its_blocks_back() -> None:
    harness = CoreHarness(worker_num_blocks=8, worker_num_swap_blocks=4, max_batch_size=2, prefix_cache=False)
    harness.seconds_per_step, harness.seconds_per_token = 0.01, 0.001
    for number in range(6):  # until step times can be predicted
        harness.submit(f"first{number}", 3 * number + 1, max_tokens=4)
        harness.run()
    requests = [harness.submit("old", 8, max_tokens=16), harness.submit("young", 12, max_tokens=12)]
    harness.run()
    assert [harness.outputs(x.request_id) for x in requests] == [answer(x) for x in requests]
    # "old" has 16 positions and needs a fifth block; "young" waits with 16 positions in the other four. Host blocks are
    # numbered from 8 on.
    copied = [copy for plan in harness.plans for copy in plan.copy_blocks]
    assert [(copy.target, copy.num_positions) for copy in copied[:4]] == [(8, 4), (9, 4), (10, 4), (11, 4)]
    assert [(copy.source, copy.num_positions) for copy in copied[4:]] == [(8, 4), (9, 4), (10, 4), (11, 4)]
    c = harness.counters
    assert (c.preemptions, c.swapped_out_tokens, c.swapped_in_tokens) == (1, 16, 16)
    assert (c.recomputed_tokens, c.prefix_cache_hits) == (0, 0)
