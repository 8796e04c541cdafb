"""A sample of each fuzz driver, so that they run when they are needed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from fuzz import frames, requests
from support.patience import PATIENCE_SECONDS
from support.toy_service import toy_service


def test_damaged_frames_are_refused_or_read() -> None:
    found = frames.decoder(5000, seed=1)
    assert found["refused"] > 1000
    assert found["read"] > 100


def test_damaged_frames_between_those_of_a_worker_change_nothing() -> None:
    found = frames.live(2000, seed=2)
    assert found["bad_frames"] >= 2000
    assert found["canaries_exact"] >= 4


def test_damaged_requests_get_their_status_and_nobody_else_notices(tmp_path: Path) -> None:
    with toy_service(tmp_path) as service:
        outcome = asyncio.run(requests.damaged(service, 600, seed=3))
        assert service.leave() == 0
    assert outcome.wrong == []
    assert outcome.canaries == 6
    assert sum(outcome.statuses.values()) == 600
    assert outcome.statuses["INVALID_ARGUMENT"] > 100


def test_calls_that_are_given_up_at_once_leave_the_others_alone(tmp_path: Path) -> None:
    with toy_service(tmp_path, min_step_seconds=0.002, max_step_seconds=0.002) as service:
        found = asyncio.run(requests.opened_and_given_up(service, 500, quiet_seconds=0.2))
        assert service.leave() == 0
    assert found.held == 0
    assert found.quiet > 0
    assert 0 < found.meanwhile < PATIENCE_SECONDS
    assert found.grown_bytes < 64 * 2**20


def test_what_would_be_harm_is_called_harm() -> None:
    fine = requests.GivenUp(1000, 10.0, quiet=0.01, meanwhile=0.03, grown_bytes=2**20, held=0)
    assert fine.is_harmless
    for harm in ({"meanwhile": 0.031}, {"held": 1}, {"grown_bytes": 2**24}):
        assert not replace(fine, **harm).is_harmless
