"""The model directory is replaced during a restart of the worker or the server: no answer mixes two models."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engine_harness import eventually
from support.time_limits import PATIENCE_SECONDS
from support.toy import fingerprint
from support.toy_service import ToyService, answer, text_of, toy_service

from lineclear.client import Client, RetryPolicy, Stream
from lineclear.errors import LineclearError, ModelChanged

LENGTH = 300
PROMPT = [5, 6, 7]
PARAMETERS: dict[str, Any] = {"max_tokens": LENGTH, "seed": 3, "ignore_eos": True}
PATIENT = RetryPolicy(first_pause_seconds=0.01, max_pause_seconds=0.2, max_resumes=1000)


def right(model: str) -> list[int]:
    return answer(PROMPT, LENGTH, model=model, seed=3)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model-name"
    path.write_text("")
    return path


@pytest.fixture
def service(tmp_path: Path, model: Path) -> Iterator[ToyService]:
    slow = {"min_step_seconds": 0.002, "max_step_seconds": 0.003}
    with toy_service(tmp_path, model_file=str(model), **slow) as service:
        yield service


def worker_of(scheduler: int) -> int:
    """Return the pid of a scheduler's worker."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # processes of other tests exit in between
            if int(stat.read_text().rpartition(") ")[2].split()[1]) == scheduler:
                return int(stat.parent.name)
    raise AssertionError(f"process {scheduler} has no child")


def kill_worker(service: ToyService) -> None:
    os.kill(worker_of(service.pid), signal.SIGKILL)


def restart(service: ToyService) -> None:
    service.kill()
    service.start()


REPLACE = pytest.mark.parametrize("replace", [kill_worker, restart])


def read(stream: Stream, act: Callable[[], None]) -> list[Any]:
    """Return the deltas of an answer; call `act()` once some tokens have arrived."""
    deltas = []
    acting: threading.Thread | None = None
    try:
        with stream:
            for delta in stream:
                deltas.append(delta)
                if acting is None and len(stream.token_ids) >= 20:
                    acting = threading.Thread(target=act)
                    acting.start()
    finally:
        assert acting is not None
        acting.join(PATIENCE_SECONDS)
    return deltas


@REPLACE
def test_answer_of_the_first_model_ends_at_the_swap(
    service: ToyService, model: Path, replace: Callable[[ToyService], None]
) -> None:
    with Client(service.target, retry=PATIENT) as client:
        assert client.model().model_fingerprint == fingerprint("")
        stream = client.stream(PROMPT, **PARAMETERS)
        model.write_text("b")
        with pytest.raises(ModelChanged) as caught:
            read(stream, lambda: replace(service))
        error = caught.value
        assert error.metadata["model_fingerprint"] == fingerprint("b")
        assert error.metadata["expected_model_fingerprint"] == fingerprint("")
        assert 20 <= len(error.token_ids) < LENGTH
        assert list(error.token_ids) == right("")[: len(error.token_ids)]
        assert text_of(right("")).startswith(error.text.rstrip("\ufffd"))
        assert client.model().model_fingerprint == fingerprint("b")
        whole = client.generate(PROMPT, **PARAMETERS)
        assert (list(whole.token_ids), whole.text) == (right("b"), text_of(right("b")))


@REPLACE
def test_restarted_answer_comes_from_the_new_model_only(
    service: ToyService, model: Path, replace: Callable[[ToyService], None]
) -> None:
    with Client(service.target, retry=PATIENT, on_model_change="restart") as client:
        stream = client.stream(PROMPT, **PARAMETERS)
        model.write_text("b")
        deltas = read(stream, lambda: replace(service))
        restarts = [number for number, delta in enumerate(deltas) if delta.restarted]
        assert len(restarts) == 1
        old = [token for delta in deltas[: restarts[0]] for token in delta.token_ids]
        new = [token for delta in deltas[restarts[0] :] for token in delta.token_ids]
        assert old == right("")[: len(old)]
        assert new == list(stream.result.token_ids) == right("b")
        assert stream.result.text == text_of(right("b"))
        assert stream.result.started.model_fingerprint == fingerprint("b")


def test_submitted_answer_in_progress_fails(service: ToyService, model: Path) -> None:
    with Client(service.target, retry=PATIENT) as client:
        done = client.submit(PROMPT, max_tokens=5, seed=3, ignore_eos=True)
        assert done.result().started.model_fingerprint == fingerprint("")
        going_on = client.submit(PROMPT, **PARAMETERS)
        with going_on.attach() as stream:
            for _ in stream:
                if len(stream.token_ids) >= 20:
                    break
        model.write_text("b")
        kill_worker(service)
        with pytest.raises(ModelChanged):
            going_on.result()
        snapshot = going_on.poll()
        assert snapshot.state == "failed"
        assert isinstance(snapshot.error, ModelChanged)
        assert list(snapshot.token_ids) == right("")[: len(snapshot.token_ids)]
        kept = done.result()
        assert (list(kept.token_ids), kept.started.model_fingerprint) == (right("")[:5], fingerprint(""))


def test_requests_wait_while_the_worker_restarts(service: ToyService, model: Path) -> None:
    with Client(service.target, max_attempts=1) as client:
        assert client.model().model_fingerprint == fingerprint("")
        model.unlink()  # no worker can start without it
        kill_worker(service)
        failures: list[LineclearError] = []

        def generate() -> None:
            try:
                client.generate(PROMPT, model_fingerprint=fingerprint(""), **PARAMETERS)
            except LineclearError as error:
                failures.append(error)

        thread = threading.Thread(target=generate)
        thread.start()
        eventually(lambda: client.stats().gauges.num_requests_waiting > 0)
        assert client.model().model_fingerprint == fingerprint("")
        model.write_text("b")
        thread.join(PATIENCE_SECONDS)
        assert [error.reason for error in failures] == ["MODEL_CHANGED"]
        assert client.model().model_fingerprint == fingerprint("b")
