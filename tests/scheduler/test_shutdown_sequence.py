"""Scheduler and worker as two containers: in every stop order, each running stream completes."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from support.engine_harness import ENVIRONMENT, short_directory
from support.processes import VOCABULARY, Process, Running
from support.time_limits import PATIENCE_SECONDS
from support.toy import expected
from support.toy_worker import ToyOptions

from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import inference_pb2_grpc
from lineclear.wire.messages import Sampling

NUM_STREAMS, NUM_TOKENS = 12, 40
TOY = ToyOptions(vocab_size=VOCABULARY, min_step_seconds=0.02, max_step_seconds=0.02)


class Split:
    """A scheduler process and a worker process that share only the folder of their sockets."""

    def __init__(self, model: Path, directory: Path) -> None:
        sockets = ("--socket-directory", str(directory / "sockets"))
        drain = ("--drain-timeout-seconds", "60")
        self.scheduler = Process(
            ["--model", str(model), "--listen", "127.0.0.1:0", "--log-format", "json", *sockets, *drain]
        )
        self.worker = subprocess.Popen(TOY.arguments(directory / "sockets"), env=ENVIRONMENT)
        self.address = self.scheduler.wait_for("serving")["address"]

    def stop_scheduler(self) -> None:
        self.scheduler.popen.send_signal(signal.SIGTERM)
        self.scheduler.wait_for("shutdown_started")

    def stop_worker(self) -> None:
        """Send SIGTERM, and return when the scheduler has noticed."""
        self.worker.send_signal(signal.SIGTERM)
        self.scheduler.wait_for("worker_stopping")

    def stop_both(self) -> None:
        self.worker.send_signal(signal.SIGTERM)
        self.scheduler.popen.send_signal(signal.SIGTERM)


@pytest.fixture
def split(model: Path) -> Iterator[Split]:
    directory = short_directory()
    running = Split(model, directory)
    try:
        yield running
    finally:
        running.worker.kill()
        running.worker.wait()
        running.scheduler.end()
        shutil.rmtree(directory)


STOP_ORDERS: dict[str, Callable[[Split], None]] = {
    "worker, then scheduler": lambda split: (split.stop_worker(), split.stop_scheduler()),  # type: ignore[dict-item]
    "scheduler, then worker": lambda split: (split.stop_scheduler(), split.stop_worker()),  # type: ignore[dict-item]
    "both at once": Split.stop_both,
}


@pytest.mark.parametrize("stop", STOP_ORDERS.values(), ids=STOP_ORDERS)
def test_streams_complete_in_every_stop_order(split: Split, stop: Callable[[Split], None]) -> None:
    with grpc.insecure_channel(split.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        answers = stream(stub, lambda: stop(split))
    assert answers == [right_answer(seed) for seed in range(NUM_STREAMS)]
    assert split.worker.wait(PATIENCE_SECONDS) == 0
    assert split.scheduler.exit_code() == 0


def test_streams_complete_when_both_processes_stop(start: Callable[..., Running]) -> None:
    """As systemd stops a service: SIGTERM to every process of the control group. No new worker starts."""
    server = start("--drain-timeout-seconds", "60", min_step_seconds=0.02, max_step_seconds=0.02)
    worker = server.wait_for("worker_started")["pid"]

    def stop() -> None:
        subprocess.run(["kill", "-TERM", str(worker), str(server.popen.pid)], check=True)

    assert stream(server.stub, stop) == [right_answer(seed) for seed in range(NUM_STREAMS)]
    assert server.exit_code() == 0
    # After its last request the scheduler stops its worker too, which may be the worker's second signal.
    assert server.wait_for("worker_exited")["exit_code"] in (0, -signal.SIGTERM)
    assert [line for line in server.lines if line.get("event") == "worker_started"][1:] == []


def stream(stub: inference_pb2_grpc.InferenceServiceStub, stop: Callable[[], None]) -> list[list[int]]:
    calls = [
        stub.Generate(
            pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=[5]),
                sampling={"seed": seed, "max_tokens": NUM_TOKENS, "ignore_eos": True},  # type: ignore[arg-type]
            )
        )
        for seed in range(NUM_STREAMS)
    ]
    answers = [list(next(call).token_ids) for call in calls]
    stop()
    for answer, call in zip(answers, calls, strict=True):
        answer += [token for response in call for token in response.token_ids]
    return answers


def right_answer(seed: int) -> list[int]:
    return expected([5], Sampling(seed=seed), NUM_TOKENS, VOCABULARY)
