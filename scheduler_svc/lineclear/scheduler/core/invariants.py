"""What holds of a core between any two of its calls. Looks everywhere, changes nothing that a call could notice."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from lineclear.scheduler.core.sequence import State

if TYPE_CHECKING:
    from lineclear.scheduler.core.scheduler import Scheduler


def check(core: Scheduler, *, with_waiting_prompts: bool = True) -> None:
    """Check every invariant that holds between two calls. AssertionError on a breach.

    Takes microseconds for each request and each block. Only the prompts that wait may be so long that comparing them
    holds up a step; a serving engine leaves them out.
    """
    residents, fresh, resuming = core._batch, core._fresh.sequences(), core._resuming.sequences()
    running = residents.by_age()
    for s in residents.decode_batch:
        residents.decode_batch.sync(s)
    residents.decode_batch.check()
    size = core._batch.pool.block_size
    core._batch.pool.check([s.blocks for s in running])
    everyone = [*running, *fresh, *resuming]
    assert len(everyone) == len(core._live) == len({id(s) for s in everyone}), "a request in two places or in none"
    assert all(core._live[s.request.request_id] is s for s in everyone)
    assert {*running} == {*residents.decode_batch, *residents.not_decoding}, "running, and in no group or in two"
    assert len(running) == len(residents.decode_batch) + len(residents.not_decoding)
    slots = [s.slot for s in running]
    assert sorted([*slots, *core._batch.free_slots]) == list(range(core._batch.num_slots)), "slots disagree"
    for s in everyone:
        assert len(s.tokens) <= s.num_known <= s.max_len, "more output planned than asked for"
        assert s.overtaken_count <= core.limits.max_bypasses
    for s in everyone if with_waiting_prompts else running:
        assert tuple(s.tokens[: s.prompt_len]) == s.request.prompt, "a prompt has changed"
    for s in running:
        assert s.state is State.RUNNING
        assert s.num_published <= s.num_computed <= s.num_planned <= s.num_known
        assert s.num_computed <= len(s.tokens), "computed beyond what is confirmed"
        most = s.max_len - 1 if s.pinned else max(s.num_planned, s.num_known)
        assert -(-s.num_planned // size) <= len(s.blocks) <= -(-most // size), "blocks beside the need"
    for s in (*fresh, *resuming):
        assert s.state is State.WAITING
        assert (s.blocks, s.slot, s.num_planned) == ([], -1, 0), "waiting and holding"
    assert all(s.in_flight == 0 for s in fresh)
    for queue in (core._fresh, core._resuming):
        assert queue.num_tokens == sum(len(s.tokens) for s in queue.sequences())
    struck = [s for s in everyone if s.crash_count]
    assert {*struck} == {*core._poison}, "struck and no suspect, or a suspect who has ended"
    assert all(0 < s.clear_position < s.max_len or s.max_len == 1 for s in struck)
    samples = Counter(id(s) for flight in core._inflight for s in flight.sampled())
    assert all(s.in_flight == samples[id(s)] for s in everyone), "samples in flight and their plans disagree"
    assert len(core._inflight) <= core.limits.pipeline_depth
    assert len(core._deadlines) <= 2 * len(core._live) + 65
    c = core._counters
    ended = c.requests_finished + c.requests_cancelled + c.requests_expired + c.requests_failed
    assert c.requests_admitted == len(core._live) + ended, "a request ended twice or was lost"
