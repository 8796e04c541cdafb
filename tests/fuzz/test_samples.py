"""Short runs of the fuzz drivers, and checks that they detect planted errors."""

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


def test_damaged_frames_beside_a_worker_are_dropped() -> None:
    found = frames.live(2000, seed=2)
    assert found["bad_frames"] >= 2000
    assert found["canaries_exact"] >= 4


def test_damaged_requests_get_their_status(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with toy_service(tmp_path, log=log) as service:
        outcome = asyncio.run(requests.damaged(service, 600, seed=3))
        assert service.stop() == 0
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


def test_hanging_call_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler accepts requests and drops them."""
    monkeypatch.setattr(toy_service_module, "CODE", _PROGRAM.format(method="submit"))
    monkeypatch.setattr(requests, "HANG_SECONDS", 0.5)
    with toy_service(tmp_path) as service:
        outcome = asyncio.run(requests.damaged(service, 40, seed=3))
    assert outcome.statuses["HANG"] > 0
    assert any(line.startswith("HANG of ") for line in outcome.wrong)
    assert any(line.startswith("canary 0 got DEADLINE_EXCEEDED") for line in outcome.wrong)


def test_deadline_and_cancellation_need_a_reason() -> None:
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


def test_cancelled_calls_cost_little(tmp_path: Path) -> None:
    with toy_service(tmp_path, min_step_seconds=0.002, max_step_seconds=0.002) as service:
        found = asyncio.run(requests.open_and_cancel(service, 500, quiet_seconds=0.2))
        assert service.stop() == 0
    assert found.held == 0
    assert found.is_cancelled, found
    assert found.quiet > 0
    assert found.during > 0
    assert found.grown_bytes < 64 * 2**20


def test_server_that_ignores_cancels_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy_service_module, "CODE", _PROGRAM.format(method="cancel"))
    monkeypatch.setattr(requests, "_SETTLE_SECONDS", 0.5)
    with toy_service(tmp_path) as service:
        found = asyncio.run(requests.open_and_cancel(service, 100, quiet_seconds=0.1))
    assert not found.is_cancelled, found


def test_each_kind_of_harm_is_found() -> None:
    fine = requests.CancelledCalls(1000, 10.0, quiet=0.01, during=0.03, grown_bytes=2**20, held=0, tokens=10_000)
    assert fine.is_harmless
    for harm in ({"during": 0.031}, {"held": 1}, {"grown_bytes": 2**24}, {"tokens": 400_000}):
        assert not replace(fine, **harm).is_harmless
