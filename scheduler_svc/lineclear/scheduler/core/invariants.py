"""The invariants of a core between any two of its calls."""

from __future__ import annotations

from collections import Counter
from itertools import chain

from lineclear.scheduler.core.core_state import WorkerState
from lineclear.scheduler.core.running_batch import RunningBatch
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.core.sequence import Sequence, State


def check(core: Scheduler, *, with_waiting_prompts: bool = True) -> None:
    """Check every invariant. Raises AssertionError.

    Costs microseconds per request and per block. Comparing long waiting prompts could delay a step, so a serving engine
    leaves them out.
    """
    state, requests = core._state, core._live
    fresh, resuming = state.fresh.sequences(), state.resuming.sequences()
    running = [s for epoch, worker in state.workers.items() for s in _check_worker(epoch, worker, core)]
    live = [*running, *fresh, *resuming]
    assert len(live) == len(requests.by_id) == len({id(s) for s in live}), "a request in two states or in none"
    assert all(requests.by_id.get(s.request.request_id) is s for s in live)
    for s in live:
        assert len(s.tokens) <= s.num_known <= s.max_len, "more output planned than max_tokens"
        assert s.num_void in (0, s.in_flight), "a sample is void and a later one is not"
        assert 0 <= s.num_scored <= max(s.prompt_len - 1, 0), "a score behind the prompt"
        assert s.void_admission <= s.admission_count
        assert s.overtaken_count <= core.limits.max_queue_overtakes
    for s in live if with_waiting_prompts else running:
        assert tuple(s.tokens[: s.prompt_len]) == s.request.prompt, "a prompt has changed"
    for s in (*fresh, *resuming):
        assert s.state is State.WAITING
        assert not s.in_decode_batch
        assert (s.blocks, s.slot, s.num_planned) == ([], -1, 0), "a waiting sequence with blocks or a slot"
    assert all(s.in_flight == 0 for s in fresh)
    for queue in (state.fresh, state.resuming):
        assert queue.num_tokens == sum(len(s.tokens) for s in queue.sequences())
        siblings = [s for s in queue.sequences() if s.request.is_sibling]
        assert queue.num_siblings == len(siblings)
        assert queue.sibling_tokens == sum(len(s.tokens) for s in siblings)
    suspects = [s for s in live if s.crash_count]
    assert {*suspects} == {*state.poison.suspects}, "crash counts and suspects disagree"
    assert all(0 < s.clear_position < s.max_len or s.max_len == 1 for s in suspects)
    inflight = chain.from_iterable(worker.inflight for worker in state.workers.values())
    samples = Counter(id(s) for step in inflight for s in step.sampled())
    assert all(s.in_flight == samples[id(s)] for s in live), "samples in flight and plans disagree"
    assert len(requests.deadlines) <= 2 * len(requests.by_id) + 65
    c = state.counters
    ended = c.requests_finished + c.requests_cancelled + c.requests_expired + c.requests_failed
    assert c.requests_admitted == len(requests.by_id) + ended, "a request ended twice or was lost"


def _check_worker(epoch: int, worker: WorkerState, core: Scheduler) -> list[Sequence]:
    """Check the state of a joined worker. Returns the sequences that run on it."""
    batch, running = worker.batch, worker.batch.by_age()
    for s in batch.decode_batch:
        batch.decode_batch.sync(s)
    batch.decode_batch.check()
    size = batch.pool.block_size
    started = [*running, *batch.finishing]
    batch.pool.check([s.blocks for s in started])
    assert {*running} == {*batch.decode_batch, *batch.not_decoding}, "running sequences and their groups disagree"
    assert len(running) == len(batch.decode_batch) + len(batch.not_decoding)
    assert not any(s.in_decode_batch for s in (*batch.not_decoding, *batch.finishing))
    slots = [s.slot for s in running]
    assert sorted([*slots, *batch.unused_slots]) == list(range(batch.max_slots)), "slots disagree"
    for s in running:
        is_kept = s.request.is_constrained
        assert s.num_planned < s.max_len - 1 or is_kept, "a slot is held by a sequence whose last row is planned"
    for s in batch.finishing:
        assert (s.slot, s.num_planned) == (-1, s.max_len - 1), "a slot is given up too early"
        assert s.num_known == s.max_len or not s.request.max_tokens, "a slot is given up before the last sample"
        assert s.num_computed < s.num_planned, "a sequence waits for a result that does not come"
    for s in started:
        assert s.state is State.RUNNING
        assert s.epoch == epoch, "a sequence of another worker"
        assert s.num_published <= s.num_computed <= s.num_planned <= s.num_known
        assert s.num_published <= s.num_offered <= s.num_planned
        assert s.num_computed <= len(s.tokens), "computed beyond what is confirmed"
        longest = s.max_len - 1 if s.protected else max(s.num_planned, s.num_known)
        kept = s.request.max_drafts + core.limits.pipeline_depth * s.request.is_constrained
        longest = min(longest + kept, s.max_len - 1)  # blocks of rejected drafts and of void rows are kept
        assert -(-s.num_planned // size) <= len(s.blocks) <= -(-longest // size), "too few or too many blocks"
    _check_states(epoch, batch, started)
    drafts = {id(row.sequence): row for step in worker.inflight for row in step.chunk_rows if row.num_drafts}
    for s in started:
        row = drafts.get(id(s))
        is_current = row is not None and row.admission_count == s.admission_count
        assert s.num_drafts == (row.num_drafts if row is not None and is_current else 0), "drafts and plans disagree"
        assert not s.num_drafts or (s.in_flight == 1 and not s.in_decode_batch), "planned beyond drafts in flight"
    assert len(worker.inflight) <= core.limits.pipeline_depth
    return started


def _check_states(epoch: int, batch: RunningBatch, started: list[Sequence]) -> None:
    """Check the host blocks of a worker, or its snapshots and where its sequences leave states."""
    states, size = batch.pool.states, batch.pool.block_size
    if batch.swap is not None:
        batch.swap.check(epoch)
    if states is None:
        assert all(s.state_at is None and not s.boundaries for s in started), "a state of a model without one"
        return
    states.check(batch.pool._keys, batch.pool._references, [s.slot for s in batch.running])
    for s in started:
        assert [*s.boundaries] == sorted({*s.boundaries}), "boundaries out of order"
        assert all(end % size == 0 for end in s.boundaries), "a boundary in a block"
        assert all(s.num_planned < end <= s.num_skippable for end in s.boundaries), "a lost boundary"
        assert s.state_at is not None
        assert s.state_at <= s.num_planned, "a state that no row has left"
