"""Requests whose deadline would pass in the queue are rejected; requests that would start in time are not."""

from __future__ import annotations

import heapq
import random
from pathlib import Path

import pytest
from service.serving import error_of, serving

from lineclear.errors import DeadlineUnreachable, QueueFull
from lineclear.scheduler.requests.queue_limits import QueueLimiter, QueueLimits, QueuePlace
from lineclear.v1 import inference_pb2 as pb

IDS = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]))
NUM_SLOTS = 8


class SimulatedQueue:
    """A queue before eight slots, each busy for about one second per request.

    Every request is admitted, and counted where the estimate would reject it, so that wrong rejections are visible.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.quota = QueueLimiter(QueueLimits(requests=200, tokens=10**9), lambda: self.now)
        self.free = [self.now] * NUM_SLOTS  # heap of the times at which slots become free
        self.starts: list[tuple[float, int]] = []  # heap of start times and numbers of the waiting requests
        self.places: dict[int, QueuePlace] = {}
        self.late = self.rejected = self.wrong = self.count = 0

    def run(self, load: float, arrivals: int) -> None:
        """Simulate `arrivals` requests, single and in bursts, at `load` times the capacity of the slots."""
        while arrivals > 0:
            burst = self.rng.choice((1, 1, 1, 1, self.rng.randint(2, 16)))
            arrivals -= burst
            self._wait(self.rng.expovariate(load * NUM_SLOTS) * burst)
            for _ in range(burst):
                self._arrive(self.rng.uniform(0.05, 4.0))

    def _wait(self, seconds: float) -> None:
        then = self.now + seconds
        while self.starts and self.starts[0][0] <= then:
            start, number = heapq.heappop(self.starts)
            self.now = max(self.now, start)
            self.places.pop(number).release(started=True)
        self.now = then

    def _arrive(self, timeout: float) -> None:
        is_rejected = timeout < self.quota.min_wait_seconds()
        try:
            place = self.quota.reserve("", timeout)
        except QueueFull:
            return
        place.add_tokens(10)
        start = max(self.now, heapq.heappop(self.free)) + 0.01
        heapq.heappush(self.free, start + self.rng.lognormvariate(-0.3, 0.8))
        late = start > self.now + timeout
        self.count += 1
        self.places[self.count] = place
        heapq.heappush(self.starts, (start, self.count))
        self.late += late
        self.rejected += is_rejected
        self.wrong += is_rejected and not late


@pytest.mark.parametrize("seed", range(5))
def test_no_wrong_rejection_at_half_load(seed: int) -> None:
    queue = SimulatedQueue(seed)
    queue.run(0.5, 20_000)
    assert queue.wrong == 0
    assert queue.count > 19_000


@pytest.mark.parametrize("seed", range(5))
def test_overload_rejects_most_late_requests(seed: int) -> None:
    queue = SimulatedQueue(seed)
    queue.run(0.5, 2_000)
    queue.run(2.0, 10_000)
    assert queue.late > 5_000
    assert queue.rejected > 0.8 * queue.late
    assert queue.wrong == 0


def test_no_estimate_before_the_rate_is_known() -> None:
    now = 1000.0
    quota = QueueLimiter(QueueLimits(requests=200, tokens=1000, reject_unmeetable_deadlines=True), lambda: now)
    for _ in range(50):
        quota.reserve("", 0.001)
    assert quota.min_wait_seconds() == 0.0
    now += 60.0  # no request has started in a minute, so the rate is unknown
    quota.reserve("", 0.001)


def test_estimate_is_a_third_of_the_expected_wait() -> None:
    now = 1000.0
    quota = QueueLimiter(QueueLimits(requests=200, tokens=1000, reject_unmeetable_deadlines=True), lambda: now)
    places = [quota.reserve("") for _ in range(80)]
    for _ in range(40):  # five a second
        now += 0.2
        places.pop().release(started=True)
    assert quota.min_wait_seconds() == pytest.approx(40 / 5 / 3, rel=0.15)
    quota.reserve("", 5.0)
    with pytest.raises(DeadlineUnreachable) as caught:
        quota.reserve("", 2.0)
    assert (caught.value.code, caught.value.retry_after_seconds) == ("DEADLINE_EXCEEDED", None)
    assert caught.value.metadata["waiting"] == "41"
    assert len(quota) == 41
    assert quota.num_rejected == 1


async def test_call_with_unreachable_deadline_is_rejected(tmp_path: Path) -> None:
    async with serving(tmp_path, reject_unmeetable_deadlines=True) as s:
        first = s.generate(IDS, timeout=50)
        await s.engine.next_request(1)
        s.service.quota.min_wait_seconds = lambda: 20.0  # type: ignore[method-assign]
        error = await error_of(s.generate(IDS, timeout=10))
        assert isinstance(error, DeadlineUnreachable)
        assert error.metadata == {"waiting": "1", "least_wait_seconds": "20.0"}
        patient = s.generate(IDS, timeout=50)
        await s.engine.next_request(2)
        assert len(s.engine.submitted) == 2
        for call in (first, patient):
            call.cancel()
        await s.idle()
