"""Interrupted answers: both clients resume them, and no token is requested twice."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from client.conftest import Clock, finished, started, tokens

from lineclear import errors
from lineclear.client import RetryPolicy
from lineclear.client.retry import ResumeState, RetryState, may_resume
from lineclear.v1 import inference_pb2 as pb

QUICK = RetryPolicy(first_pause_seconds=0.001, max_pause_seconds=0.002)
WORDS = ("one", " two", " three", " four", " five")


def cut_after(server: Any, *cuts: int, error: errors.LineclearError | None = None) -> Any:
    """Return a script: the n-th call ends after so many more tokens; the call after the last completes the answer."""
    remaining = list(cuts)

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        have = len(request.resume.token_ids)
        seed = request.sampling.seed if request.sampling.HasField("seed") else 77
        yield started(prompt_tokens=3, seed=seed, model_fingerprint="f", prompt_digest="d", chat_time_us=5)
        until = have + remaining.pop(0) if remaining else None
        for index, word in list(enumerate(WORDS))[have:until]:
            yield tokens(index, index + 100, text=word)
        if until is not None:
            server.fail(context, error or errors.ShutdownInterrupted("gone", retry_after_seconds=0.0))
        yield finished(len(WORDS), usage=pb.Usage(completion_tokens=len(WORDS)))

    return script


@pytest.mark.parametrize("cuts", [(0,), (5,), (1, 0, 2), (2, 1, 1, 1, 0)])
def test_interrupted_answer_resumes_at_the_next_token(server: Any, client: Any, cuts: tuple[int, ...]) -> None:
    server.script = cut_after(server, *cuts)
    deltas, stream = client.with_settings(max_attempts=None, retry=QUICK).read("x", temperature=0.7)
    assert [delta.text for delta in deltas] == ["", *WORDS, ""]
    assert [delta.started is not None for delta in deltas] == [True] + [False] * 6
    result = stream.result
    assert (result.text, result.token_ids, result.started.seed) == ("".join(WORDS), tuple(range(100, 105)), 77)
    assert stream.resumes == result.resumes == len(cuts)
    assert (result.started.model_fingerprint, result.restarts) == ("f", 0)
    first, *others = server.requests
    assert not first.HasField("resume")
    have = 0
    for cut, request in zip(cuts, others, strict=True):
        have += cut
        assert list(request.resume.token_ids) == list(range(100, 100 + have))
        assert (request.sampling.seed, request.text) == (77, "x")
        resume = request.resume
        assert (resume.model_fingerprint, resume.prompt_digest, resume.chat_time_us) == ("f", "d", 5)


def test_resumes_with_progress_are_unbounded(server: Any, client: Any) -> None:
    once = client.with_settings(max_attempts=None, retry=replace(QUICK, max_resumes=1))
    server.script = cut_after(server, 1, 1, 1, 1)
    assert once.generate("x").resumes == 4
    server.script = cut_after(server, 1, 0, 1)
    with pytest.raises(errors.ShutdownInterrupted):
        once.generate("x")


@pytest.mark.parametrize("policy", [RetryPolicy(max_attempts=1), RetryPolicy(max_resumes=0)])
def test_resuming_can_be_switched_off(server: Any, client: Any, policy: RetryPolicy) -> None:
    server.script = cut_after(server, 2)
    with pytest.raises(errors.ShutdownInterrupted):
        client.with_settings(max_attempts=None, retry=policy).generate("x")
    assert len(server.requests) == 1


@pytest.mark.parametrize("error", [errors.InternalError("x"), errors.SlowConsumer("x")])
def test_error_of_the_request_is_not_resumed(server: Any, client: Any, error: errors.LineclearError) -> None:
    server.script = cut_after(server, 2, error=error)
    with pytest.raises(type(error)):
        client.with_settings(max_attempts=None, retry=QUICK).generate("x")
    assert len(server.requests) == 1


def test_repeated_tokens_are_data_loss(server: Any, client: Any) -> None:
    answer = [started(), tokens(0, 100, 101, text="one two")]
    server.play([*answer, errors.ShutdownInterrupted("gone", retry_after_seconds=0.0)], answer)
    with pytest.raises(errors.DataLoss):
        client.with_settings(max_attempts=None, retry=QUICK).generate("x")


def resumptions(clock: Clock, timeout_seconds: float | None = None, **policy: Any) -> ResumeState:
    chosen = RetryPolicy(**{"first_pause_seconds": 1.0, "max_pause_seconds": 3.0, **policy})
    return ResumeState(RetryState(chosen, timeout_seconds, clock, lambda: 0.5))


def test_resume_pauses_double_until_progress() -> None:
    found = resumptions(Clock())
    assert [found.pause_after(errors.Unreachable("x")) for _ in range(3)] == [0.5, 1.0, 1.5]
    found.on_progress()
    assert found.pause_after(errors.Unreachable("x")) == 0.5
    asked = errors.ShutdownInterrupted("x", retry_after_seconds=4.0)
    assert found.pause_after(asked) == 5.0, "what the server asked for, and the draw on top"
    assert found.count == 5


def test_resume_without_progress_times_out() -> None:
    clock = Clock()
    found = resumptions(clock, resume_timeout_seconds=10.0)
    found.pause_after(errors.Unreachable("x"))
    clock.now += 9
    found.pause_after(errors.Unreachable("x"))
    clock.now += 2
    with pytest.raises(errors.Unreachable):
        found.pause_after(errors.Unreachable("x"))
    found.on_progress()
    found.pause_after(errors.Unreachable("x"))


def test_resumes_without_progress_are_bounded() -> None:
    found = resumptions(Clock(), max_resumes=2)
    for _ in range(100):
        found.pause_after(errors.Unreachable("x"))
        found.pause_after(errors.Unreachable("x"))
        with pytest.raises(errors.Unreachable):
            found.pause_after(errors.Unreachable("x"))
        found.on_progress()
    assert found.count == 200


def test_restarts_without_end_raise() -> None:
    found = resumptions(Clock(), max_resumes=2)
    for _ in range(2):
        found.pause_after(errors.ModelChanged("x"), restarts=True)
        found.on_progress()
    with pytest.raises(errors.ModelChanged):
        found.pause_after(errors.ModelChanged("x"), restarts=True)
    found.pause_after(errors.Unreachable("x"))


def test_resume_pause_beyond_the_deadline_raises() -> None:
    with pytest.raises(errors.Unreachable):
        resumptions(Clock(), timeout_seconds=0.25).pause_after(errors.Unreachable("x"))


@pytest.mark.parametrize(
    ("error", "at_first", "again"),
    [
        (errors.Unreachable("x", retry_after_seconds=math.inf), False, False),
        (errors.Unreachable("x"), True, True),
        (errors.ShutdownInterrupted("x"), True, True),
        (errors.ServerStarting("x"), True, True),
        (errors.WorkerUnavailable("x"), True, True),
        (errors.DuplicateRequest("x"), False, True),
        (errors.QueueFull("x", retry_after_seconds=1.0), False, True),
        (errors.QueueFull("x"), False, False),
        (errors.InternalError("x"), False, False),
    ],
)
def test_which_errors_are_resumed(error: errors.LineclearError, at_first: bool, again: bool) -> None:
    assert (may_resume(error, False), may_resume(error, True)) == (at_first, again)


def test_retries_and_resumes_are_logged_without_content(
    server: Any, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    interrupted = [started(), tokens(0, 1, text="secret answer"), errors.ShutdownInterrupted("gone")]
    server.play(interrupted, [started(), finished(1)])
    server.failures = [errors.QueueFull("full", retry_after_seconds=0.0)]
    with caplog.at_level("INFO", "lineclear"):
        client.with_settings(max_attempts=4).generate("secret prompt")
    own = [record for record in caplog.records if record.name == "lineclear"]
    assert [(record.levelname, record.getMessage().partition(";")[0]) for record in own] == [
        ("INFO", "a call was not accepted (QUEUE_FULL)"),
        ("WARNING", "an answer was interrupted (SHUTDOWN_INTERRUPTED)"),
    ]
    assert "secret" not in caplog.text
