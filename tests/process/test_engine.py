"""The engine over real sockets and worker processes: requests, events and their order."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import structlog
from support.engine_harness import EngineHarness, Stream, eventually, request
from support.time_limits import PATIENCE_SECONDS, SOON_SECONDS
from support.toy_runner import ToyRunner
from support.toy_worker import ToyOptions
from support.worker_peer import hello, peers

from lineclear import errors
from lineclear.scheduler.app import _engine_limits
from lineclear.scheduler.core.events import Event, Failed, Finished, FinishReason
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.sequence import Request
from lineclear.scheduler.engine.engine import EngineStuck
from lineclear.scheduler.engine.worker_registry import WorkerRegistry
from lineclear.scheduler.engine.worker_session import WorkerTimeouts
from lineclear.scheduler.engine.worker_subscribers import log_join
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.wire.messages import Heartbeat, LogLevel, Message, SetLogLevel

SLOW = ToyOptions(min_step_seconds=0.02, max_step_seconds=0.02)


def error_of(stream: Stream) -> errors.LineclearError:
    assert isinstance(stream.end, Failed)
    return stream.end.error


def test_many_answers_from_many_threads_are_exact_through_sockets() -> None:
    with EngineHarness(num_workers=1) as harness:
        streams: list[Stream] = []

        def send(first: int) -> None:
            for i in range(first, first + 10):
                streams.append(harness.submit(request(i, prompt_len=5 + i % 40, max_tokens=8 + i % 50)))

        threads = [threading.Thread(target=send, args=(10 * i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(streams) == 80
        harness.check(streams)
        snapshot = harness.snapshot()
        assert snapshot.worker.num_joins == 1
        assert snapshot.link.bad_frames == snapshot.membership.stale_messages == 0


def test_cancel_and_finish_end_one_request_only() -> None:
    with EngineHarness(options=SLOW, num_workers=1) as harness:
        streams = [harness.submit(request(i, max_tokens=30)) for i in range(4)]
        harness.wait(lambda: len(streams[0].tokens) > 5 and len(streams[2].tokens) > 5)
        harness.engine.cancel("r0")
        harness.engine.cancel("r1", errors.WorkerUnavailable("given up"))
        harness.engine.finish("r2", 5)
        harness.engine.cancel("nobody")
        harness.wait_ended(streams)
        assert isinstance(error_of(streams[0]), errors.Cancelled)
        assert isinstance(error_of(streams[1]), errors.WorkerUnavailable)
        assert isinstance(streams[2].end, Finished)
        assert streams[2].end.reason is FinishReason.STOP_STRING
        assert streams[2].end.stats.completion_tokens == 5
        streams[3].check(harness.options.vocab_size)


def test_deadline_years_ahead_without_a_worker() -> None:
    """One that is near wakes the idle engine."""
    with EngineHarness() as harness:
        begin = time.monotonic()
        far = harness.submit(Request("far", (1, 2, 3), request(1).sampling, 5, deadline=begin + 1e9))
        near = harness.submit(Request("near", (1, 2), request(1).sampling, 5, deadline=begin + 0.1))
        harness.wait_ended([near])
        assert isinstance(error_of(near), errors.DeadlineExceeded)
        assert 0.1 <= time.monotonic() - begin < SOON_SECONDS
        harness.start_worker()
        harness.check([far])


def test_full_inbox_refuses_requests() -> None:
    with EngineHarness(max_inbox=10, num_workers=1) as harness:
        with harness.held():  # the engine sits in publish() and cannot empty its inbox
            streams = [harness.submit(request(i)) for i in range(15)]
        harness.wait_ended(streams)
        harness.check(streams[:10])
        for stream in streams[10:]:
            assert isinstance(error_of(stream), errors.QueueFull)
            assert error_of(stream).retry_after_seconds is not None


def test_inbox_holds_a_submit_and_a_cancel_of_each_request() -> None:
    size = 1000
    settings = SchedulerSettings(model="m", max_queue_size=size, max_batch_size=1)
    limits = CoreLimits(max_queue_size=size)
    with EngineHarness(max_inbox=_engine_limits(settings, "").max_inbox, core=limits, num_workers=1) as harness:
        with harness.held():
            streams = []
            for i in range(size):
                streams.append(harness.submit(request(i)))
                harness.engine.cancel(streams[-1].request.request_id)
        harness.wait_ended(streams)
        assert {type(error_of(stream)) for stream in streams} == {errors.Cancelled}


def test_error_on_the_engine_thread_is_fatal() -> None:
    with EngineHarness(num_workers=1) as harness:

        def broken(now: float) -> None:
            raise KeyError("a bug")

        harness.core.expire = broken  # type: ignore[assignment]
        harness.engine.submit(request(1))
        harness.wait(lambda: bool(harness.fatal))
        assert isinstance(harness.engine.failure, KeyError)
        assert harness.fatal == [harness.engine.failure]


def test_suspended_process_does_not_lose_its_worker() -> None:
    """After a suspend the clock has jumped, and the worker's messages are still in the kernel's buffers."""
    ahead = [0.0]
    with EngineHarness(
        options=ToyOptions(heartbeat_seconds=0.5), clock=lambda: time.monotonic() + ahead[0], num_workers=1
    ) as harness:
        for number in range(3):
            heard = harness.engine.snapshot().link.messages
            eventually(lambda heard=heard: harness.engine.snapshot().link.messages > heard)
            ahead[0] += 3600.0  # just after a heartbeat: the next word of the worker is half a second away
            stream = harness.submit(request(number))
            harness.check([stream])
        assert harness.losses == []
        assert harness.broken == []


def test_suspended_process_with_commands_to_run_does_not_lose_its_worker() -> None:
    """The next iteration follows without a wait, whose end would show how late it is."""
    ahead = [0.0]
    with EngineHarness(clock=lambda: time.monotonic() + ahead[0], num_workers=1) as harness:

        def suspend() -> None:
            ahead[0] += 3600.0
            harness.engine.call_on_engine_thread(lambda: None)

        for number in range(3):
            harness.engine.call_on_engine_thread(suspend)
            harness.check([harness.submit(request(number))])
        assert harness.losses == []


def test_plans_are_sent_before_their_events_are_published() -> None:
    """A slow reader does not delay the device: the worker computes while events are published."""
    with EngineHarness(num_workers=1) as harness:
        sent: list[int] = []

        def slow(events: Sequence[Event]) -> None:
            sent.append(harness.link.counters.plans)

        harness.on_publish = slow
        stream = harness.submit(request(1, max_tokens=5))
        harness.wait_ended([stream])
        assert sent[0] >= 1, "the first events came before the first plan"


def test_snapshot_counts_requests_steps_and_bytes() -> None:
    with EngineHarness() as harness:
        assert harness.engine.worker_status.hello is None
        harness.start_worker()
        harness.wait_ended([harness.submit(request(i, max_tokens=100)) for i in range(30)])
        eventually(lambda: harness.engine.snapshot().core.counters.requests_finished == 30)
        snapshot = harness.engine.snapshot()
        assert snapshot.worker == harness.engine.worker_status
        assert snapshot.core.steps_in_flight == snapshot.core.num_requests_running == 0
        steps = snapshot.core.counters.steps
        assert snapshot.link.plans == steps == len(snapshot.step_seconds)
        assert {epoch for epoch, _ in snapshot.step_seconds} == {harness.engine.worker_status.hello.epoch}
        assert all(0 <= seconds < 60 for _, seconds in snapshot.step_seconds)
        assert min(snapshot.link.bytes_sent, snapshot.link.bytes_received) > 10 * steps
        for seconds in (
            snapshot.link.encode_seconds,
            snapshot.link.decode_seconds,
            snapshot.counters.plan_seconds,
            snapshot.counters.apply_seconds,
            snapshot.counters.publish_seconds,
        ):
            assert 0 < seconds < 60


def spoil(harness: EngineHarness) -> None:
    """Give one slot back twice."""
    free = harness.core.state.workers[harness.core.workers[0]].batch.unused_slots
    harness.engine.call_on_engine_thread(lambda: free.append(free[0]))


@pytest.mark.parametrize(("every", "max_tokens"), [(8, 400), (10**6, 1)], ids=["while it runs", "when it is idle"])
def test_invariant_violation_ends_the_engine(every: int, max_tokens: int) -> None:
    options = ToyOptions(min_step_seconds=0.002, max_step_seconds=0.002)
    with EngineHarness(check_every_steps=every, options=options, num_workers=1) as harness:
        harness.wait_ended([harness.submit(request(0, max_tokens=100))])
        checks = harness.snapshot().counters.checks
        assert checks == 1 if every > 100 else checks >= 1
        spoil(harness)
        stream = harness.submit(request(1, max_tokens=max_tokens))
        harness.wait(lambda: bool(harness.fatal), what="the end of the engine")
        assert isinstance(harness.fatal[0], AssertionError)
        assert len(stream.tokens) < 400


def test_idle_engine_iterates_only_for_heartbeats() -> None:
    with EngineHarness(options=ToyOptions(heartbeat_seconds=0.1), num_workers=1) as harness:
        eventually(lambda: harness.engine.snapshot().link.messages >= 2)
        before = harness.engine.snapshot()
        eventually(lambda: harness.engine.snapshot().link.messages >= before.link.messages + 10)
        after = harness.engine.snapshot()
        assert after.counters.iterations - before.counters.iterations <= 3 * (
            after.link.messages - before.link.messages
        )


def test_stop_ends_the_thread_and_returns_the_link() -> None:
    with EngineHarness() as harness:
        for _ in range(2):
            harness.engine.stop()
        registry = WorkerRegistry(WorkerTimeouts())
        assert list(harness.link.receive(registry, time.monotonic())) == []
        harness.engine.submit(request(1))  # into the void, without harm


def warnings_of(event: str, limits: CoreLimits, **hello: Any) -> list[Any]:
    """Return the lines that a worker with these values leaves when it joins."""
    with structlog.testing.capture_logs() as lines:
        log_join(replace(ToyRunner().hello(1), **hello), limits)
    return [line for line in lines if line["event"] == event]


def test_worker_smaller_than_the_limits_is_a_warning() -> None:
    """In separate containers, scheduler and worker get separate flags."""
    limits = CoreLimits(max_batch_size=128, target_batch_tokens=8192)
    told = warnings_of("worker_caps_batches", limits, num_slots=64, max_step_tokens=4096)
    assert [(line["flag"], line["value"], line["worker_value"]) for line in told] == [
        ("--max-batch-size", 128, 64),
        ("--target-batch-tokens", 8192, 4096),
    ]
    assert told[0]["hint"] == "start the worker with --max-batch-size 128, or lower the scheduler's"
    assert warnings_of("worker_caps_batches", limits, num_slots=128, max_step_tokens=8192) == []


@pytest.mark.parametrize(("wanted", "has"), [(True, ""), (False, "draft"), (True, "draft"), (False, "")])
def test_a_worker_that_drafts_in_another_way_is_a_warning(wanted: bool, has: str) -> None:
    limits = CoreLimits(speculative_method="draft_model" if wanted else "prompt_lookup")
    told = warnings_of("worker_differs_in_drafts", limits, draft_model=has)
    assert bool(told) == (wanted != bool(has))
    assert not told or ("--draft-model DIR" if wanted else "--speculative-method draft_model") in told[0]["hint"]


def test_a_worker_with_recurrent_state_is_logged() -> None:
    state = {"has_recurrent_state": True, "num_state_snapshots": 0}
    (told,) = warnings_of("worker_has_recurrent_state", CoreLimits(), **state)
    assert (told["log_level"], told["num_state_snapshots"]) == ("info", 0)
    assert "drafts" in told["hint"]
    (told,) = warnings_of("worker_has_recurrent_state", CoreLimits(speculative_method="prompt_lookup"), **state)
    assert told["log_level"] == "warning", "the server was started with --speculative-method"
    assert warnings_of("worker_has_recurrent_state", CoreLimits()) == []


def test_unsent_log_level_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with EngineHarness() as harness, peers(harness.directory) as peer:
        worker = peer(7)
        worker.send(hello(7))
        harness.wait_joined()
        send, told = harness.link.send_control, list[Message]()

        def refuse_once(message: SetLogLevel) -> bool:
            told.append(message)
            return len(told) > 1 and send(message)

        monkeypatch.setattr(harness.link, "send_control", refuse_once)
        harness.engine.set_log_level("warning")
        eventually(lambda: bool(told))
        worker.send(Heartbeat(7, 0))
        assert worker.receive_kind(SetLogLevel) == SetLogLevel(7, LogLevel.WARNING)
        later = peer(9)
        later.send(hello(9))
        assert later.receive_kind(SetLogLevel) == SetLogLevel(9, LogLevel.WARNING)
        assert [message.epoch for message in told] == [7, 7, 9], "each worker is sent a level once"


def test_stuck_thread_is_reported_and_keeps_its_link() -> None:
    goes_on = threading.Event()
    with EngineHarness() as harness:
        harness.engine.call_on_engine_thread(lambda: goes_on.wait(PATIENCE_SECONDS))
        eventually(lambda: harness.engine.busy_seconds() > 0)
        with structlog.testing.capture_logs() as lines, pytest.raises(EngineStuck):
            harness.engine.stop(0.1)
        assert [line["event"] for line in lines] == ["engine_not_stopped"]
        harness.link.close()
        goes_on.set()
        harness.engine.stop()
