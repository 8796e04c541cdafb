"""The model is replaced during an answer: another replica resumes it, or it starts over, or ModelChanged is raised."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from client.conftest import ScriptedServer, finished, started, tokens

from lineclear.client import Client, RetryPolicy
from lineclear.client.testing import FakeTransport
from lineclear.errors import DataLoss, InternalError, LineclearError, ModelChanged, ModelReplaced, ShutdownInterrupted
from lineclear.v1 import inference_pb2 as pb

QUICK = RetryPolicy(first_pause_seconds=0.001, max_pause_seconds=0.002)
BACK = ModelChanged("the worker came back as another model")
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
        yield started(model_fingerprint=model, **fields)
        words = list(enumerate(OF[model]))[len(resume.token_ids) :]
        for index, word in words[: self.then] if self.models else words:
            yield tokens(index, index + 100, text=word)
        if self.models:
            server.fail(context, self.error)
        yield finished(len(OF[model]))


@pytest.mark.parametrize("error", [None, BACK])
def test_model_changed_has_the_answer_so_far(server: Any, client: Any, error: LineclearError | None) -> None:
    server.script = Replaced(server, [OLD, NEW], error=error)
    with pytest.raises(ModelChanged) as caught:
        client.with_settings(max_attempts=None, retry=QUICK).generate("x")
    assert (caught.value.text, caught.value.token_ids) == ("one two", (100, 101))
    assert len(server.requests) == (1 if error else 2)


@pytest.mark.parametrize("error", [None, BACK])
@pytest.mark.parametrize("per_call", [False, True])
def test_restarted_delta_marks_the_new_answer(
    server: Any, client: Any, error: LineclearError | None, per_call: bool
) -> None:
    server.script = Replaced(server, [OLD, NEW] if error else [OLD, NEW, NEW], error=error)
    wish = {"on_model_change": "restart"}
    chosen = client.with_settings(max_attempts=None, retry=QUICK, **({} if per_call else wish))
    deltas, stream = chosen.read("x", **(wish if per_call else {}))
    assert [delta.restarted for delta in deltas] == [False] * 3 + [True] + [False] * 5
    assert (deltas[3].first_index, deltas[3].started.model_fingerprint) == (0, NEW)
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
    with pytest.raises(ModelChanged):
        patient.with_settings(retry=replace(QUICK, max_resumes=2)).generate("x")


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
    cut = ShutdownInterrupted("gone", retry_after_seconds=0.0)
    server.play(
        [started(model_fingerprint=OLD, seed=1), tokens(0, 100, text="a"), cut],
        [started(model_fingerprint=OLD, seed=2), tokens(1, 101, text="b"), finished(2)],
    )
    server.submitted["job"] = pb.GenerateRequest()
    with Client(server.target, retry=QUICK) as client, pytest.raises(DataLoss, match="another seed"):
        client.submitted("job").result()


def test_invalid_on_model_change_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="one of error, restart"):
        Client(transport=FakeTransport(), on_model_change="again")  # type: ignore[arg-type]


def test_command_fails_or_shows_only_the_new_answer(server: Any, cli: Any) -> None:
    def replaced() -> Replaced:
        return Replaced(server, [OLD, NEW], error=ModelChanged("replaced"))

    server.script = replaced()
    failed = cli("generate", "x")
    assert (failed.exit_code, failed.stdout) == (110, "one two\n")
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


# --- several replicas with different models: an answer resumes at a replica of its model ---


class Fleet:
    """Servers of these models. The first answer of OLD is cut off by `error` at its second word."""

    def __init__(self, *models: str) -> None:
        self.servers = [ScriptedServer("127.0.0.1:0") for _ in models]
        self.target = "ipv4:" + ",".join(server.target for server in self.servers)
        self.error: LineclearError = ShutdownInterrupted("gone", retry_after_seconds=0.0)
        self._uncut = threading.Lock()  # taken by the answer that is cut off
        for server, model in zip(self.servers, models, strict=True):
            server.script = self._script(server, model)

    @property
    def num_requests(self) -> int:
        return sum(len(server.requests) for server in self.servers)

    def _script(self, server: ScriptedServer, model: str) -> Any:
        def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
            needed = request.resume.model_fingerprint or request.model_fingerprint
            if needed and needed != model:
                server.fail(context, ModelChanged("another model"))
            yield started(model_fingerprint=model)
            words = OF[model]
            for index in range(len(request.resume.token_ids), len(words)):
                if index == 1 and model == OLD and self._uncut.acquire(blocking=False):
                    server.fail(context, self.error)
                yield tokens(index, index + 100, text=words[index])
            yield finished(len(words))

        return script


@pytest.fixture
def fleet(request: pytest.FixtureRequest, client: Any) -> Iterator[Fleet]:
    """A fleet of the models of the parameter, which is the target of `client`."""
    fleet = Fleet(*request.param)
    client.target = fleet.target
    yield fleet
    for server in fleet.servers:
        server.stop()


@pytest.mark.parametrize("fleet", [(OLD, NEW, OLD, NEW)], indirect=True)
@pytest.mark.parametrize("on_model_change", ["error", "restart"])
@pytest.mark.parametrize("error", [None, BACK])
def test_replica_of_the_same_model_resumes(
    fleet: Fleet, client: Any, on_model_change: str, error: LineclearError | None
) -> None:
    """The deltas are those of an answer that was not cut off, and the result says that it was."""
    fleet.error = error or fleet.error
    settings = {"max_attempts": None, "retry": QUICK, "on_model_change": on_model_change}
    deltas, stream = client.with_settings(**settings).read("x", model_fingerprint=OLD)
    assert "".join(delta.text for delta in deltas) == "one two three"
    assert sum(delta.started is not None for delta in deltas) == 1
    assert (stream.resumes, stream.result.resumes, stream.result.restarts) == (1, 1, 0)


@pytest.mark.parametrize("fleet", [(NEW, NEW)], indirect=True)
@pytest.mark.parametrize("max_replicas", [0, 3])
def test_replica_search_is_bounded(fleet: Fleet, client: Any, max_replicas: int) -> None:
    retry = replace(QUICK, max_replicas=max_replicas)
    with pytest.raises(ModelChanged):
        client.with_settings(max_attempts=None, retry=retry).generate("x", model_fingerprint=OLD)
    assert fleet.num_requests == 1 + max_replicas


@pytest.mark.parametrize("fleet", [(NEW, NEW)], indirect=True)
def test_deadline_ends_the_replica_search(fleet: Fleet, client: Any) -> None:
    retry = RetryPolicy(first_pause_seconds=0.5, max_replicas=10_000)
    with pytest.raises(ModelChanged):
        client.with_settings(max_attempts=None, retry=retry).generate("x", model_fingerprint=OLD, timeout_seconds=0.5)
    assert fleet.num_requests < 100


def test_single_server_target_is_asked_once(server: Any, client: Any) -> None:
    server.failures = [ModelChanged("another model")] * 2
    with pytest.raises(ModelChanged):
        client.with_settings(max_attempts=None, retry=QUICK).generate("x", model_fingerprint=OLD)
    assert len(server.requests) == 1


@pytest.mark.parametrize("on_model_change", ["error", "restart"])
def test_without_replica_the_answer_fails_or_restarts(server: Any, client: Any, on_model_change: str) -> None:
    """The last of the old model stops in the middle of an answer. The policy allows three more replicas."""
    server.script = Replaced(server, [OLD, *[NEW] * 5], then=1)
    client.target = f"ipv4:{server.target}"
    retry = replace(QUICK, max_replicas=3)
    chosen = client.with_settings(max_attempts=None, retry=retry, on_model_change=on_model_change)
    if on_model_change == "restart":
        result = chosen.generate("x")
        assert (result.text, result.restarts, result.resumes) == ("".join(OF[NEW]), 1, 1)
    else:
        with pytest.raises(ModelChanged) as caught:
            chosen.generate("x")
        assert (caught.value.text, caught.value.token_ids) == ("one", (100,))
    assert sum(request.HasField("resume") for request in server.requests) == 4


def test_submitted_request_has_no_replicas(server: Any) -> None:
    server.play([started(model_fingerprint=OLD), BACK], [InternalError("asked again")])
    server.submitted["job"] = pb.GenerateRequest()
    with Client(f"ipv4:{server.target}") as client, pytest.raises(ModelChanged):
        client.submitted("job").result()
