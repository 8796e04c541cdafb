"""The history of executed steps, over real engines and worker processes: what it has, and what it never has."""

from __future__ import annotations

import gc
import signal
from collections import defaultdict
from typing import Any

import pytest
from support.engine_harness import EngineHarness, Stream, request
from support.toy_worker import ToyOptions

from lineclear.scheduler.core.events import Finished
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.sequence import Request, Sequence
from lineclear.scheduler.observe import step_history
from lineclear.scheduler.observe.step_history import StepHistory
from lineclear.v1 import steps_pb2 as pb
from lineclear.wire.messages import SlotInit

SMALL = ToyOptions(num_blocks=24, num_slots=8)
SLOW = ToyOptions(min_step_seconds=0.01, max_step_seconds=0.01)


PREFILL, DECODE, RECOMPUTE = pb.ROW_KIND_PREFILL, pb.ROW_KIND_DECODE, pb.ROW_KIND_RECOMPUTE


def records(history: StepHistory) -> list[pb.StepRecord]:
    found, missed = history.after(0, 10**9)
    assert missed == 0
    return found


def positions(found: list[pb.StepRecord]) -> dict[int, dict[int, list[int]]]:
    """Return the computed positions of each request by kind of row."""
    by_request: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for record in found:
        rows = record.rows
        for number, start, count, kind in zip(rows.request, rows.start, rows.num_tokens, rows.kind, strict=True):
            by_request[number][kind] += range(start, start + count)
    return by_request


def first_cached(found: list[pb.StepRecord], number: int) -> int:
    return next(
        cached
        for record in found
        for request_number, cached in zip(record.rows.request, record.rows.cached_tokens, strict=True)
        if request_number == number
    )


def run(history: StepHistory, options: ToyOptions, requests: list[Request], **limits: Any) -> list[Stream]:
    core = CoreLimits(max_batch_size=options.num_slots, **limits)
    with EngineHarness(options=options, core=core, step_history=history) as harness:
        harness.start_worker()
        streams = [harness.submit(entry) for entry in requests]
        harness.wait_ended(streams)
        for stream in streams:
            stream.check(options.vocab_size)
    return streams


def test_every_position_is_in_one_row_that_is_no_recomputation() -> None:
    """With few blocks requests are preempted: their positions come again, as recomputation.

    The history keeps no prompt and no id.
    """
    history = StepHistory(4096)
    requests = [request(i, prompt_len=5 + i, max_tokens=24) for i in range(12)]
    streams = run(history, SMALL, requests)
    found = records(history)
    by_request = positions(found)
    recomputed = 0
    for number, stream in enumerate(streams, 1):
        assert isinstance(stream.end, Finished)
        computed = by_request[number][PREFILL] + by_request[number][DECODE]
        prompt_len = len(stream.request.prompt)
        cached = first_cached(found, number)
        assert cached == stream.end.stats.cached_tokens
        again = by_request[number][RECOMPUTE]  # a row that ends in new positions is one as a whole
        assert sorted(computed) == sorted(set(computed)), "a position twice"
        assert {*computed, *again} >= {*range(cached, prompt_len + stream.end.stats.completion_tokens - 1)}
        assert max(by_request[number][PREFILL]) < prompt_len
        assert len(again) >= stream.end.stats.recomputed_tokens
        recomputed += len(again)
    check_nothing_secret(history)
    assert recomputed > 0, "no request was preempted: the test shows nothing"
    for name in ("num_waiting", "num_running", "blocks_used", "blocks_cached"):
        assert max(getattr(record, name) for record in found) > 0, name
    assert sum(len(record.preempted) for record in found) == sum(
        stream.end.stats.preemptions for stream in streams if isinstance(stream.end, Finished)
    )


def test_each_request_starts_and_ends_once() -> None:
    history = StepHistory(4096)
    run(history, ToyOptions(), [request(i, max_tokens=1 + i) for i in range(20)])
    found = records(history)
    assert sorted(number for record in found for number in record.started) == [*range(1, 21)]
    assert sorted(number for record in found for number in record.ended) == [*range(1, 21)]
    for record in found:
        assert set(record.started) <= set(record.rows.request)
    assert [record.number for record in found] == [*range(1, len(found) + 1)]
    last = found[-1]
    assert (last.num_running, last.num_waiting, last.blocks_used) == (0, 0, 0)
    assert (last.num_slots, last.num_blocks) == (64, 512)
    assert last.total_time.ToNanoseconds() >= last.step_time.ToNanoseconds() >= 0


