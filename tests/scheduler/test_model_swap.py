"""The model directory is replaced during a restart of the worker or the server: no answer mixes two models."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.engine_harness import eventually
from support.toy import fingerprint
from support.toy_service import ToyService, answer, text_of, toy_service

from lineclear.client import Client, RetryPolicy, Stream
from lineclear.errors import ModelChanged

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


def read(stream: Stream) -> list[Any]:
    with stream:
        return list(stream)


@pytest.mark.parametrize("replace", [kill_worker, restart])
def test_answer_of_the_first_model_ends_at_the_swap(
    service: ToyService, model: Path, replace: Callable[[ToyService], None]
) -> None:
    """Another client has the same answer restarted, and it comes from the new model only."""
    with (
        Client(service.target, retry=PATIENT) as client,
        Client(service.target, retry=PATIENT, on_model_change="restart") as other,
        ThreadPoolExecutor(2) as pool,
    ):
        assert client.model().model_fingerprint == fingerprint("")
        stream, restarted = client.stream(PROMPT, **PARAMETERS), other.stream(PROMPT, **PARAMETERS)
        ending, going_on = pool.submit(read, stream), pool.submit(read, restarted)
        eventually(lambda: min(len(stream.token_ids), len(restarted.token_ids)) >= 20)
        model.write_text("b")
        replace(service)
        error = ending.exception()
        assert isinstance(error, ModelChanged)
        assert error.metadata["model_fingerprint"] == fingerprint("b")
        assert error.metadata["expected_model_fingerprint"] == fingerprint("")
        assert 20 <= len(error.token_ids) < LENGTH
        assert list(error.token_ids) == right("")[: len(error.token_ids)]
        assert text_of(right("")).startswith(error.text.rstrip("�"))
        assert client.model().model_fingerprint == fingerprint("b")

        deltas = going_on.result()
        (first,) = (number for number, delta in enumerate(deltas) if delta.restarted)
        old = [token for delta in deltas[:first] for token in delta.token_ids]
        new = [token for delta in deltas[first:] for token in delta.token_ids]
        assert old == right("")[: len(old)]
        assert new == list(restarted.result.token_ids) == right("b")
        assert restarted.result.text == text_of(right("b"))
        assert restarted.result.started.model_fingerprint == fingerprint("b")


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
