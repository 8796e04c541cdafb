"""Temporary shortages of threads, processes and the model volume, in whole processes: streams wait, none is lost."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from campaigns.server import is_running
from support.processes import RUN, VOCABULARY, Running, endless, starting, until
from support.small_tokenizers import byte_level, save
from support.time_limits import PATIENCE_SECONDS
from support.toy import expected

from lineclear.v1 import inference_pb2 as pb
from lineclear.wire.messages import Sampling

# While the file exists the scheduler gets neither a thread nor a process, as at the limit of a control group.
WITHOUT_TASKS = """
import errno, os, subprocess, threading
def barred(name):
    real = getattr(name[0], name[1])
    def call(*args, **options):
        if os.path.exists({path!r}):
            raise name[2]
        return real(*args, **options)
    setattr(name[0], name[1], call)
barred((threading.Thread, "start", RuntimeError("can't start new thread")))
barred((subprocess, "Popen", BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")))
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    with starting(save(tmp_path, byte_level())) as start_scheduler:
        yield start_scheduler


def kill_worker(server: Running) -> None:
    os.kill(server.wait_for("worker_started")["pid"], signal.SIGKILL)


def check_answer(first: pb.GenerateResponse, rest: Any) -> None:
    request = endless()
    answer = [token for message in (first, *rest) for token in message.token_ids]
    prompt, limit = list(request.token_ids.ids), request.sampling.max_tokens
    assert answer == expected(prompt, Sampling(seed=request.sampling.seed), limit, VOCABULARY)


def is_past_suspicion(read: list[pb.GenerateResponse], seen: int) -> bool:
    """Return whether the request has more tokens than steps in flight, so that it is no suspect."""
    return len(read) > seen + 4


def test_temporary_lack_of_threads_and_processes(start: Callable[..., Running], tmp_path: Path) -> None:
    flag = tmp_path / "short"
    code = RUN.replace("sys.exit", WITHOUT_TASKS.format(path=str(flag)) + "sys.exit", 1)
    server = start(code=code, min_step_seconds=0.003, max_step_seconds=0.003)
    call = server.stub.Generate(endless())
    first = next(call)
    flag.touch()
    kill_worker(server)
    server.wait_for("worker_start_failed", count=2)
    text = "a long text " * 1000  # long enough to be tokenized in a thread
    assert server.stub.Tokenize(pb.TokenizeRequest(text=text)).token_ids
    flag.unlink()
    check_answer(first, call)
    assert server.popen.poll() is None


def test_kills_do_not_use_up_the_crash_budget(start: Callable[..., Running]) -> None:
    server = start("--max-worker-crashes", "2", min_step_seconds=0.005, max_step_seconds=0.005)
    read: list[pb.GenerateResponse] = []
    reader = threading.Thread(
        target=lambda: [read.append(part) for part in server.stub.Generate(endless())], daemon=True
    )
    reader.start()
    for number in range(1, 5):
        until(partial(is_past_suspicion, read, len(read)))
        os.kill(server.wait_for("worker_started", count=number)["pid"], signal.SIGKILL)
        server.wait_for("worker_joined", count=number + 1)
    reader.join(PATIENCE_SECONDS)
    check_answer(read[0], read[1:])


def test_standby_worker_takes_over(start: Callable[..., Running]) -> None:
    server = start("--standby-worker", min_step_seconds=0.003, max_step_seconds=0.003)
    call = server.stub.Generate(endless())
    first = next(call)
    standby = server.wait_for("standby_ready")["pid"]
    kill_worker(server)
    assert server.wait_for("worker_started", count=2)["pid"] == standby
    check_answer(first, call)
    another = server.wait_for("standby_ready", count=2)["pid"]
    server.popen.kill()
    until(lambda: not is_running(another))