def test_a_request_that_is_cancelled_between_two_steps_ends_with_the_next() -> None:
    history = StepHistory(4096)
    with EngineHarness(options=SLOW, step_history=history) as harness:
        harness.start_worker()
        streams = [harness.submit(request(i, max_tokens=30)) for i in range(2)]
        harness.wait(lambda: len(streams[0].tokens) > 3)
        harness.engine.cancel("r0")
        harness.wait_ended(streams)
    ended = [number for record in records(history) for number in record.ended]
    assert ended == [1, 2]


def test_equal_prompts_show_their_cached_prefix() -> None:
    history = StepHistory(4096)
    options = ToyOptions(block_size=4)
    with EngineHarness(options=options, step_history=history) as harness:
        harness.start_worker()
        for index in range(2):
            entry = Request(f"r{index}", tuple(range(11)), request(0).sampling, 2)
            harness.wait_ended([harness.submit(entry)])
    found = records(history)
    # The first request ended with 12 positions: full blocks, of which the second copies all but the last token's.
    assert (first_cached(found, 1), first_cached(found, 2)) == (0, 10)
    assert positions(found)[2][PREFILL] == [10]


def test_a_replaced_worker_keeps_its_number_and_its_requests() -> None:
    history = StepHistory(4096)
    with EngineHarness(options=SLOW, step_history=history) as harness:
        worker = harness.start_worker()
        streams = [harness.submit(request(i, max_tokens=30)) for i in range(3)]
        harness.wait(lambda: len(streams[0].tokens) > 5)
        worker.send_signal(signal.SIGKILL)
        harness.start_worker()
        harness.wait_ended(streams)
    found = records(history)
    assert len({record.epoch for record in found}) == 2
    assert [*history.worker_indices] == [found[-1].epoch]
    assert {record.worker for record in found} == {0}
    assert sorted(number for record in found for number in record.started) == [1, 2, 3]
    assert any(RECOMPUTE in record.rows.kind for record in found)
    for number, kinds in positions(found).items():
        last = 12 + streams[number - 1].request.max_tokens - 1
        assert sorted({*kinds[PREFILL], *kinds[DECODE], *kinds[RECOMPUTE]}) == [*range(last)]


def test_history_and_reads_are_bounded_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_history, "MAX_ROWS", 40)
    history = StepHistory(4096)
    run(history, ToyOptions(), [request(i, max_tokens=30) for i in range(4)])
    found, missed = history.after(0, 10**9)
    assert 0 < sum(len(step.rows.slot) for step in found) <= 40
    assert missed == history.last - len(found) > 0
    assert found[-1].number == history.last
    number, sizes = missed, []
    while number < history.last:
        found, missed = history.after(number, 10)
        assert missed == 0
        sizes.append(sum(len(step.rows.slot) for step in found))
        number = found[-1].number
    assert max(sizes) <= 10 < sum(sizes)
    found, _ = history.after(0, 1)
    assert len(found) == 1, "a step of more rows is read alone"


def check_nothing_secret(history: StepHistory) -> None:
    """Follow every reference from the history: no sequence, no request, no first message of a slot."""
    seen: dict[int, Any] = {}
    unread: list[Any] = [vars(history)]
    while unread:
        entry = unread.pop()
        if id(entry) in seen or isinstance(entry, type):
            continue
        seen[id(entry)] = entry
        unread += gc.get_referents(entry)
    kinds = {type(entry) for entry in seen.values()}
    assert not kinds & {SlotInit, Sequence, Request}
    assert not [entry for entry in seen.values() if isinstance(entry, str) and entry.startswith("r1")]
    assert len(seen) > 100


@pytest.mark.parametrize(("before", "after"), [(2, 8), (8, 2)])
def test_history_follows_a_switched_number_of_slots(before: int, after: int) -> None:
    """A worker has 8 slots, of which the scheduler uses max_batch_size, and that may change while it runs."""
    history = StepHistory()
    with EngineHarness(options=SMALL, core=CoreLimits(max_batch_size=before), step_history=history) as harness:
        harness.start_worker()
        harness.wait_ended([harness.submit(request(number)) for number in range(before)])
        harness.engine.switch(max_batch_size=after)
        streams = [harness.submit(request(before + number)) for number in range(after + 2)]
        harness.wait_ended(streams)
        for stream in streams:
            stream.check(SMALL.vocab_size)
    found = records(history)
    assert {len({*record.rows.slot}) for record in found} >= {before, after}
    assert (found[0].num_slots, found[-1].num_slots) == (before, after)
    assert all(slot < record.num_slots for record in found for slot in record.rows.slot)
