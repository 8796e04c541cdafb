"""The invariants of a core between any two of its calls."""

from __future__ import annotations

from collections import Counter

from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.core.sequence import State


def check(core: Scheduler, *, with_waiting_prompts: bool = True) -> None:
    """Check every invariant. Raises AssertionError.

    Costs microseconds per request and per block. Comparing long waiting prompts could delay a step, so a serving engine
    leaves them out.
    """
    batch, fresh, resuming = core._batch, core._fresh.sequences(), core._resuming.sequences()
    running = batch.by_age()
    for s in batch.decode_batch:
        batch.decode_batch.sync(s)
    batch.decode_batch.check()
    size = batch.pool.block_size
    batch.pool.check([s.blocks for s in running])
    live = [*running, *fresh, *resuming]
    assert len(live) == len(core._live) == len({id(s) for s in live}), "a request in two states or in none"
    assert all(core._live[s.request.request_id] is s for s in live)
    assert {*running} == {*batch.decode_batch, *batch.not_decoding}, "running sequences and their groups disagree"
    assert len(running) == len(batch.decode_batch) + len(batch.not_decoding)
    assert not any(s.in_decode_batch for s in (*batch.not_decoding, *fresh, *resuming))
    slots = [s.slot for s in running]
    assert sorted([*slots, *batch.free_slots]) == list(range(batch.num_slots)), "slots disagree"
    for s in live:
        assert len(s.tokens) <= s.num_known <= s.max_len, "more output planned than max_tokens"
        assert s.overtaken_count <= core.limits.max_queue_overtakes
    for s in live if with_waiting_prompts else running:
        assert tuple(s.tokens[: s.prompt_len]) == s.request.prompt, "a prompt has changed"
    for s in running:
        assert s.state is State.RUNNING
        assert s.num_published <= s.num_computed <= s.num_planned <= s.num_known
        assert s.num_computed <= len(s.tokens), "computed beyond what is confirmed"
        longest = s.max_len - 1 if s.protected else max(s.num_planned, s.num_known)
        assert -(-s.num_planned // size) <= len(s.blocks) <= -(-longest // size), "too few or too many blocks"
    for s in (*fresh, *resuming):
        assert s.state is State.WAITING
        assert (s.blocks, s.slot, s.num_planned) == ([], -1, 0), "a waiting sequence with blocks or a slot"
    assert all(s.in_flight == 0 for s in fresh)
    for queue in (core._fresh, core._resuming):
        assert queue.num_tokens == sum(len(s.tokens) for s in queue.sequences())
    suspects = [s for s in live if s.crash_count]
    assert {*suspects} == {*core._poison}, "crash counts and suspects disagree"
    assert all(0 < s.clear_position < s.max_len or s.max_len == 1 for s in suspects)
    samples = Counter(id(s) for inflight in core._inflight for s in inflight.sampled())
    assert all(s.in_flight == samples[id(s)] for s in live), "samples in flight and plans disagree"
    assert len(core._inflight) <= core.limits.pipeline_depth
    assert len(core._deadlines) <= 2 * len(core._live) + 65
    c = core._counters
    ended = c.requests_finished + c.requests_cancelled + c.requests_expired + c.requests_failed
    assert c.requests_admitted == len(core._live) + ended, "a request ended twice or was lost"
