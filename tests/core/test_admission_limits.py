"""Which requests the core accepts, and the error of each rejection."""

from __future__ import annotations

import pytest
from core.harness import CoreHarness

from lineclear.errors import DuplicateRequest, KvCapacityExceeded, PromptTooLong, QueueFull


def test_queue_full_by_requests() -> None:
    harness = CoreHarness(max_queue_size=2)
    harness.submit("a", 1)
    harness.submit("b", 1)
    with pytest.raises(QueueFull) as caught:
        harness.submit("c", 1)
    assert caught.value.metadata == {"waiting": "2", "limit": "2"}
    harness.step()
    harness.submit("c", 1)


def test_queue_full_by_tokens_accepts_first_request_of_any_size() -> None:
    harness = CoreHarness(max_queue_tokens=10)
    harness.submit("huge", 30)
    with pytest.raises(QueueFull) as caught:
        harness.submit("tiny", 1)
    assert caught.value.metadata == {"waiting_tokens": "30", "limit_tokens": "10"}
    harness.cancel("huge")
    harness.submit("six", 6)
    harness.submit("four", 4)
    with pytest.raises(QueueFull):
        harness.submit("tiny", 1)


def test_request_beyond_capacity_is_rejected_at_submit() -> None:
    harness = CoreHarness(worker_num_blocks=2, worker_max_model_len=40)
    with pytest.raises(PromptTooLong):
        harness.submit("long", 38, max_tokens=3)
    with pytest.raises(KvCapacityExceeded):
        harness.submit("big", 6, max_tokens=4)  # 9 positions, 3 blocks
    harness.submit("fits", 5, max_tokens=4)  # 8 positions, 2 blocks
    with pytest.raises(DuplicateRequest):
        harness.submit("fits", 1)
    assert harness.counters.requests_rejected == 3
    harness.run()
