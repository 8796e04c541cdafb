"""Deadlines that would pass in the queue: refused at the door, and nobody whom the queue would have served in time."""

from __future__ import annotations

import heapq
import random
from pathlib import Path

import pytest
from service.serving import error_of, serving

from lineclear.errors import DeadlineUnreachable, QueueFull
from lineclear.scheduler.requests.queue_quota import QueueQuota, QuotaLimits
from lineclear.v1 import inference_pb2 as pb

IDS = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]))
NUM_SLOTS = 8


class Line:
    """A waiting room before eight slots that are each taken for about a second, from hour to hour at another load.

    Whether somebody would have been refused is asked, and everybody is let in: so what would have become of them shows.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.room = QueueQuota(QuotaLimits(requests=200, tokens=10**9), lambda: self.now)
        self.free = [self.now] * NUM_SLOTS  # when each slot is free, a heap
        self.starts: list[float] = []  # of those who wait, ascending
        self.late = self.refused = self.wrong = self.count = 0

    def run(self, load: float, arrivals: int) -> None:
        """So many come, alone and in bursts, `load` times as fast as the slots can take them."""
        while arrivals > 0:
            burst = self.rng.choice((1, 1, 1, 1, self.rng.randint(2, 16)))
            arrivals -= burst
            self._wait(self.rng.expovariate(load * NUM_SLOTS) * burst)
            for _ in range(burst):
                self._come(self.rng.uniform(0.05, 4.0))

    def _wait(self, seconds: float) -> None:
        then = self.now + seconds
        while self.starts and self.starts[0] <= then:
            self.now = max(self.now, heapq.heappop(self.starts))
            self.room.release("", 10, began=True)
        self.now = then

    def _come(self, patience: float) -> None:
        hopeless = patience < self.room.min_wait_seconds()
        try:
            self.room.reserve("", patience)
        except QueueFull:
            return
        self.room.add_tokens("", 10)
        start = max(self.now, heapq.heappop(self.free)) + 0.01
        heapq.heappush(self.free, start + self.rng.lognormvariate(-0.3, 0.8))
        heapq.heappush(self.starts, start)
        late = start > self.now + patience
        self.count += 1
        self.late += late
        self.refused += hopeless
        self.wrong += hopeless and not late


@pytest.mark.parametrize("seed", range(5))
def test_at_half_load_nobody_is_refused_who_would_have_begun_in_time(seed: int) -> None:
    line = Line(seed)
    line.run(0.5, 20_000)
    assert line.wrong == 0
    assert line.count > 19_000


@pytest.mark.parametrize("seed", range(5))
def test_where_twice_as_many_come_as_can_be_served_most_who_would_wait_for_nothing_are_told(seed: int) -> None:
    line = Line(seed)
    line.run(0.5, 2_000)
    line.run(2.0, 10_000)
    assert line.late > 5_000
    assert line.refused > 0.8 * line.late
    assert line.wrong == 0


def test_nothing_is_predicted_before_the_queue_has_shown_its_pace() -> None:
    now = 1000.0
    room = QueueQuota(QuotaLimits(requests=200, tokens=1000, reject_unmeetable_deadlines=True), lambda: now)
    for _ in range(50):
        room.reserve("", 0.001)
    assert room.min_wait_seconds() == 0.0
    now += 60.0  # nobody began in a minute: what the queue waits for may end in a moment
    room.reserve("", 0.001)


def test_it_is_a_third_of_the_wait_at_the_pace_since_the_queue_was_empty() -> None:
    now = 1000.0
    room = QueueQuota(QuotaLimits(requests=200, tokens=1000, reject_unmeetable_deadlines=True), lambda: now)
    for _ in range(80):
        room.reserve("")
    for _ in range(8):  # five a second
        for _ in range(5):
            now += 0.2
            room.release("", 0, began=True)
    assert room.min_wait_seconds() == pytest.approx(40 / 5 / 3, rel=0.15)
    room.reserve("", 5.0)
    with pytest.raises(DeadlineUnreachable) as caught:
        room.reserve("", 2.0)
    assert (caught.value.code, caught.value.retry_after_seconds) == ("DEADLINE_EXCEEDED", None)
    assert caught.value.metadata["waiting"] == "41"
    assert len(room) == 41
    assert room.num_refused == 1


async def test_a_call_that_would_wait_for_nothing_is_told_so_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path, reject_unmeetable_deadlines=True) as s:
        first = s.generate(IDS, timeout=50)
        await s.engine.next_request(1)
        s.service._quota.min_wait_seconds = lambda: 20.0  # type: ignore[method-assign]
        error = await error_of(s.generate(IDS, timeout=10))
        assert isinstance(error, DeadlineUnreachable)
        assert error.metadata == {"waiting": "1", "least_wait_seconds": "20.0"}
        patient = s.generate(IDS, timeout=50)
        await s.engine.next_request(2)
        assert len(s.engine.submitted) == 2
        for call in (first, patient):
            call.cancel()
        await s.idle()
