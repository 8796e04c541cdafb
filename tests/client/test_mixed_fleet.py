"""Several replicas with different models: an answer resumes at a replica of its model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from client.conftest import Either, ScriptedServer

from lineclear.client import Client, RetryPolicy
from lineclear.errors import LineclearError, ModelChanged, ShutdownInterrupted
from lineclear.v1 import inference_pb2 as pb

OLD, NEW = "old", "new"
WORDS = {OLD: ("one", " two", " three"), NEW: ("uno", " dos", " tres")}


class Fleet:
    """Servers of these models. The first answer is cut off by `error` at its second word."""

    def __init__(self, *models: str, error: LineclearError | None = None) -> None:
        self.servers = [ScriptedServer("127.0.0.1:0") for _ in models]
        self.target = "ipv4:" + ",".join(server.target for server in self.servers)
        self._error = error or ShutdownInterrupted("gone", retry_after_seconds=0.0)
        self._uncut = threading.Lock()  # taken by the answer that is cut off
        for server, model in zip(self.servers, models, strict=True):
            server.script = self._script(server, model)

    def stop(self) -> None:
        for server in self.servers:
            server.stop()

    @property
    def num_requests(self) -> int:
        return sum(len(server.requests) for server in self.servers)

    def _script(self, server: ScriptedServer, model: str) -> Any:
        def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
            needed = request.resume.model_fingerprint or request.model_fingerprint
            if needed and needed != model:
                server.fail(context, ModelChanged("another model"))
            yield server.started(model_fingerprint=model)
            words = WORDS[model]
            for index in range(len(request.resume.token_ids), len(words)):
                if index == 1 and model == OLD and self._uncut.acquire(blocking=False):
                    server.fail(context, self._error)
                yield server.tokens(index, index + 100, text=words[index])
            yield server.finished(len(words))

        return script


@pytest.fixture
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    fleet = Fleet(*request.param)
    yield fleet
    fleet.stop()


def client_of(fleet: Fleet, kind: str, **settings: Any) -> Either:
    """Return a client with short pauses."""
    retry = RetryPolicy(first_pause_seconds=0.01, max_pause_seconds=0.02, max_replicas=settings.pop("max_replicas", 16))
    return Either(kind, fleet.target, max_attempts=None, retry=retry, **settings)


BOTH = pytest.mark.parametrize("kind", ["sync", "asyncio"])


@BOTH
@pytest.mark.parametrize("on_model_change", ["error", "restart"])
@pytest.mark.parametrize("error", [None, ModelChanged("the worker came back as another model")])
def test_replica_of_the_same_model_resumes(kind: str, on_model_change: str, error: LineclearError | None) -> None:
    """The deltas are those of an answer that was not cut off, and the result says that it was."""
    fleet = Fleet(OLD, NEW, OLD, NEW, error=error)
    try:
        client = client_of(fleet, kind, on_model_change=on_model_change)
        deltas, stream = client.read("x", model_fingerprint=OLD)
        assert "".join(delta.text for delta in deltas) == "one two three"
        assert sum(delta.started is not None for delta in deltas) == 1
        assert (stream.resumes, stream.result.resumes, stream.result.restarts) == (1, 1, 0)
    finally:
        fleet.stop()


@BOTH
@pytest.mark.parametrize("fleet", [(NEW, NEW)], indirect=True)
@pytest.mark.parametrize("max_replicas", [0, 3])
def test_replica_search_is_bounded(fleet: Fleet, kind: str, max_replicas: int) -> None:
    with pytest.raises(ModelChanged):
        client_of(fleet, kind, max_replicas=max_replicas).generate("x", model_fingerprint=OLD)
    assert fleet.num_requests == 1 + max_replicas


@BOTH
@pytest.mark.parametrize("fleet", [(NEW, NEW)], indirect=True)
def test_deadline_ends_the_replica_search(fleet: Fleet, kind: str) -> None:
    retry = RetryPolicy(first_pause_seconds=1.0, max_replicas=10_000)
    with pytest.raises(ModelChanged):
        Either(kind, fleet.target, max_attempts=None, retry=retry).generate(
            "x", model_fingerprint=OLD, timeout_seconds=1.0
        )
    assert fleet.num_requests < 100


def test_single_server_target_is_asked_once() -> None:
    fleet = Fleet(NEW)
    try:
        with Client(fleet.servers[0].target) as client, pytest.raises(ModelChanged):
            client.generate("x", model_fingerprint=OLD)
        assert fleet.num_requests == 1
    finally:
        fleet.stop()


@pytest.mark.parametrize("on_model_change", ["error", "restart"])
def test_without_replica_the_answer_fails_or_restarts(server: Any, client: Any, on_model_change: str) -> None:
    """The last of the old model stops in the middle of an answer."""
    begun: list[None] = []

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if request.HasField("resume"):
            server.fail(context, ModelChanged("another model"))
        words = WORDS[NEW if begun else OLD]
        yield server.started(model_fingerprint=NEW if begun else OLD)
        for index, word in enumerate(words):
            if index == 1 and not begun:
                begun.append(None)
                server.fail(context, ShutdownInterrupted("gone", retry_after_seconds=0.0))
            yield server.tokens(index, index + 100, text=word)
        yield server.finished(len(words))

    server.script = script
    client.target = f"ipv4:{server.target}"
    retry = RetryPolicy(first_pause_seconds=0.001, max_pause_seconds=0.002, max_replicas=3)
    chosen = client.with_settings(max_attempts=None, retry=retry, on_model_change=on_model_change)
    if on_model_change == "restart":
        result = chosen.generate("x")
        assert (result.text, result.restarts, result.resumes) == ("uno dos tres", 1, 1)
    else:
        with pytest.raises(ModelChanged) as caught:
            chosen.generate("x")
        assert (caught.value.text, caught.value.token_ids) == ("one", (100,))
    assert sum(request.HasField("resume") for request in server.requests) == 4


def test_submitted_request_has_no_replicas(server: Any) -> None:
    calls = []

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        calls.append(None)
        yield server.started(model_fingerprint=OLD)
        server.fail(context, ModelChanged("the worker came back as another model"))

    server.script = script
    server.submitted["job"] = pb.GenerateRequest()
    with Client(f"ipv4:{server.target}") as client, pytest.raises(ModelChanged):
        client.submitted("job").result()
    assert len(calls) == 1
