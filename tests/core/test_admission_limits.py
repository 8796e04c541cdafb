"""Who is let in, and who is told what instead, in examples to check by hand."""

from __future__ import annotations

import pytest
from core.harness import Rig

from lineclear.errors import DuplicateRequest, KvCapacityExceeded, PromptTooLong, QueueFull, ServerDraining


def test_the_queue_has_a_limit_in_requests() -> None:
    rig = Rig(max_queue_size=2)
    rig.submit("a", 1)
    rig.submit("b", 1)
    with pytest.raises(QueueFull) as caught:
        rig.submit("c", 1)
    assert caught.value.metadata == {"waiting": "2", "limit": "2"}
    rig.step()
    rig.submit("c", 1)


def test_the_queue_has_a_limit_in_tokens_but_takes_one_request_of_any_size() -> None:
    rig = Rig(max_queue_tokens=10)
    rig.submit("huge", 30)
    with pytest.raises(QueueFull):
        rig.submit("tiny", 1)
    rig.cancel("huge")
    rig.submit("six", 6)
    rig.submit("four", 4)
    with pytest.raises(QueueFull):
        rig.submit("tiny", 1)


def test_what_can_never_run_is_refused_at_the_door() -> None:
    rig = Rig(worker_num_blocks=2, worker_max_model_len=40)
    with pytest.raises(PromptTooLong):
        rig.submit("long", 38, max_tokens=3)
    with pytest.raises(KvCapacityExceeded):
        rig.submit("big", 6, max_tokens=4)  # 9 positions, 3 blocks
    rig.submit("fits", 5, max_tokens=4)  # 8 positions, 2 blocks
    with pytest.raises(DuplicateRequest):
        rig.submit("fits", 1)
    assert rig.counters.requests_rejected == 3
    rig.run()


def test_draining_refuses_and_finishes_what_is_here() -> None:
    rig = Rig(strategy="fixed_size")
    rig.submit("a", 5)
    assert rig.step() is None  # one of eight
    rig.core.drain(rig.now)
    with pytest.raises(ServerDraining):
        rig.submit("b", 5)
    rig.run()
    assert rig.core.snapshot().draining
