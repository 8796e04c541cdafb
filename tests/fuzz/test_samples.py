"""A sample of each fuzz driver, so that they run when they are needed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from fuzz import frames, requests
from fuzz.calls import Call
from support import toy_service as toy_service_module
from support.toy_service import toy_service

from lineclear.v1 import inference_pb2 as pb


def test_damaged_frames_are_refused_or_read() -> None:
    found = frames.decoder(5000, seed=1)
    assert found["refused"] > 1000
    assert found["read"] > 100


def test_damaged_frames_between_those_of_a_worker_change_nothing() -> None:
    found = frames.live(2000, seed=2)
    assert found["bad_frames"] >= 2000
    assert found["canaries_exact"] >= 4


def test_damaged_requests_get_their_status_and_nobody_else_notices(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with toy_service(tmp_path, log=log) as service:
        outcome = asyncio.run(requests.damaged(service, 600, seed=3))
        assert service.leave() == 0
    assert outcome.wrong == []
    assert requests.incidents(log) == []
    assert outcome.canaries == 6
    assert sum(outcome.statuses.values()) == 600
    assert outcome.statuses["INVALID_ARGUMENT"] > 100
    assert outcome.methods.keys() >= {"Generate", "Session", "Submit", "Attach", "GetResult", "Cancel"}


_PROGRAM = """
import sys
from lineclear.scheduler.engine.engine import Engine
from lineclear.scheduler.main import main
Engine.{method} = lambda *arguments: None
sys.exit(main(sys.argv[1:]))
"""


def test_a_call_that_hangs_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that takes requests and forgets them."""
    monkeypatch.setattr(toy_service_module, "PROGRAM", ("-c", _PROGRAM.format(method="submit")))
    monkeypatch.setattr(requests, "HANG_SECONDS", 0.5)
    with toy_service(tmp_path) as service:
        outcome = asyncio.run(requests.damaged(service, 40, seed=3))
    assert outcome.statuses["HANG"] > 0
    assert any(line.startswith("HANG of ") for line in outcome.wrong)
    assert any(line.startswith("canary 0 got DEADLINE_EXCEEDED") for line in outcome.wrong)


def test_a_deadline_or_a_cancellation_needs_its_reason() -> None:
    request = pb.GenerateRequest(text="a")
    plain = Call("Generate", (request.SerializeToString(),))
    assert plain.may_end_with("INVALID_ARGUMENT")
    for status in ("HANG", "INTERNAL", "UNKNOWN", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "UNAUTHENTICATED"):
        assert not plain.may_end_with(status)
    assert replace(plain, deadline_seconds=0.01).may_end_with("DEADLINE_EXCEEDED")
    named = replace(plain, messages=(pb.GenerateRequest(request_id="a").SerializeToString(),))
    assert named.may_end_with("CANCELLED")
    submit = pb.SubmitRequest(request=request)
    assert not Call("Submit", (submit.SerializeToString(),)).may_end_with("DEADLINE_EXCEEDED")
    submit.timeout.seconds = -1
    assert Call("Submit", (submit.SerializeToString(),)).may_end_with("DEADLINE_EXCEEDED")


def test_calls_that_are_given_up_at_once_cost_little(tmp_path: Path) -> None:
    with toy_service(tmp_path, min_step_seconds=0.002, max_step_seconds=0.002) as service:
        found = asyncio.run(requests.opened_and_given_up(service, 500, quiet_seconds=0.2))
        assert service.leave() == 0
    assert found.held == 0
    assert found.is_cancelled, found
    assert found.quiet > 0
    assert found.meanwhile > 0
    assert found.grown_bytes < 64 * 2**20


def test_a_server_that_goes_on_for_callers_who_have_gone_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toy_service_module, "PROGRAM", ("-c", _PROGRAM.format(method="cancel")))
    with toy_service(tmp_path) as service:
        found = asyncio.run(requests.opened_and_given_up(service, 100, quiet_seconds=0.1))
    assert not found.is_cancelled, found


def test_what_would_be_harm_is_called_harm() -> None:
    fine = requests.GivenUp(1000, 10.0, quiet=0.01, meanwhile=0.03, grown_bytes=2**20, held=0, tokens=10_000)
    assert fine.is_harmless
    for harm in ({"meanwhile": 0.031}, {"held": 1}, {"grown_bytes": 2**24}, {"tokens": 400_000}):
        assert not replace(fine, **harm).is_harmless
