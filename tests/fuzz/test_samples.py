"""A sample of each fuzz driver, so that they run when they are needed."""

from __future__ import annotations

from fuzz import frames


def test_damaged_frames_are_refused_or_read() -> None:
    found = frames.decoder(5000, seed=1)
    assert found["refused"] > 1000
    assert found["read"] > 100


def test_damaged_frames_between_those_of_a_worker_change_nothing() -> None:
    found = frames.live(2000, seed=2)
    assert found["bad_frames"] >= 2000
    assert found["canaries_exact"] >= 4
