"""The model is replaced during an answer: ModelChanged with the answer so far, or a restart."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from lineclear.client import Client, RetryPolicy
from lineclear.client.testing import Answer, FakeTransport
from lineclear.errors import DataLoss, LineclearError, ModelChanged, ModelReplaced, ShutdownInterrupted
from lineclear.v1 import inference_pb2 as pb

QUICK = RetryPolicy(first_pause_seconds=0.001, max_pause_seconds=0.002)
OLD, NEW = "0123456789abcdef", "fedcba9876543210"
OF = {OLD: ("one", " two", " three"), NEW: ("uno", " dos", " tres", " quatro")}


class Replaced:
    """Return a script: each call gets the next of `models`, which rejects the resume of another model's answer.

    Every call but the last ends with `error` after `then` tokens.
    """

    def __init__(self, server: Any, models: list[str], *, then: int = 2, error: LineclearError | None = None) -> None:
        self.server, self.models, self.then = server, models, then
        self.error = error or ShutdownInterrupted("gone", retry_after_seconds=0.0)
        self.checks = True

    def __call__(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        server = self.server
        model = self.models.pop(0)
        resume = request.resume
        if self.checks and request.HasField("resume") and resume.model_fingerprint != model:
            server.fail(context, ModelChanged("another model", metadata={"model_fingerprint": model}))
        fields = {"seed": request.sampling.seed or 77, "prompt_digest": "d", "chat_time_us": 5}
        yield server.started(model_fingerprint=model, **fields)
        words = list(enumerate(OF[model]))[len(resume.token_ids) :]
        for index, word in words[: self.then] if self.models else words:
            yield server.tokens(index, index + 100, text=word)
        if self.models:
            server.fail(context, self.error)
        yield server.finished(len(OF[model]))


def test_resume_sends_seed_fingerprint_and_digest(server: Any, client: Any) -> None:
    server.script = Replaced(server, [OLD, OLD])
    result = client.with_settings(max_attempts=None, retry=QUICK).generate("x")
    assert (result.text, result.resumes, result.restarts) == ("one two three", 1, 0)
    assert result.started.model_fingerprint == OLD
    resume = server.requests[1].resume
    assert (resume.model_fingerprint, resume.prompt_digest, resume.chat_time_us) == (OLD, "d", 5)


@pytest.mark.parametrize("error", [None, ModelChanged("the worker came back as another model")])
def test_model_changed_has_the_answer_so_far(server: Any, client: Any, error: LineclearError | None) -> None:
    server.script = Replaced(server, [OLD, NEW], error=error)
    with pytest.raises(ModelChanged) as caught:
        client.with_settings(max_attempts=None, retry=QUICK).generate("x")
    assert (caught.value.text, caught.value.token_ids) == ("one two", (100, 101))
    assert len(server.requests) == (1 if error else 2)


@pytest.mark.parametrize("error", [None, ModelChanged("the worker came back as another model")])
@pytest.mark.parametrize("per_call", [False, True])
def test_restarted_delta_marks_the_new_answer(
    server: Any, client: Any, error: LineclearError | None, per_call: bool
) -> None:
    attempts = [OLD, NEW] if error else [OLD, NEW, NEW]
    server.script = Replaced(server, attempts, error=error)
    settings: dict[str, Any] = {"max_attempts": None, "retry": QUICK}
    wish = {"on_model_change": "restart"}
    chosen = client.with_settings(**settings) if per_call else client.with_settings(**settings, **wish)
    deltas, stream = chosen.read("x", **(wish if per_call else {}))
    assert [delta.restarted for delta in deltas] == [False] * 3 + [True] + [False] * 5
    again = deltas[3]
    assert (again.first_index, again.started.model_fingerprint) == (0, NEW)
    assert "".join(delta.text for delta in deltas[3:]) == stream.text == stream.result.text == "".join(OF[NEW])
    assert stream.result.token_ids == (100, 101, 102, 103)
    assert (stream.restarts, stream.result.restarts) == (1, 1)
    assert stream.resumes == stream.result.resumes == (0 if error else 1)
    last = server.requests[-1]
    assert not last.HasField("resume")
    assert not last.sampling.HasField("seed")


def test_restarts_are_bounded(server: Any, client: Any) -> None:
    changed = ModelChanged("again")
    server.script = Replaced(server, [OLD, NEW] * 2, error=changed)
    patient = client.with_settings(max_attempts=None, retry=QUICK, on_model_change="restart")
    assert patient.generate("x").restarts == 3
    server.script = Replaced(server, [OLD, NEW] * 4, error=changed)
    policy = RetryPolicy(first_pause_seconds=0.001, max_pause_seconds=0.002, max_resumes=2)
    with pytest.raises(ModelChanged):
        client.with_settings(max_attempts=None, retry=policy, on_model_change="restart").generate("x")


def test_request_with_a_fingerprint_never_restarts(server: Any, client: Any) -> None:
    server.script = Replaced(server, [OLD, NEW])
    restarting = client.with_settings(max_attempts=None, retry=QUICK, on_model_change="restart")
    with pytest.raises(ModelChanged):
        restarting.generate("x", model_fingerprint=OLD, model="mine")
    assert (server.requests[0].model_fingerprint, server.requests[0].model) == (OLD, "mine")


def test_changed_fingerprint_in_started_is_detected(server: Any, client: Any) -> None:
    """A server that does not compare fingerprints."""
    server.script = script = Replaced(server, [OLD, NEW])
    script.checks = False
    with pytest.raises(ModelChanged) as caught:
        client.with_settings(max_attempts=None, retry=QUICK).generate("x")
    assert caught.value.token_ids == (100, 101)


def test_model_replaced_before_start_is_retried(server: Any, client: Any) -> None:
    server.failures = [ModelReplaced("it had not begun", retry_after_seconds=0.0)]
    server.script = Replaced(server, [NEW])
    assert client.with_settings(max_attempts=None, retry=QUICK).generate("x").text == "".join(OF[NEW])


def test_attach_detects_another_request_of_that_id(server: Any) -> None:
    """The server was started again, and the name given to another request."""
    seeds = [1, 2]

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        seed = seeds.pop(0)
        yield server.started(model_fingerprint=OLD, seed=seed)
        yield server.tokens(0, 100, text="a")
        if seeds:
            server.fail(context, ShutdownInterrupted("gone", retry_after_seconds=0.0))
        yield server.tokens(1, 101, text="b")
        yield server.finished(2)

    server.script = script
    server.submitted["job"] = pb.GenerateRequest()
    with Client(server.target, retry=QUICK) as client, pytest.raises(DataLoss, match="another seed"):
        client.submitted("job").result()


def test_invalid_on_model_change_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="one of error, restart"):
        Client(transport=FakeTransport(), on_model_change="again")  # type: ignore[arg-type]


def test_fake_transport_plays_a_model_change() -> None:
    fake = FakeTransport([Answer(pieces=("old ", "words"), error=ModelChanged("replaced")), "new words"])
    client = Client(transport=fake, retry=QUICK, on_model_change="restart")
    with client.stream("x") as stream:
        pieces = [(delta.text, delta.restarted) for delta in stream]
    assert pieces == [
        ("", False),
        ("old ", False),
        ("words", False),
        ("", True),
        ("new ", False),
        ("words", False),
        ("", False),
    ]
    assert stream.result.text == "new words"


def test_command_fails_or_shows_only_the_new_answer(server: Any, cli: Any) -> None:
    def replaced() -> Replaced:
        return Replaced(server, [OLD, NEW], error=ModelChanged("replaced"))

    server.script = replaced()
    failed = cli("generate", "x")
    assert failed.exit_code == 110
    assert failed.stdout == "one two\n"
    server.script = replaced()
    done = cli("generate", "x", "--on-model-change", "restart")
    assert (done.exit_code, done.stdout) == (0, "uno dos tres quatro\n")
    assert "starts over" in done.stderr
    server.script = replaced()
    lines = cli("generate", "x", "--json", "--deltas", "--on-model-change", "restart").stdout.splitlines()
    *deltas, result = map(json.loads, lines)
    assert [n for n, line in enumerate(deltas) if line["delta"].get("restarted")] == [3]
    assert result["result"]["restarts"] == 1
    server.script = replaced()
    said = cli("chat", "--on-model-change", "restart", input="hi\n")
    assert re.search(r"^uno dos tres quatro$", said.stdout, re.MULTILINE)
    assert "one" not in said.stdout
